"""vLLM's file-based example connector, with workers that have something to say at the handshake."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class RecordingConnector(ExampleConnector):  # type: ignore[misc]
    """Keeps what the scheduler's side was told of its workers."""

    told: ClassVar[list[Any]] = []

    def get_handshake_metadata(self) -> Any:
        return "worker"

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.told.append(metadata)
