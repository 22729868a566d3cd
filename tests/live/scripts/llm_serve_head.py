"""Serve a target with and without a head in ``vllm.LLM``; prints tokens and vLLM's own acceptance counters as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from here import EAGER


def main(path: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    case = json.loads(Path(path).read_text())
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in case["prompts"]]
    params = SamplingParams(temperature=0.0, max_tokens=case["max_tokens"])
    result = {}
    for name in ("plain", "speculative"):
        speculative = None
        if name == "speculative":
            speculative = {"method": "eagle3", "model": case["head"], "num_speculative_tokens": case["drafts"]}
        llm = LLM(
            case["target"],
            dtype="float32",
            **EAGER,
            max_model_len=1024,
            max_num_seqs=8,
            speculative_config=speculative,
            disable_log_stats=False,
        )
        result[name] = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
        if speculative:
            counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
            steps = counters["vllm:spec_decode_num_drafts"]
            result["acceptance_length"] = 1 + counters["vllm:spec_decode_num_accepted_tokens"] / steps
        llm.llm_engine.engine_core.shutdown()
        del llm
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
