"""vLLM's ExampleHiddenStatesConnector on a CPU: its copy out of the KV cache, without pinned memory and streams."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as theirs


class Done:
    """Stands for the CUDA event of a copy, which is over."""

    def query(self) -> bool:
        return True


class CpuExtraction(theirs.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        offsets = torch.arange(self._block_size)
        slots = (offsets + torch.tensor(pending.block_ids)[:, None] * self._block_size).flatten()
        states = theirs.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))
        self._req_copy_events[pending.req_id] = Done()
