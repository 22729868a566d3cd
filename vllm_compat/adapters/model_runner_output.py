"""ModelRunnerOutput: what a runner hands back to the scheduler after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need, refuse
from vllm_compat.values import RunnerOutput

_OUTPUT = "vllm.v1.outputs:ModelRunnerOutput"
_IDS = ("req_ids", "req_id_to_index", "sampled_token_ids")
#: Required up to 0.13.0.
_RESULTS = ("logprobs", "prompt_logprobs_dict", "pooler_output")
_LATER = {
    "kv_connector_output": "",
    "num_nans_in_logits": "",
    "ec_connector_output": "0.11.1",
    "cudagraph_stats": "0.13.0",
    "routed_experts": "0.22.0-0.30.0",
    "sampling_masks": "0.28.0",
    "prompt_token_id_logprobs_dict": "0.31.0",
    "aux_output_connector_output": "0.31.0",
}
_DRAFTS = Need("vllm.v1.outputs:DraftTokenIds", passes=("req_ids", "draft_token_ids"))
_KV_CONNECTOR = Need(
    "vllm.v1.outputs:KVConnectorOutput",
    options={
        "finished_sending": "",
        "finished_recving": "",
        "failed_recving": "0.30.0",
        "invalid_block_ids": "0.11.1",
        "expected_finished_count": "0.11.1",
        "kv_connector_stats": "0.11.0",
        "kv_cache_events": "0.13.0",
        "kv_connector_worker_meta": "0.18.0",
    },
)
_EC_CONNECTOR = Need(
    "vllm.v1.outputs:ECConnectorOutput",
    options={
        "finished_sending": "",
        "finished_recving": "",
        "ec_connector_worker_meta": "0.28.0",
        "ec_connector_stats": "0.31.0",
    },
    life="0.11.1",
)
_LISTS = Need(
    "vllm.v1.outputs:LogprobsLists",
    passes=("logprob_token_ids", "logprobs", "sampled_token_ranks"),
    options={"cu_num_generated_tokens": "0.11.1"},
)
_TENSORS = Need(
    "vllm.v1.outputs:LogprobsTensors",
    passes=("logprob_token_ids", "logprobs", "selected_token_ranks"),
    options={"cu_num_generated_tokens": "0.16.0", "cu_num_generated_tokens_tensor": "0.29.0"},
)
_PARTS = (_DRAFTS, _KV_CONNECTOR, _EC_CONNECTOR, _LISTS, _TENSORS)


class ModelRunnerOutput_0_14(Adapter):
    """Everything after ``req_id_to_index`` has a default (0.14.0); token ids are lists."""

    surface = "model_runner_output"
    since = (0, 14, 0)
    output = Need(_OUTPUT, passes=_IDS, options={**dict.fromkeys(_RESULTS, ""), **_LATER}, reads=_IDS)
    needs: ClassVar[tuple[Need, ...]] = (output, *_PARTS)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"ModelRunnerOutput": ("routed_experts_dict",)}  # 0.21.0 alone

    def build(self, options: Mapping[str, Any]) -> Any:
        return self.construct(self.output, self.completed(options))

    def completed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` with what the release requires of every output."""
        return dict(options)

    def build_drafts(self, request_ids: list[str], draft_token_ids: list[list[int]]) -> Any:
        """A DraftTokenIds: drafts that the scheduler is to have verified next."""
        return self.construct(_DRAFTS, {"req_ids": request_ids, "draft_token_ids": draft_token_ids})

    def build_kv_connector(self, options: Mapping[str, Any]) -> Any:
        """A KVConnectorOutput."""
        return self.construct(_KV_CONNECTOR, options)

    def build_ec_connector(self, options: Mapping[str, Any]) -> Any:
        """An ECConnectorOutput, of a connector for encoder caches."""
        return self.construct(_EC_CONNECTOR, options)

    def build_logprobs(self, token_ids: Any, logprobs: Any, ranks: Any, offsets: list[int] | None) -> Any:
        """A LogprobsLists from two matrices and a vector; ``offsets`` where requests have other than one row each."""
        import numpy

        return self.construct(
            _LISTS,
            {
                "logprob_token_ids": numpy.asarray(token_ids, dtype=numpy.int32),
                "logprobs": numpy.asarray(logprobs, dtype=numpy.float32),
                "sampled_token_ranks": numpy.asarray(ranks, dtype=numpy.int32),
                "cu_num_generated_tokens": UNSET if offsets is None else offsets,
            },
        )

    def build_prompt_logprobs(self, token_ids: Any, logprobs: Any, ranks: Any) -> Any:
        """A LogprobsTensors of one request's prompt."""
        import torch

        return self.construct(
            _TENSORS,
            {
                "logprob_token_ids": torch.as_tensor(token_ids, dtype=torch.int32),
                "logprobs": torch.as_tensor(logprobs, dtype=torch.float32),
                "selected_token_ranks": torch.as_tensor(ranks, dtype=torch.int32),
            },
        )

    def read(self, output: Any) -> RunnerOutput:
        rows = output.sampled_token_ids
        # A row is a list, or in 0.11.1-0.11.2 an array; an empty output has no rows at all.
        tokens = {
            request_id: tuple(int(token) for token in rows[index])
            for request_id, index in output.req_id_to_index.items()
            if index < len(rows)
        }
        return RunnerOutput(request_ids=tuple(output.req_ids), token_ids=tokens)


class ModelRunnerOutput_0_12(ModelRunnerOutput_0_14):
    """Log-probabilities and pooler output are required: None, an empty dictionary and an empty list stand for none.

    Token ids are lists again (0.12.0).
    """

    since = (0, 12, 0)
    output = Need(_OUTPUT, passes=(*_IDS, *_RESULTS), options=_LATER, reads=_IDS)
    needs: ClassVar[tuple[Need, ...]] = (output, *_PARTS)

    def completed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        # What the runners of these releases pass when there is nothing to report.
        nothing: dict[str, Any] = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
        given = {name: value for name, value in options.items() if value is not UNSET}
        return {**nothing, **given, "sampled_token_ids": self.rows(given["sampled_token_ids"])}

    def rows(self, token_ids: Sequence[Sequence[int]]) -> list[Any]:
        return list(token_ids)


class ModelRunnerOutput_0_11_1(ModelRunnerOutput_0_12):
    """Token ids are one NumPy array per request (0.11.1 and 0.11.2 only), which the scheduler calls ``tolist`` on."""

    since = (0, 11, 1)

    def rows(self, token_ids: Sequence[Sequence[int]]) -> list[Any]:
        import numpy

        return [numpy.asarray(row, dtype=numpy.int64) for row in token_ids]


class ModelRunnerOutput_0_10(ModelRunnerOutput_0_12):
    """Token ids and log-probabilities are lists (until 0.11.0). There is no output of an encoder-cache connector."""

    since = (0, 10, 2)

    def build_logprobs(self, token_ids: Any, logprobs: Any, ranks: Any, offsets: list[int] | None) -> Any:
        if offsets is not None:
            refuse(_LISTS, "cu_num_generated_tokens")
        columns = dict(zip(_LISTS.passes, (token_ids, logprobs, ranks), strict=True))
        return self.construct(_LISTS, {name: _plain(column) for name, column in columns.items()})


def _plain(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else [_plain(v) if _is_row(v) else v for v in values]


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) or hasattr(value, "tolist")


ADAPTERS = (ModelRunnerOutput_0_14, ModelRunnerOutput_0_12, ModelRunnerOutput_0_11_1, ModelRunnerOutput_0_10)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (ModelRunnerOutput_0_12, ModelRunnerOutput_0_11_1)
