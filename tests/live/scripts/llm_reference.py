"""Run ``vllm.LLM`` on the cases of a JSON file and print what it generated, as JSON on the last line.

Each case: engine (LLM arguments), prompts (token ids), params (one SamplingParams as a dictionary per prompt), loras
(the folder of an adapter, or null, per prompt), repeat.
A case that vLLM itself fails at is a string with the reason.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from here import lora_names, structured_outputs


class Engines:
    """One LLM at a time, kept for the next case when that wants the same, with nothing cached."""

    def __init__(self) -> None:
        self._options: dict[str, Any] | None = None
        self._llm: Any = None

    def get(self, options: dict[str, Any]) -> Any:
        from vllm import LLM

        if self._llm is not None and options == self._options:
            self._llm.reset_prefix_cache()
        else:
            self.close()
            self._llm, self._options = LLM(**options), options
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None


def run(case: dict[str, Any], engines: Engines) -> Any:
    """[token ids, finish reason, cached tokens] of every prompt."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    try:
        llm = engines.get(case["engine"])
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in case["prompts"]]
        params = []
        for options in case["params"]:
            constraint = options.pop("structured_outputs", None)
            params.append(SamplingParams(**options, **(structured_outputs(**constraint) if constraint else {})))
        loras = [folder and LoRARequest(*lora_names(folder)) for folder in case["loras"]]
        for _ in range(case["repeat"]):
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=loras if any(loras) else None)
        return [[list(o.outputs[0].token_ids), o.outputs[0].finish_reason, o.num_cached_tokens] for o in outputs]
    except Exception as error:
        traceback.print_exc()
        engines.close()
        return f"{type(error).__name__}: {error}"


def main(path: str) -> None:
    engines = Engines()
    results = [run(case, engines) for case in json.loads(Path(path).read_text())]
    engines.close()
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main(sys.argv[1])
