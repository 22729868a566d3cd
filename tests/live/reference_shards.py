"""What extraction stored on one release, kept to compare other releases with: some rows of the pipeline's test run.

    python tests/live/reference_shards.py RUN_DIR      writes tests/fixtures/shards.safetensors anew

RUN_DIR is a run of the settings in ``test_kimi_pipeline.SMALL``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_compat.kimi.store import Store

PATH = Path(__file__).parents[1] / "fixtures" / "shards.safetensors"
ROWS = 12

#: How far a stored state may be from the reference, as the norm of the difference over the norm, over the chosen
#: positions of one boundary. Half of what any two releases may differ by.
TOLERANCE = 5e-3


def positions(length: int) -> list[int]:
    """The tokens of a row whose states are kept: the first, the last and two between them."""
    return [0, length // 3, 2 * length // 3, length - 1]


def chosen(store: Store, row_ids: list[str]) -> dict[str, torch.Tensor]:
    """Of each row ``ID/token_ids`` int32 [T] and ``ID/hidden_states`` [4, L, H] in the dtype of the store."""
    kept = {}
    for sample in map(store.by_id, row_ids):
        kept[f"{sample.sample_id}/token_ids"] = sample.token_ids
        kept[f"{sample.sample_id}/hidden_states"] = sample.hidden_states[positions(len(sample.token_ids))]
    return kept


def load() -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Where the reference is from (release, layers), and its tensors."""
    with safe_open(PATH, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def rows_of(tensors: Any) -> list[str]:
    return sorted({name.rpartition("/")[0] for name in tensors})


def main(run_dir: str) -> None:
    store = Store(Path(run_dir, "extract", "train"))
    ids = sorted(store.ids)
    tensors = chosen(store, ids[:: max(1, len(ids) // ROWS)][:ROWS])
    about = {"vllm": store.provenance.vllm_version, "layers": ",".join(map(str, store.provenance.layers))}
    save_file(tensors, PATH, metadata=about)
    sys.stdout.write(
        f"{PATH.name}: {len(rows_of(tensors))} rows of vLLM {about['vllm']}, {PATH.stat().st_size} bytes\n"
    )


if __name__ == "__main__":
    main(sys.argv[1])
