"""Stable factories for vLLM's internals."""

from vllm_compat._unset import UNSET
from vllm_compat.installed import Installed, installed

__all__ = ["UNSET", "Installed", "installed"]
