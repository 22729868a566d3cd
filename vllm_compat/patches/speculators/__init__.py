"""speculators 0.3.0 and 0.4.0 generate their data on every vLLM; ``enable("speculators")``.

Their files stay as they are. What is replaced when they are imported:

- ``imports``: what keeps their modules from being imported;
- ``generator``: the inside of ``VllmHiddenStatesGenerator``;
- ``worker``: their worker extension, for whoever has one of his own built on it;
- ``record``: what their files do not say, and folders that must not be continued.
"""

from __future__ import annotations

from vllm_compat.patches.patch import Patch
from vllm_compat.patches.speculators import generator, imports, record, worker

PATCH = Patch(
    name="speculators",
    changes=(*imports.CHANGES, *generator.CHANGES, *worker.CHANGES, *record.CHANGES),
    since=(0, 10, 2),
    until=None,
    platform="",
    phase="worker",
    why=(
        "speculators 0.3.0 builds vLLM's scheduler, KV cache and executor by hand and breaks in thirteen places from "
        "0.11.1 to 0.33.0; on 0.11.0, which it pins, it returns rows of other prompts as soon as a batch exceeds the "
        "token budget. 0.4.0 pins 0.12 to 0.16, and pairs states with masks of other prompts from eleven prompts on."
    ),
    upstream="https://github.com/vllm-project/speculators/issues/279",
    remove_when="nobody generates data with speculators below 0.5.0, which asks a vLLM server for hidden states",
    library="speculators",
    library_since=(0, 3, 0),
    library_until=(0, 5, 0),
)
