"""What the states of a store are from, as an engine that captures says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import vllm_compat
from vllm_compat import EngineLoop, installed

from .fingerprints import model_fingerprint
from .shards import Provenance

if TYPE_CHECKING:
    from .config import Config


def provenance_of(
    cfg: Config, info: Mapping[str, Any], layers: tuple[int, ...], rows: str, **others: str
) -> Provenance:
    """Provenance of states that this run captures.

    Args:
        cfg: The run.
        info: ``model_info`` of the capture.
        layers: Boundaries, the final one last.
        rows: The checksum of the rows.
        others: Fields that are not what the run's settings say.
    """
    here = installed()
    fields: dict[str, Any] = {"dtype": cfg.extract.dtype, "finals": cfg.extract.finals, **others}
    return Provenance(
        layers=layers,
        hidden_size=info["hidden_size"],
        num_hidden_layers=info["num_hidden_layers"],
        **fields,
        way=info["way"],
        model_fingerprint=model_fingerprint(cfg.target.model),
        vllm_version=here.version,
        distribution=here.distribution or "source tree",
        runner=info["runner"],
        created_with=vllm_compat.__version__,
        rows_fingerprint=rows,
    )


def room_for(cfg: Config, loop: EngineLoop, provenance: Provenance) -> int:
    """Bytes of states that may wait for the store.

    What a step finishes must find room, or the engine stands still until the disk has it.
    """
    tokens = loop.vllm_config.scheduler_config.max_num_batched_tokens
    step: int = tokens * len(provenance.layers) * provenance.hidden_size * loop.vllm_config.model_config.dtype.itemsize
    return max(cfg.extract.shard_mb << 20, 2 * step)
