"""ModelRunnerOutput: what a runner hands back to the scheduler after a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.values import RunnerOutput


class ModelRunnerOutput_0_14(Adapter):
    """Everything after ``req_id_to_index`` has a default (0.14.0); token ids are lists again (0.12.0)."""

    surface = "model_runner_output"
    since = (0, 14, 0)
    output = Need(
        "vllm.v1.outputs:ModelRunnerOutput",
        passes=("req_ids", "req_id_to_index", "sampled_token_ids"),
        options={
            "logprobs": "",
            "prompt_logprobs_dict": "",
            "pooler_output": "",
            "kv_connector_output": "",
            "ec_connector_output": "",
            "num_nans_in_logits": "",
            "cudagraph_stats": "",
            "routed_experts": "0.22.0-0.30.0",
            "sampling_masks": "0.28.0",
            "prompt_token_id_logprobs_dict": "0.31.0",
            "aux_output_connector_output": "0.31.0",
        },
    )
    drafts = Need("vllm.v1.outputs:DraftTokenIds", passes=("req_ids", "draft_token_ids"))
    needs = (output, drafts)

    def build(self, options: Mapping[str, Any]) -> Any:
        return self.construct(self.output, options)

    def read(self, output: Any) -> RunnerOutput:
        rows = output.sampled_token_ids
        # A row is a list, or in 0.11.1-0.11.2 an array; an empty output has no rows at all.
        tokens = {
            request_id: tuple(int(token) for token in rows[index])
            for request_id, index in output.req_id_to_index.items()
            if index < len(rows)
        }
        return RunnerOutput(request_ids=tuple(output.req_ids), token_ids=tokens)


ADAPTERS = (ModelRunnerOutput_0_14,)
