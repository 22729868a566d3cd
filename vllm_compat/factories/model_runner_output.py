"""What a step's model run brings back to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter

__all__ = ["make_model_runner_output"]


def make_model_runner_output(
    token_ids: Mapping[str, Sequence[int]],
    *,
    logprobs: Any = UNSET,
    prompt_logprobs_dict: Any = UNSET,
    pooler_output: Any = UNSET,
    kv_connector_output: Any = UNSET,
    ec_connector_output: Any = UNSET,
    num_nans_in_logits: Any = UNSET,
    cudagraph_stats: Any = UNSET,
    routed_experts: Any = UNSET,
    sampling_masks: Any = UNSET,
    prompt_token_id_logprobs_dict: Any = UNSET,
    aux_output_connector_output: Any = UNSET,
) -> Any:
    """A native ``ModelRunnerOutput``.

    Args:
        token_ids: Request id -> tokens sampled in this step, in row order; empty for a prefill chunk that samples
            nothing.
        logprobs, prompt_logprobs_dict, …: as in ModelRunnerOutput; UNSET ones keep the release's default.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
    """
    request_ids = list(token_ids)
    return adapter("model_runner_output").build(
        {
            "req_ids": request_ids,
            "req_id_to_index": {request_id: index for index, request_id in enumerate(request_ids)},
            "sampled_token_ids": [list(token_ids[request_id]) for request_id in request_ids],
            "logprobs": logprobs,
            "prompt_logprobs_dict": prompt_logprobs_dict,
            "pooler_output": pooler_output,
            "kv_connector_output": kv_connector_output,
            "ec_connector_output": ec_connector_output,
            "num_nans_in_logits": num_nans_in_logits,
            "cudagraph_stats": cudagraph_stats,
            "routed_experts": routed_experts,
            "sampling_masks": sampling_masks,
            "prompt_token_id_logprobs_dict": prompt_token_id_logprobs_dict,
            "aux_output_connector_output": aux_output_connector_output,
        }
    )
