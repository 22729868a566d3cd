"""Training loop of a draft head. Needs torch and safetensors, not vLLM.

Under torchrun it trains data-parallel: every rank reads its own batches, rank 0 writes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.utils import clip_grad_norm_

from vllm_compat.errors import ConfigError, DataError

from .checkpoint import load_checkpoint, save_checkpoint
from .dataset import Batch, BatchOrder, Samples, collate, require_chains
from .draft import Draft, init_draft
from .draft_config import DraftConfig
from .files import write_json
from .loader import read_ahead
from .target import TargetHead
from .training_step import SCORED, TrainingStep, summarise, weighted_loss
from .vocab import VocabMap

if TYPE_CHECKING:
    from .config import Config, TrainConfig
    from .progress import Progress

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_REPLAN = (0.1, 0.25, 0.5, 0.75)  # shares of max_seconds at which the schedule is fitted to the time left


def learning_rate(step: int, total: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine to 0 at `total`. `step` counts from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


class Trainer:
    """Trains `draft`; everything that a resumed run needs is in <folder>/checkpoint.

    Args:
        cfg: Hyperparameters.
        draft: The head at its initialisation (overwritten when a checkpoint is there).
        samples: The extracted rows.
        folder: Receives metrics.jsonl and checkpoint/.
        target: Supplies the teacher's norm and lm_head.
        vocab: The draft vocabulary.
        identity: JSON-able facts that must not change between the runs of one training (data, target); the
            head's shape, the vocabulary map and the hyperparameters that shape a step are added here.
        seed: Of the batch order.

    ConfigError when an unfinished checkpoint belongs to something else; a finished one is simply replaced.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        draft: Draft,
        target: TargetHead,
        vocab: VocabMap,
        samples: Samples,
        folder: Path,
        identity: Mapping[str, Any],
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        if cfg.dtype not in _DTYPES:
            raise ConfigError(
                asked=f"train.dtype = {cfg.dtype!r}",
                needed=" or ".join(_DTYPES),
                advice="float16 would need loss scaling; bfloat16 does not",
            )
        require_chains(samples)
        self.cfg, self.samples, self.folder = cfg, samples, folder
        self.device = device or torch.device("cpu")
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        self.world = distributed.get_world_size() if distributed.is_initialized() else 1
        self.dtype = _DTYPES[cfg.dtype]
        self.draft = draft.to(self.device)
        self.step_module = TrainingStep(draft, target, vocab, cfg.ttt_steps, self.dtype).to(self.device)
        self.module: torch.nn.Module = self.step_module
        if self.world > 1:
            self.module = torch.nn.parallel.DistributedDataParallel(self.step_module, broadcast_buffers=False)
        self.optimizer = torch.optim.AdamW(
            draft.parameters(), lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), weight_decay=cfg.weight_decay
        )
        self.order = BatchOrder(tuple(samples.lengths), cfg.batch_tokens, seed, self.rank, self.world)
        self.identity = {
            **identity,
            "draft": draft.config.to_dict(),
            "vocabulary map": vocab.fingerprint(),
            "seed": seed,
            "ranks": self.world,
            **{f"train.{name}": getattr(cfg, name) for name in _STEP_FIELDS},
            "train.betas": list(cfg.betas),
        }
        per_epoch = len(self.order.epoch(0))
        self.step, self.epoch, self.position = 0, 0, 0  # position: batches done in this epoch
        self.planned = min(cfg.steps or cfg.epochs * per_epoch, cfg.epochs * per_epoch)
        self.total = self.planned  # steps of the schedule: fewer than planned where max_seconds will not do
        self.seconds, self.tokens, self.replanned = 0.0, 0, 0
        self.first_loss: float | None = None
        self.last_norm, self.last_rate = 0.0, 0.0
        self.window = torch.zeros(cfg.ttt_steps, 6, dtype=torch.float64)
        self.last: dict[str, Any] = {}
        self.finished = False
        self._restore()

    def run(self, progress: Progress, stop: Callable[[int], bool] | None = None) -> dict[str, Any]:
        """Train to the end or until `stop(step)`, and leave a checkpoint. Returns the last metrics."""
        began, before = time.monotonic(), self.seconds
        with progress.task("training", total=self.total) as bar:
            bar.advance(self.step)
            for rows, batch in () if self._out_of_time() else self._batches():
                self._replan()
                self._train_on(rows, batch)
                bar.advance(1)
                self.seconds = before + time.monotonic() - began
                if self.step % self.cfg.log_every == 0:
                    self._log()
                    bar.note(f"loss {self.last['loss']:.3f}")
                if self._out_of_time() or (stop is not None and stop(self.step)):
                    break
                if self.step % self.cfg.checkpoint_every == 0 and self.step < self.total:
                    self.save()
        self.finished = self.step >= self.total or self._out_of_time()
        if self.finished and float(self.window.sum()) > 0:
            self._log()
        self.save()
        return self.last

    def _batches(self) -> Iterator[tuple[list[int], Batch]]:
        """From the stored position on; the next batches are read while the current one is trained on."""
        planned = self.order.walk(self.epoch, self.position)
        for at, batch in read_ahead(self.samples, planned, self.cfg.ttt_steps, self.cfg.workers):
            if self.step >= self.total:
                return
            self.epoch, self.position = at.epoch, at.position + 1
            yield list(at.rows), batch
            if at.last:
                self.epoch, self.position = at.epoch + 1, 0
            if self.step >= self.total:
                return

    def _train_on(self, rows: list[int], batch: Batch) -> None:
        rate = learning_rate(self.step, self.total, self.cfg.lr, self.cfg.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        moved = batch.to(self.device, self.dtype)
        with self._autocast():
            kl_sums, statistics = self.module(moved)
        scored = statistics[:, SCORED].clone()
        if self.world > 1:
            distributed.all_reduce(scored)
        # DistributedDataParallel averages gradients over ranks; times world, the mean is over all positions.
        loss = weighted_loss(kl_sums, scored, self.cfg.ttt_decay) * self.world
        if not torch.isfinite(loss):
            raise self._not_finite(rows, f"loss {float(loss.detach())}")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = clip_grad_norm_(self.draft.parameters(), self.cfg.grad_clip)
        if not torch.isfinite(norm):
            raise self._not_finite(rows, f"gradient norm {float(norm)}")
        self.optimizer.step()
        self.window += statistics.double().cpu()
        self.tokens += batch.tokens * self.world
        self.step += 1
        self.last_norm, self.last_rate = float(norm), rate
        if self.first_loss is None:
            self.first_loss = float(loss.detach()) / self.world

    def _autocast(self) -> Any:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _not_finite(self, rows: list[int], found: str) -> DataError:
        """Names the rows that alone give a non-finite loss. The weights are those before this step."""
        bad: list[str] = []
        names: list[str] = []
        for index in rows:
            single = collate([self.samples[index]], self.cfg.ttt_steps)
            names += single.sample_ids
            with torch.no_grad(), self._autocast():
                kl_sums, _ = self.step_module(single.to(self.device, self.dtype))
            if not bool(torch.isfinite(kl_sums).all()):
                bad += single.sample_ids
        which = f"rows {', '.join(bad)}" if bad else f"no row alone, but together: {', '.join(names)}"
        return DataError(
            asked=f"training step {self.step + 1}",
            needed="a finite loss and gradient",
            found=f"{found}; {which}",
            advice="check these rows' hidden states, or lower train.lr; this step did not touch the weights",
        )

    def _replan(self) -> None:
        """Under max_seconds, shorten the schedule to what the time allows: the rate must still fall to 0.

        Done at fixed shares of the time, and the result is part of the checkpoint: a resumed run keeps it.
        """
        limit = self.cfg.max_seconds
        if limit is None or self.replanned >= len(_REPLAN) or self._slowest() < _REPLAN[self.replanned] * limit:
            return
        self.replanned += 1
        allowed = max(self.step + 1, int(self.step * limit / self._slowest()))
        self.total = min(self.planned, allowed)

    def _out_of_time(self) -> bool:
        return self.cfg.max_seconds is not None and self._slowest() >= self.cfg.max_seconds

    def _slowest(self) -> float:
        """Seconds trained; under torchrun the largest of all ranks, so that all decide alike."""
        if self.world == 1:
            return self.seconds
        value = torch.tensor(self.seconds, dtype=torch.float64, device=self.device)
        distributed.all_reduce(value, distributed.ReduceOp.MAX)
        return float(value)

    def _log(self) -> None:
        """One line of metrics.jsonl over the steps since the last."""
        window = self.window.to(self.device)
        if self.world > 1:
            distributed.all_reduce(window)
        self.last = {
            "step": self.step,
            "epoch": self.epoch,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
            "lr": self.last_rate,
            "grad_norm": self.last_norm,
            **summarise(window, self.cfg.ttt_decay),
        }
        self.window.zero_()
        if self.rank == 0:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(self.last) + "\n")

    def save(self) -> None:
        """Write the checkpoint (rank 0)."""
        if self.rank != 0:
            return
        state = {
            "identity": json.dumps(self.identity, sort_keys=True),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "window": self.window,
            "last": json.dumps(self.last),
            **{name: getattr(self, name) for name in _STATE_FIELDS},
        }
        save_checkpoint(self.folder / "checkpoint", self.step, self.draft.state_dict(), state)

    def _belongs(self, state: Mapping[str, Any]) -> bool:
        """Whether to go on from a checkpoint; ConfigError when it is another, unfinished training's."""
        changed = _differences(json.loads(state["identity"]), json.loads(json.dumps(self.identity)))
        if changed and not state["finished"]:
            raise ConfigError(
                asked=f"resuming the training in {self.folder}",
                needed="the same head, vocabulary map, data and step settings as in its checkpoint",
                found="; ".join(changed),
                advice=f"restore them, or remove {self.folder / 'checkpoint'} to train from the start",
            )
        return not changed

    def _restore(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        loaded = load_checkpoint(self.folder / "checkpoint")
        metrics = self.folder / "metrics.jsonl"
        if loaded is not None and self._belongs(loaded[1]):
            weights, state = loaded
        else:
            if self.rank == 0:
                metrics.unlink(missing_ok=True)
            return
        self.draft.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.window, self.last = state["window"], json.loads(state["last"])
        for name in _STATE_FIELDS:
            setattr(self, name, state[name])
        if self.replanned == 0:
            self.total = self.planned  # steps or epochs may be raised on a resume
        self.finished = False
        if self.rank == 0 and metrics.is_file():
            lines = metrics.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= self.step]
            metrics.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


