"""What a step brings back from the workers to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.errors import VllmCompatError

__all__ = [
    "make_draft_token_ids",
    "make_ec_connector_output",
    "make_kv_connector_output",
    "make_logprobs_lists",
    "make_logprobs_tensors",
    "make_model_runner_output",
]


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
        logprobs: From ``make_logprobs_lists``, rows in the order of ``token_ids``.
        prompt_logprobs_dict: Request id -> ``make_logprobs_tensors``, or None, for prompts that this step finished.
        pooler_output: Request id -> tensor, None where pooling goes on; or a list in row order.
        kv_connector_output: From ``make_kv_connector_output``.
        ec_connector_output: From ``make_ec_connector_output``.
        num_nans_in_logits: Request id -> NaNs.
        cudagraph_stats, …: as in ModelRunnerOutput; UNSET ones keep the release's default.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
    """
    request_ids = list(token_ids)
    if isinstance(pooler_output, Mapping):
        pooler_output = [pooler_output.get(request_id) for request_id in request_ids]
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


def make_draft_token_ids(draft_token_ids: Mapping[str, Sequence[int]]) -> Any:
    """A native ``DraftTokenIds``, for ``Scheduler.update_draft_token_ids``.

    Args:
        draft_token_ids: Request id -> draft tokens that the next step is to verify, () for none.
    """
    request_ids = list(draft_token_ids)
    return adapter("model_runner_output").build_drafts(request_ids, [list(draft_token_ids[key]) for key in request_ids])


def make_kv_connector_output(
    *,
    finished_sending: Any = UNSET,
    finished_recving: Any = UNSET,
    failed_recving: Any = UNSET,
    invalid_block_ids: Any = UNSET,
    expected_finished_count: Any = UNSET,
    kv_connector_stats: Any = UNSET,
    kv_cache_events: Any = UNSET,
    kv_connector_worker_meta: Any = UNSET,
) -> Any:
    """A native ``KVConnectorOutput``: what a step moved between KV caches.

    Args:
        finished_sending, finished_recving: Ids of requests whose blocks are sent, or have arrived.
        failed_recving: Ids of requests whose blocks did not arrive (0.30.0).
        invalid_block_ids: Blocks that could not be loaded; their requests are computed again (0.11.1).
        expected_finished_count, kv_connector_stats, kv_cache_events, kv_connector_worker_meta: as in KVConnectorOutput.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
    """
    return adapter("model_runner_output").build_kv_connector(
        {
            "finished_sending": _as_set(finished_sending),
            "finished_recving": _as_set(finished_recving),
            "failed_recving": _as_set(failed_recving),
            "invalid_block_ids": _as_set(invalid_block_ids),
            "expected_finished_count": expected_finished_count,
            "kv_connector_stats": kv_connector_stats,
            "kv_cache_events": kv_cache_events,
            "kv_connector_worker_meta": kv_connector_worker_meta,
        }
    )


def make_ec_connector_output(
    *,
    finished_sending: Any = UNSET,
    finished_recving: Any = UNSET,
    ec_connector_stats: Any = UNSET,
    ec_connector_worker_meta: Any = UNSET,
) -> Any:
    """A native ``ECConnectorOutput``: what a step moved between caches of encoder outputs (0.11.1).

    Args:
        finished_sending, finished_recving: Hashes of multimodal inputs.
        ec_connector_stats, ec_connector_worker_meta: as in ECConnectorOutput.

    Raises:
        UnsupportedField: there is no such connector in this release, or no such option.
    """
    return adapter("model_runner_output").build_ec_connector(
        {
            "finished_sending": _as_set(finished_sending),
            "finished_recving": _as_set(finished_recving),
            "ec_connector_stats": ec_connector_stats,
            "ec_connector_worker_meta": ec_connector_worker_meta,
        }
    )


def make_logprobs_lists(
    token_ids: Any, logprobs: Any, ranks: Any, *, num_generated_tokens: Sequence[int] | None = None
) -> Any:
    """A native ``LogprobsLists``: log-probabilities of sampled tokens, for ``make_model_runner_output``.

    Args:
        token_ids: [rows, k + 1] token ids: the sampled token, then the k most likely ones.
        logprobs: [rows, k + 1] natural logarithms of their probabilities.
        ranks: [rows] rank of the sampled token, 1 for the most likely.
        num_generated_tokens: Rows of each request, where drafts were verified; one each by default.

    Raises:
        UnsupportedField: up to 0.11.0 a request has one row.
        VllmCompatError: shapes that do not go together.
    """
    rows = _matching_rows(token_ids, logprobs, ranks)
    offsets = None
    if num_generated_tokens is not None and any(count != 1 for count in num_generated_tokens):
        offsets = [0, *accumulate(num_generated_tokens)]
        if offsets[-1] != rows:
            raise VllmCompatError(
                "log-probabilities",
                needed=f"{offsets[-1]} rows, the sum of num_generated_tokens",
                found=f"{rows} rows",
                advice="one row per generated token, request after request",
            )
    return adapter("model_runner_output").build_logprobs(token_ids, logprobs, ranks, offsets)


def make_logprobs_tensors(token_ids: Any, logprobs: Any, ranks: Any) -> Any:
    """A native ``LogprobsTensors``: log-probabilities of one prompt, for ``prompt_logprobs_dict``.

    Args:
        token_ids: [prompt - 1, k + 1] token ids: the prompt's next token, then the k most likely ones.
        logprobs: [prompt - 1, k + 1] natural logarithms of their probabilities.
        ranks: [prompt - 1] rank of the prompt's token, 1 for the most likely.

    Raises:
        VllmCompatError: shapes that do not go together.
    """
    _matching_rows(token_ids, logprobs, ranks)
    return adapter("model_runner_output").build_prompt_logprobs(token_ids, logprobs, ranks)


def _matching_rows(token_ids: Any, logprobs: Any, ranks: Any) -> int:
    shapes = [(len(matrix), {len(row) for row in matrix}) for matrix in (token_ids, logprobs)]
    if shapes[0] != shapes[1] or len(shapes[0][1]) > 1 or len(ranks) != shapes[0][0]:
        raise VllmCompatError(
            "log-probabilities",
            needed="token ids and log-probabilities of one shape [rows, k + 1], and a rank per row",
            found=", ".join(f"{rows} rows of {sorted(widths)}" for rows, widths in shapes) + f", {len(ranks)} ranks",
            advice="pad rows to the same number of alternatives",
        )
    return shapes[0][0]


def _as_set(value: Any) -> Any:
    return value if value is UNSET or value is None else set(value)
