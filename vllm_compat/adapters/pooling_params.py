"""PoolingParams, by keyword."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.errors import VllmCompatError

_PARAMS = "vllm.pooling_params:PoolingParams"
#: Names that one option has had: whether the result is activated or normalised.
_ACTIVATION = ("use_activation", "normalize", "activation", "softmax")
_OPTIONS = {
    "task": "",
    "dimensions": "",
    "step_tag_id": "",
    "returned_token_ids": "",
    "requires_token_ids": "",
    "extra_kwargs": "",
    "output_kind": "",
    "truncate_prompt_tokens": "0.10.2-0.16.0",
    "skip_reading_prefix_cache": "0.11.1",
    "late_interaction_params": "0.18.0",
    "late_chunking_params": "0.33.0",
}
_EMBED = ("embed", "token_embed")


class PoolingParams_0_14(Adapter):
    """``use_activation`` is the option of every task (0.14.0); its three older names are gone from 0.16.0 on."""

    surface = "pooling_params"
    since = (0, 14, 0)
    params = Need(_PARAMS, options={**_OPTIONS, "use_activation": "0.11.1"})
    needs: ClassVar[tuple[Need, ...]] = (params,)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"PoolingParams": ("normalize", "activation", "softmax")}

    def build(self, options: Mapping[str, Any]) -> Any:
        if options.keys().isdisjoint(_ACTIVATION):
            return self.construct(self.params, options)
        asked = {name: options[name] for name in _ACTIVATION if options.get(name, UNSET) is not UNSET}
        given = {name: value for name, value in options.items() if name not in _ACTIVATION}
        if len(asked) > 1:
            raise VllmCompatError(
                f"pooling params with {' and '.join(asked)}",
                needed="one of them: they are names of one option",
                found=f"{len(asked)} of them",
                advice="pass use_activation only",
            )
        for value in asked.values():
            given[self.activation_name(given.get("task", UNSET))] = value
        return self.construct(self.params, given)

    def activation_name(self, _: Any, /) -> str:
        """What this release calls the option, for a task."""
        return "use_activation"


class PoolingParams_0_11_1(PoolingParams_0_14):
    """Embeddings are still asked to be normalised by ``normalize`` (up to 0.13.0); ``use_activation`` came in 0.11.1.

    ``softmax`` and ``activation`` are deprecated, and up to 0.13.0 count as true whatever their value
    (``get_use_activation`` keeps the comparison, not the value).
    """

    since = (0, 11, 1)
    params = Need(_PARAMS, options={**_OPTIONS, "use_activation": "", "normalize": "0.10.2-0.15.1"})
    needs: ClassVar[tuple[Need, ...]] = (params,)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"PoolingParams": ("activation", "softmax")}

    def activation_name(self, task: Any) -> str:
        return "normalize" if self.known(task) in _EMBED else "use_activation"

    def known(self, task: Any) -> str:
        """The task, which decides what the option is called."""
        if task is UNSET or task is None:
            raise VllmCompatError(
                "pooling params with use_activation",
                needed="the task too: up to vLLM 0.13.0 it decides what the option is called",
                found="no task",
                advice='pass for example task="embed"',
            )
        name: str = task
        return name


class PoolingParams_0_10(PoolingParams_0_11_1):
    """Each task has its own name of the option: embeddings, classes and rewards (up to 0.11.0)."""

    since = (0, 10, 2)
    params = Need(
        _PARAMS, options={**_OPTIONS, **dict.fromkeys(("normalize", "activation", "softmax"), "0.10.2-0.15.1")}
    )
    needs: ClassVar[tuple[Need, ...]] = (params,)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def activation_name(self, task: Any) -> str:
        return {"embed": "normalize", "encode": "softmax"}.get(self.known(task), "activation")


ADAPTERS = (PoolingParams_0_14, PoolingParams_0_11_1, PoolingParams_0_10)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (PoolingParams_0_14, PoolingParams_0_11_1)
