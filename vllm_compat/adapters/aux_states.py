"""A model's auxiliary hidden states: which models have them, and where a runner keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need, resolve

_INTERFACES = "vllm.model_executor.models.interfaces"
_SUPPORTS = Need(f"{_INTERFACES}:supports_eagle3", passes=("model",))
_MIXIN = Need(f"{_INTERFACES}:EagleModelMixin", reads=("aux_hidden_state_layers",), read_only=True)


def _read(symbol: str, *names: str) -> Need:
    return Need(f"vllm.v1.worker.{symbol}", reads=names, read_only=True, if_loaded=True)


class AuxStates_0_25(Adapter):
    """DeepSeek's models, Kimi-K2's among them, return their final state too (boundary N; 0.25.0, PR #46973)."""

    surface = "aux_states"
    since = (0, 25, 0)
    #: Why they are of no use here; "" where they are.
    unavailable: ClassVar[str] = ""
    #: Decoders that are no EagleModelMixin, and give boundary N all the same.
    final: ClassVar[tuple[str, ...]] = ("DeepseekV2Model",)
    needs: ClassVar[tuple[Need, ...]] = (
        _SUPPORTS,
        Need(f"{_INTERFACES}:SupportsEagle3.set_aux_hidden_state_layers", passes=("layers",), bound=True),
        _MIXIN,
        _read("gpu_model_runner:GPUModelRunner", "use_aux_hidden_state_outputs", "execute_model_state"),
        _read("gpu_model_runner:ExecuteModelState", "aux_hidden_states"),
        _read("gpu.model_runner:GPUModelRunner", "use_aux_hidden_state_outputs", "execute_model_state"),
        _read("gpu.model_runner:ExecuteModelState", "aux_hidden_states"),
    )
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "ExecuteModelState": ("*",),
    }

    def supports(self, model: Any) -> bool:
        """Whether the model returns auxiliary hidden states when told their layer ids."""
        return bool(self.construct(_SUPPORTS, {"model": model}))

    def gives_final(self, decoder: Any, /) -> bool:
        """Whether the state after the last layer is among them, if asked for."""
        # Kimi-K3's last layers still have to be combined (block residuals, PR #50815).
        whole = "kimi_k3" not in type(decoder).__module__
        return whole and (isinstance(decoder, resolve(_MIXIN.symbol)) or type(decoder).__name__ in self.final)


class AuxStates_0_18(AuxStates_0_25):
    """Both runners keep them under a name, and EagleModelMixin gives boundary N (0.18.0); DeepSeek's models do not."""

    since = (0, 18, 0)
    final: ClassVar[tuple[str, ...]] = ()


class AuxStates_0_10(AuxStates_0_18):
    """No model returns its final state among them (until 0.17.1), and DeepSeek's have none at all."""

    since = (0, 10, 2)
    unavailable: ClassVar[str] = "up to 0.17.1 no model returns its final state among its auxiliary outputs"
    needs: ClassVar[tuple[Need, ...]] = (_SUPPORTS,)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def gives_final(self, _: Any, /) -> bool:
        return False


ADAPTERS = (AuxStates_0_25, AuxStates_0_18, AuxStates_0_10)

#: The shape is that of 0.18.0; what DeepSeek's forward returns cannot be told from it.
UNSEEN = (AuxStates_0_25,)
