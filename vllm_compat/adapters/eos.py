"""The end-of-sequence id, which from 0.17.0 on only the sampling params know."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.base import Need

__all__ = ["EOS_OF_PARAMS", "STOP_IDS_OF_PARAMS", "with_eos"]

_PARAMS = "vllm.sampling_params:SamplingParams"
#: What ``with_eos`` needs, and up to 0.16.0 all there is.
STOP_IDS_OF_PARAMS = Need(_PARAMS, reads=("_all_stop_token_ids",), read_only=True)
#: From 0.17.0 on the params keep the id too.
EOS_OF_PARAMS = Need(_PARAMS, reads=("eos_token_id", "_all_stop_token_ids"), read_only=True)


def with_eos(params: Any, eos_token_id: int) -> Any:
    """A copy of ``params`` that knows the end-of-sequence id, as vLLM's front end makes it.

    The id joins those that ``min_tokens`` suppresses, and from 0.17 it becomes ``SamplingParams.eos_token_id``.
    """
    params = params.clone()
    # clone() is shallow with skip_clone (0.14.0): the set would still be the caller's.
    params._all_stop_token_ids = set(params._all_stop_token_ids)
    # By position: the keyword was called model_eos_token_id up to 0.16.0.
    params.update_from_generation_config({}, eos_token_id)
    return params
