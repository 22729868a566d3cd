"""The connector of docs/kv-connector.md, which notes what vLLM asks of it."""

from __future__ import annotations

from typing import Any, ClassVar

from saving_connector import SavingConnector


class RecordingConnector(SavingConnector):
    """Its workers have something to say at the handshake; it takes finished requests by KV cache group."""

    told: ClassVar[list[Any]] = []
    groups: ClassVar[list[int]] = []
    made: ClassVar[list[tuple[str, bool]]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.made.append((role.name, self.kv_cache_config is not None))

    def get_handshake_metadata(self) -> Any:
        return "worker"

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.told.append(metadata)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        self.groups.append(len(block_ids))
        return super().request_finished(request, *block_ids)
