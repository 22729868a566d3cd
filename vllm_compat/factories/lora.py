"""LoRA adapters that requests ask for."""

from __future__ import annotations

import os
from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.errors import VllmCompatError

__all__ = ["make_lora_request"]


def make_lora_request(
    lora_name: str,
    lora_int_id: int,
    lora_path: str | os.PathLike[str],
    *,
    base_model_name: Any = UNSET,
    load_inplace: Any = UNSET,
    is_3d_lora_weight: Any = UNSET,
    tensorizer_config_dict: Any = UNSET,
    long_lora_max_len: Any = UNSET,
) -> Any:
    """A native ``LoRARequest``.

    Args:
        lora_name: Name of the adapter. vLLM compares adapters by name, and from 0.11.1 on hashes blocks with it.
        lora_int_id: Number of the adapter, from 1 on; 0 means no adapter inside vLLM.
        lora_path: Folder of the adapter, or its name on the hub.
        base_model_name, load_inplace, is_3d_lora_weight, tensorizer_config_dict, long_lora_max_len: as in LoRARequest.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
        VllmCompatError: the id is below 1, or the path empty.
    """
    path = os.fspath(lora_path)
    if lora_int_id < 1 or not path:
        raise VllmCompatError(
            f"LoRA request {lora_name!r}",
            needed="an id of at least 1, and the adapter's folder",
            found=f"id {lora_int_id}, path {path!r}",
            advice="number the adapters of an engine from 1 on",
        )
    return adapter("lora_request").build(
        {
            "lora_name": lora_name,
            "lora_int_id": lora_int_id,
            "lora_path": path,
            "base_model_name": base_model_name,
            "load_inplace": load_inplace,
            "is_3d_lora_weight": is_3d_lora_weight,
            "tensorizer_config_dict": tensorizer_config_dict,
            "long_lora_max_len": long_lora_max_len,
        }
    )
