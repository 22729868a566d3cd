"""A patch set for TRL 0.25.0, as docs/patching-your-library.md describes it; the files of TRL stay as they are.

Its ``trl vllm-serve`` was written for vLLM 0.10 and 0.11 (huggingface/trl#4617).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches import Lend, Patch, Replace

MODULE = "trl.scripts.vllm_serve"


def _stand_in(place: str) -> Any:
    """What took the place of a name: vLLM's own, where there is one."""
    name = place.partition(":")[2]
    if name == "get_open_port":
        from vllm_compat.moved import get_open_port

        return get_open_port
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams  # takes regex=… as well, and is asked for nothing else here


def _sampling_params(theirs: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_compat import make_sampling_params

    def sampling_params(guided_decoding: Any = None, truncate_prompt_tokens: int | None = None, **options: Any) -> Any:
        if truncate_prompt_tokens is not None:  # it always passes the option; set, vLLM has to have it
            options["truncate_prompt_tokens"] = truncate_prompt_tokens
        if guided_decoding is not None:
            options["structured_outputs"] = guided_decoding
        return make_sampling_params(**options)

    return sampling_params


def _flag(answer: Any) -> bool:
    """Since 5.0.0 transformers' helper answers with a pair, which is true whatever it says."""
    return bool(answer[0] if isinstance(answer, tuple) else answer)


PATCH = Patch(
    name="trl-vllm-serve",
    changes=(
        Lend(MODULE, ("vllm.sampling_params:GuidedDecodingParams", "vllm.utils:get_open_port"), make=_stand_in),
        Replace(MODULE, "SamplingParams", _sampling_params),
        Replace("trl.import_utils", "_vllm_ascend_available", _flag),
    ),
    since=(0, 12, 0),
    until=None,
    platform="",
    phase="worker",
    why="GuidedDecodingParams became StructuredOutputsParams, and get_open_port moved: the module cannot be imported.",
    upstream="https://github.com/huggingface/trl/issues/4617",
    remove_when="nobody runs TRL 0.25 beside vLLM 0.12 or newer",
    library="trl",
    library_since=(0, 25),
    library_until=(0, 26),
)
