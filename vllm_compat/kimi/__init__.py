"""The reference consumer of `vllm_compat`.

Conversations -> hidden states -> EAGLE-3 head -> served and measured.

Importing this package imports neither vLLM nor torch; each stage loads what it needs when it runs, so that
extraction (needs vLLM) and training (does not) may live in two environments.
"""
