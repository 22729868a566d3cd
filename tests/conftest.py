"""Settings for every test."""

from hypothesis import settings

# The machine that runs the tests is often busy with something else; how long an example takes says nothing.
settings.register_profile("vllm_compat", deadline=None)
settings.load_profile("vllm_compat")
