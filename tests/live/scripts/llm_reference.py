"""Run ``vllm.LLM`` on the cases of a JSON file and print what it generated, as JSON on the last line.

Each case: engine (LLM arguments), prompts (token ids), params (one SamplingParams as a dictionary per prompt), repeat.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    results = []
    for case in json.loads(Path(path).read_text()):
        llm = LLM(**case["engine"])
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in case["prompts"]]
        params = []
        for options in case["params"]:
            structured = options.pop("structured_outputs", None)
            if structured:
                options["structured_outputs"] = StructuredOutputsParams(**structured)
            params.append(SamplingParams(**options))
        for _ in range(case.get("repeat", 1)):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append(
            [[list(o.outputs[0].token_ids), o.outputs[0].finish_reason, o.num_cached_tokens] for o in outputs]
        )
        llm.llm_engine.engine_core.shutdown()
        del llm
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main(sys.argv[1])
