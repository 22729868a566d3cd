"""ModelRunnerOutput: what a runner hands back to the scheduler after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need
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


class ModelRunnerOutput_0_14(Adapter):
    """Everything after ``req_id_to_index`` has a default (0.14.0); token ids are lists."""

    surface = "model_runner_output"
    since = (0, 14, 0)
    output = Need(_OUTPUT, passes=_IDS, options={**dict.fromkeys(_RESULTS, ""), **_LATER}, reads=_IDS)
    needs: ClassVar[tuple[Need, ...]] = (output, _DRAFTS)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"ModelRunnerOutput": ("routed_experts_dict",)}  # 0.21.0 alone

    def build(self, options: Mapping[str, Any]) -> Any:
        return self.construct(self.output, self.completed(options))

    def completed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` with what the release requires of every output."""
        return dict(options)

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
    needs: ClassVar[tuple[Need, ...]] = (output, _DRAFTS)

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
    """Token ids are lists (until 0.11.0). There is no output of an encoder-cache connector."""

    since = (0, 10, 2)


ADAPTERS = (ModelRunnerOutput_0_14, ModelRunnerOutput_0_12, ModelRunnerOutput_0_11_1, ModelRunnerOutput_0_10)
