"""What the capture tests share: transformers as reference, and how far from it is too far."""

from __future__ import annotations

from typing import Any

import torch
from here import EAGER, IN_PROCESS

import vllm_compat as vc

# Relative Frobenius norm per boundary, over all tokens of a batch.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


class Reference:
    """transformers' residual stream, every boundary 0 … N before the last norm."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._final: list[torch.Tensor] = []
        # hidden_states[N] of transformers is after the norm; the boundary is its input.
        self.model.model.norm.register_forward_pre_hook(lambda _, args: self._final.append(args[0]))

    @torch.no_grad()
    def __call__(self, token_ids: Any) -> torch.Tensor:
        self._final.clear()
        states = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        return torch.stack([*states[:-1], self._final[0]], dim=2)[0]


def relative_error(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[L], norm of the difference over norm of the reference."""
    states, reference = states.float(), reference.float()
    return (states - reference).norm(dim=(0, 2)) / reference.norm(dim=(0, 2))


def open_loop(
    model: str, dtype: str = "float32", num_blocks: int | None = None, capture_layers: Any = (), **options: Any
) -> vc.EngineLoop:
    arguments = {
        "model": model,
        "dtype": dtype,
        **EAGER,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        **({} if options.keys() & {"tensor_parallel_size", "pipeline_parallel_size"} else IN_PROCESS),
        **options,
    }
    return vc.EngineLoop(vc.make_vllm_config(**arguments), num_blocks=num_blocks, capture_layers=capture_layers)


def captured_states(loop: Any, layers: Any, prompts: Any, params: Any, way: str | None = None) -> list[Any]:
    with vc.capture_hidden_states(loop, layers, way=way) as capture:
        assert way in (None, capture.way)
        return [capture.pop(done.request_id) for done in loop.generate(prompts, params)]
