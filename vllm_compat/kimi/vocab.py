"""The draft vocabulary: the tokens that a head can propose, and the tables between its ids and the target's.

vLLM reads `d2t` as *offsets* (target id = draft id + d2t[draft id]) and skips `t2d`, a mask over the target's
vocabulary that SGLang wants. With a full vocabulary neither may be in the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from vllm_compat.errors import ConfigError, DataError

from .files import write_atomic

if TYPE_CHECKING:
    from .config import Config
    from .progress import Progress


@dataclass(frozen=True)
class VocabMap:
    """d2t int64 [Vd] (offsets), t2d bool [V], coverage = share of the counted tokens that can be drafted."""

    d2t: torch.Tensor
    t2d: torch.Tensor
    coverage: float

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [Vd], ascending: the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t))

    @property
    def draft_ids(self) -> torch.Tensor:
        """int64 [V]: the draft id of each target id, -1 where the head cannot propose it."""
        table = torch.full((len(self.t2d),), -1, dtype=torch.int64)
        table[self.target_ids] = torch.arange(len(self.d2t))
        return table

    @property
    def is_full(self) -> bool:
        return len(self.d2t) == len(self.t2d)

    def fingerprint(self) -> str:
        """Hex SHA-256 of both tables. A head means nothing under another map, so checkpoints carry it."""
        return hashlib.sha256(self.d2t.numpy().tobytes() + self.t2d.numpy().tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        """One safetensors file with d2t and t2d, written atomically."""
        tensors = {"d2t": self.d2t.contiguous(), "t2d": self.t2d.contiguous()}
        write_atomic(path, save(tensors, metadata={"coverage": repr(self.coverage)}))

    @classmethod
    def load(cls, path: Path) -> VocabMap:
        """The inverse of `save`; DataError when the two tables do not belong together."""
        if not path.is_file():
            raise DataError(asked=f"vocabulary map {path}", found="no such file", advice="run the stage 'vocab' first")
        with safe_open(path, framework="pt") as stored:
            coverage = float((stored.metadata() or {}).get("coverage", "nan"))
            made = cls(stored.get_tensor("d2t"), stored.get_tensor("t2d"), coverage)
        if not torch.equal(made.t2d.nonzero().flatten(), made.target_ids):
            raise DataError(
                asked=f"vocabulary map {path}",
                needed="d2t and t2d that name the same tokens",
                found="they differ",
                advice="run the stage 'vocab' again",
            )
        return made


def build_vocab(counts: torch.Tensor, draft_vocab_size: int, special_ids: Iterable[int]) -> VocabMap:
    """The `draft_vocab_size` most frequent tokens, the special ones always among them.

    Args:
        counts: int64 [V], how often each target token carries loss. Ties go to the lower id, so that the map
            is a function of the counts; tokens never seen fill up the rest, lowest id first.
        draft_vocab_size: Vd; V or more gives the identity map.
        special_ids: Ids that must be drafted however rare they are in this data (turn markers, tool markers).
    """
    size = len(counts)
    special = sorted(set(special_ids))
    if special and (special[0] < 0 or special[-1] >= size):
        raise ConfigError(
            asked=f"special token ids {special[0]} … {special[-1]}",
            needed=f"ids below the target's vocabulary size {size}",
            advice="use the tokenizer that belongs to target.model",
        )
    if draft_vocab_size < len(special):
        raise ConfigError(
            asked=f"vocab.draft_vocab_size = {draft_vocab_size}",
            needed=f"at least {len(special)}, the number of special tokens, which are always drafted",
            advice="raise vocab.draft_vocab_size",
        )
    total = int(counts.sum())
    if total == 0:
        raise DataError(
            asked="a draft vocabulary by frequency",
            needed="at least one token that carries loss",
            found="none: every loss mask is zero",
            advice="check the chat template's markers in the stage 'prepare'",
        )
    kept = torch.ones(size, dtype=torch.bool)
    if draft_vocab_size < size:
        order = torch.argsort(counts, descending=True, stable=True)
        is_special = torch.zeros(size, dtype=torch.bool)
        is_special[special] = True
        frequent = order[~is_special[order]][: draft_vocab_size - len(special)]
        kept = is_special
        kept[frequent] = True
    ids = kept.nonzero().flatten()
    return VocabMap(ids - torch.arange(len(ids)), kept, int(counts[ids].sum()) / total)


def special_token_ids(tokenizer: Any) -> list[int]:
    """Ids of a transformers tokenizer's added and special tokens (Kimi: the 256 above its BPE ranks)."""
    return sorted({*getattr(tokenizer, "added_tokens_decoder", {}), *tokenizer.all_special_ids})


def count_loss_tokens(rows: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> torch.Tensor:
    """int64 [vocab_size] over (token ids, loss mask) pairs."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids, mask in rows:
        chosen = torch.tensor(ids, dtype=torch.int64)[torch.tensor(mask, dtype=torch.bool)]
        if chosen.numel() and int(chosen.max()) >= vocab_size:
            raise DataError(
                asked="counting the tokens of the prepared rows",
                needed=f"ids below the target's vocab_size {vocab_size}",
                found=f"id {int(chosen.max())}",
                advice="prepare the rows with the tokenizer of target.model",
            )
        counts += torch.bincount(chosen, minlength=vocab_size)
    return counts


def vocab_stage(cfg: Config, progress: Progress) -> dict[str, Any]:
    """<run>/prepare/train.parquet -> <run>/vocab/vocab.safetensors."""
    from .prompts import load_tokenizer
    from .rows import count_rows, read_rows
    from .target import load_text_config

    size = int(load_text_config(cfg.target.model)["vocab_size"])
    tokenizer = load_tokenizer(cfg.target)
    path = cfg.run_dir / "prepare" / "train.parquet"
    with progress.task("counting tokens", total=count_rows(path)) as bar:

        def pairs() -> Iterator[tuple[Sequence[int], Sequence[int]]]:
            for row in read_rows(path):
                bar.advance(1)
                yield row.input_ids, row.loss_mask

        counts = count_loss_tokens(pairs(), size)
    special = special_token_ids(tokenizer)
    made = build_vocab(counts, cfg.vocab.draft_vocab_size, special)
    made.save(cfg.run_dir / "vocab" / "vocab.safetensors")
    return {
        "vocab_size": size,
        "draft_vocab_size": len(made.d2t),
        "special_tokens": len(special),
        "distinct_tokens": int((counts > 0).sum()),
        "loss_tokens": int(counts.sum()),
        "coverage": made.coverage,
        "fingerprint": made.fingerprint(),
    }