# Settings that shape a step: changing one on a resume would make a training that neither setting describes.
_STEP_FIELDS = (
    "batch_tokens",
    "lr",
    "warmup_steps",
    "weight_decay",
    "grad_clip",
    "ttt_steps",
    "ttt_decay",
    "dtype",
)
_STATE_FIELDS = (
    *("step", "epoch", "position", "total", "seconds", "tokens"),
    *("replanned", "first_loss", "finished", "last_norm", "last_rate"),
)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line per key that differs."""
    lines = []
    for key in sorted({*old, *new}):
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            lines += [f"{key}.{line}" for line in _differences(was, now)]
        elif was != now:
            lines.append(f"{key}: {was} in the checkpoint, {now} now")
    return lines


@torch.no_grad()
def measure(module: TrainingStep, samples: Samples, batch_tokens: int, decay: float) -> dict[str, Any]:
    """`summarise` over all rows of `samples`, in float32 and without learning."""
    device = module.draft_ids.device
    total = torch.zeros(module.steps, 6, dtype=torch.float64)
    for rows in BatchOrder(tuple(samples.lengths), batch_tokens, seed=0).epoch(0):
        batch = collate([samples[i] for i in rows], module.steps).to(device, torch.float32)
        total += module(batch)[1].cpu()
    return summarise(total, decay)


@contextmanager
def rank_device() -> Iterator[torch.device]:
    """This rank's device; in a process group when torchrun started us, which is left at the end, as NCCL asks for.

    Not after an error: it is torchrun that ends the ranks then. The others may be in a collective that never completes,
    and leaving would wait for it.
    """
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda:
        torch.cuda.set_device(local)
    ours = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized()
    if ours:
        distributed.init_process_group("nccl" if cuda else "gloo")
    yield torch.device("cuda", local) if cuda else torch.device("cpu")
    if ours:
        distributed.destroy_process_group()


def train_stage(cfg: Config, progress: Progress) -> dict[str, Any]:
    """<run>/extract/train and <run>/vocab -> <run>/train.

    Leaves metrics.jsonl, checkpoint/, draft.safetensors (float32) and draft.json (the head's shape).
    """
    with rank_device() as device:
        return _train(cfg, progress, device)


def _train(cfg: Config, progress: Progress, device: torch.device) -> dict[str, Any]:
    from safetensors.torch import save

    from .files import sha256_json, write_atomic
    from .store import Store

    if cfg.train.threads:
        torch.set_num_threads(cfg.train.threads)
    target = TargetHead.load(cfg.target.model)
    vocab = VocabMap.load(cfg.run_dir / "vocab" / "vocab.safetensors")
    store = Store(cfg.run_dir / "extract" / "train")
    shape = draft_config(cfg, target, store.provenance, vocab)
    draft = init_draft(shape, target, vocab, cfg.seed)
    folder = cfg.run_dir / "train"
    identity = {
        "target": store.provenance.model_fingerprint,
        "rows": sha256_json([list(store.ids), list(store.lengths)]),
    }
    trainer = Trainer(cfg.train, draft, target, vocab, store, folder, identity, cfg.seed, device)
    last = trainer.run(progress)
    if trainer.rank == 0:
        weights = {name: tensor.cpu().contiguous() for name, tensor in draft.state_dict().items()}
        write_atomic(folder / "draft.safetensors", save(weights))
        write_json(folder / "draft.json", shape.to_dict())
    metrics = {
        **{key: last[key] for key in ("loss", "kl", "acceptance", "agreement", "in_vocab", "acceptance_length")},
        "first_loss": trainer.first_loss,
        "steps": trainer.step,
        "epochs": trainer.epoch,
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "tokens_per_second": trainer.tokens / max(trainer.seconds, 1e-9),
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "device": str(device),
    }
    heldout = cfg.run_dir / "extract" / "heldout"
    if heldout.is_dir():
        rows = Store(heldout)
        if len(rows):
            metrics["heldout"] = measure(trainer.step_module, rows, cfg.train.batch_tokens, cfg.train.ttt_decay)
    return metrics


def draft_config(cfg: Config, target: TargetHead, provenance: Any, vocab: VocabMap) -> DraftConfig:
    """The head's shape for this run; ConfigError when the stored states are not this target's."""
    layers = int(target.config["num_hidden_layers"])
    hidden = int(target.config["hidden_size"])
    if provenance.layers[-1] != layers or provenance.hidden_size != hidden or provenance.final_norm_applied:
        raise ConfigError(
            asked=f"training on the extracted states in {cfg.run_dir / 'extract'}",
            needed=f"aux boundaries and the final one, {layers}, of width {hidden}, before the final norm",
            found=f"boundaries {list(provenance.layers)}, width {provenance.hidden_size}, "
            f"final norm {'applied' if provenance.final_norm_applied else 'not applied'}",
            advice="extract again with this target",
        )
    return DraftConfig.from_target(
        target.config,
        architecture=cfg.train.architecture,
        aux_layers=provenance.layers[:-1],
        draft_vocab_size=len(vocab.d2t),
        intermediate_size=cfg.train.intermediate_size,
        num_heads=cfg.train.num_heads,
    )
