"""The stages: what each reads and writes, and where its code is, which is imported when it runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .fingerprints import data_fingerprint, model_fingerprint
from .manifest import STAGES, checksums

if TYPE_CHECKING:
    from .config import Config
    from .progress import Progress

_MODEL, _CONVERSATIONS = "model", "conversations"


@dataclass(frozen=True)
class Stage:
    """One stage.

    sections: of the configuration, that it depends on ("seed" among them). inputs: files of earlier stages,
    or the names "model" and "conversations". outputs: files, relative to the run, whose content says what was
    made.
    """

    name: str
    sections: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def config(self, cfg: Config) -> dict[str, Any]:
        """The sections it depends on, JSON-able."""
        made: dict[str, Any] = {}
        for section in self.sections:
            value = getattr(cfg, section)
            made[section] = value if isinstance(value, int) else dataclasses.asdict(value)
        as_in_a_manifest: dict[str, Any] = json.loads(json.dumps(made, default=str))  # tuples become lists
        return as_in_a_manifest

    def fingerprints(self, cfg: Config) -> dict[str, str]:
        """Name -> checksum of everything it reads."""
        made = checksums(cfg.run_dir, self.inputs)
        if _MODEL in self.inputs:
            made[_MODEL] = model_fingerprint(cfg.target.model)
        if _CONVERSATIONS in self.inputs:
            made[_CONVERSATIONS] = data_fingerprint(cfg.prepare.conversations, cfg.prepare.split)
        return made

    def missing(self, cfg: Config) -> list[str]:
        """Input files that an earlier stage should have written."""
        files = [name for name in self.inputs if name not in (_MODEL, _CONVERSATIONS)]
        return [name for name in files if not (cfg.run_dir / name).is_file()]

    def entry_point(self) -> Callable[[Config, Progress], dict[str, Any]]:
        """The function `<stage>_stage` of the module of that name."""
        module = import_module(f".{self.name}", __package__)
        function: Callable[[Config, Progress], dict[str, Any]] = getattr(module, f"{self.name}_stage")
        return function


_ROWS = ("prepare/train.parquet", "prepare/heldout.parquet")
_STORES = ("extract/train/index.json", "extract/heldout/index.json")
_VOCAB = "vocab/vocab.safetensors"
_HEAD = ("train/draft.safetensors", "train/draft.json")
_EXPORT = ("export/config.json", "export/model.safetensors")

STAGE_TABLE = {
    stage.name: stage
    for stage in (
        Stage("prepare", ("target", "prepare", "seed"), (_MODEL, _CONVERSATIONS), _ROWS),
        Stage("extract", ("target", "extract"), (_MODEL, *_ROWS), _STORES),
        Stage("vocab", ("vocab",), (_MODEL, _ROWS[0]), (_VOCAB,)),
        Stage("train", ("train", "seed"), (_MODEL, *_STORES, _VOCAB), _HEAD),
        Stage("export", ("export",), (_MODEL, *_HEAD, _VOCAB), _EXPORT),
        Stage("evaluate", ("target", "evaluate", "seed"), (_MODEL, _ROWS[1], *_STORES[1:], *_EXPORT), ()),
    )
}
assert tuple(STAGE_TABLE) == STAGES
