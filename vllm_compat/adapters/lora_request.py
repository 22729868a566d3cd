"""LoRARequest: which adapter a request uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need

_REQUEST = "vllm.lora.request:LoRARequest"
_ALWAYS = ("lora_name", "lora_int_id", "lora_path")
_OPTIONS = {
    "base_model_name": "",
    "load_inplace": "0.15.0",
    "is_3d_lora_weight": "0.22.0",
    "tensorizer_config_dict": "0.10.2-0.31.0",
    "long_lora_max_len": "0.10.2-0.13.0",
}


class LoRARequest_0_14(Adapter):
    """``lora_local_path``, the old name of ``lora_path``, and ``long_lora_max_len`` are gone (0.14.0)."""

    surface = "lora_request"
    since = (0, 14, 0)
    request = Need(_REQUEST, passes=_ALWAYS, options=_OPTIONS)
    needs: ClassVar[tuple[Need, ...]] = (request,)

    def build(self, options: Mapping[str, Any]) -> Any:
        return self.construct(self.request, options)


class LoRARequest_0_10(LoRARequest_0_14):
    """``lora_local_path`` is still there, deprecated (up to 0.13.0). ``lora_path`` has the same effect."""

    since = (0, 10, 2)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"LoRARequest": ("lora_local_path",)}


ADAPTERS = (LoRARequest_0_14, LoRARequest_0_10)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (LoRARequest_0_14,)
