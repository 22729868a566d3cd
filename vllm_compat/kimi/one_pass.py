"""One pass: the target answers, and the states of prompt and answer are captured while it does.

Prefilling prompt and answer again, as ``extract`` does with rows of any kind, computes nothing new: the states of the
prompt came from its prefill, those of the answer from generating it. They go to a store beside the rows, by prompt, and
``extract`` takes them from there. A row whose states are not there (another answer, a run that was killed before they
were published, other layers since) is prefilled as ever.

Every answer is generated one token further than it counts, since a token's state is computed when it is fed back, and
the last one never is.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_compat import CapturedStates, EngineLoop, HiddenStatesCapture, StoreError, capture_hidden_states

from .background import Background
from .journal import Generate, Generated
from .provenance import provenance_of, room_for
from .settings import aux_layers
from .shards import DTYPES, FP8, Provenance, Sample
from .store import Store, StoreWriter
from .target import load_text_config
from .target_engine import open_target

if TYPE_CHECKING:
    from .config import Config
    from .progress import Progress
    from .rows import Row

#: In place of the rows' checksum: states are kept by prompt, before there are rows.
_ROWS = "answers, before they became rows"


def _whole(dtype: str) -> dict[str, str]:
    """How the states of answers are kept, of which nobody knows yet which tokens carry loss: all, and not in fp8."""
    return {"finals": "all", "dtype": "bfloat16" if dtype == FP8 else dtype}


def folder_of(cfg: Config) -> Path:
    """The store of the answers' states."""
    return cfg.run_dir / "prepare" / "states"


def sample_id(prompt: Sequence[int]) -> str:
    """Under which name the states of a prompt and its answer are kept."""
    return hashlib.sha256(array("q", prompt).tobytes()).hexdigest()[:32]


@dataclass
class _Answer:
    """An answer that is being generated: its prompt, and at most so many tokens."""

    prompt: list[int]
    most: int
    token_ids: list[int] = field(default_factory=list)

    def ends(self, stops: frozenset[int]) -> int | None:
        """How many tokens the answer has, once that is known."""
        stop = next((at for at, token in enumerate(self.token_ids[: self.most]) if token in stops), None)
        if stop is not None:
            return stop + 1
        return self.most if len(self.token_ids) >= self.most else None


def generate_and_capture(
    loop: EngineLoop,
    capture: HiddenStatesCapture,
    prompts: Sequence[list[int]],
    params: Sequence[Any],
    most: int,
    stops: frozenset[int],
) -> Iterator[tuple[int, Generated, CapturedStates]]:
    """(index of the prompt, answer, states), in the order in which they end.

    Args:
        loop, capture: An engine and what captures on it.
        prompts: Token ids.
        params: SamplingParams per prompt that stop nowhere and allow one token more than `most`.
        most: Tokens of an answer; fewer where ``max_model_len`` ends.
        stops: An answer ends with the first of these tokens.

    The states are those of the prompt and the answer, except for the last token of an answer that ends with
    ``max_model_len``.
    """
    room = loop.vllm_config.model_config.max_model_len
    live: dict[str, tuple[int, _Answer]] = {}
    waiting = iter(enumerate(zip(prompts, params, strict=True)))
    in_flight = 2 * loop.vllm_config.scheduler_config.max_num_seqs
    exhausted = False
    while live or not exhausted:
        while not exhausted and len(live) < in_flight:
            index, (prompt, chosen) = next(waiting, (-1, (None, None)))
            if prompt is None:
                exhausted = True
                break
            live[loop.add(prompt, chosen)] = index, _Answer(prompt, min(most, room - len(prompt)))
        if not live:
            break
        for update in loop.step():
            if update.request_id in live:
                _, answer = live[update.request_id]
                answer.token_ids += update.new_token_ids
                length = answer.ends(stops)
                if length is not None and len(answer.token_ids) > length:
                    loop.finish(update.request_id)  # the answer's last token has been fed; nothing if it ended itself
        for done in loop.collect():
            index, answer = live.pop(done.request_id)
            length = answer.ends(stops)
            assert length is not None
            stopped = answer.token_ids[length - 1] in stops
            yield (
                index,
                Generated(answer.token_ids[:length], "stop" if stopped else "length"),
                capture.pop(done.request_id),
            )


def _ends_of(loop: EngineLoop) -> frozenset[int]:
    """The tokens at which vLLM ends a request by itself, as the model's generation_config.json has them."""
    ends = loop.vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)


@contextmanager
def open_one_pass(cfg: Config, stops: Iterable[int], params_of: Any, progress: Progress) -> Iterator[Generate]:
    """A function prompts -> answers, which stores the states of both on the way.

    Args:
        cfg: The run.
        stops: Tokens that end an answer.
        params_of: (prompt, tokens) -> SamplingParams that stop nowhere.
        progress: For the bar.
    """
    num_layers = int(load_text_config(cfg.target.model)["num_hidden_layers"])
    layers = (*aux_layers(cfg.extract.layers, num_layers), num_layers)
    loop = open_target(
        cfg.target,
        max_num_seqs=cfg.extract.max_num_seqs,
        max_num_batched_tokens=cfg.extract.max_num_batched_tokens,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    with loop, capture_hidden_states(loop, layers, dtype=DTYPES[cfg.extract.dtype]) as capture:
        ends = frozenset(stops) | _ends_of(loop)
        provenance = provenance_of(cfg, capture.model_info, layers, _ROWS, **_whole(cfg.extract.dtype))
        extract = cfg.extract
        store = StoreWriter(folder_of(cfg), provenance, extract.shard_mb << 20, extract.max_bad_rows)
        taken = set(store.done)

        def add(item: tuple[str, CapturedStates]) -> None:
            name, states = item
            ids = torch.tensor(states.token_ids, dtype=torch.int32)
            mask = torch.ones(len(ids), dtype=torch.uint8)
            store.add(Sample(name, ids, mask, states.hidden_states.to(DTYPES[provenance.dtype])))

        def generate(prompts: Sequence[list[int]]) -> list[Generated]:
            answers: list[Generated | None] = [None] * len(prompts)
            most = cfg.prepare.max_new_tokens
            room = cfg.target.max_model_len
            params = [params_of(prompt, min(most + 1, room - len(prompt))) for prompt in prompts]
            with progress.task("generating answers, keeping states", total=len(prompts)) as bar:
                for index, answer, states in generate_and_capture(loop, capture, prompts, params, most, ends):
                    answers[index] = answer
                    name = sample_id(prompts[index])
                    if name not in taken:  # two conversations may begin alike
                        taken.add(name)
                        feeder.put((name, states), states.nbytes)
                    bar.advance(1)
            return [answer for answer in answers if answer is not None]

        with store, Background(add, room_for(cfg, loop, provenance)) as feeder:
            yield generate


class AnswerStates:
    """What the one pass left, for ``extract``; empty where there is nothing that fits."""

    def __init__(self, folder: Path, provenance: Provenance) -> None:
        self._store: Store | None = None
        self._ids: frozenset[str] = frozenset()
        try:
            store = Store(folder)
        except StoreError:
            return  # none there, or a shard is gone: then rows are prefilled
        kept: dict[str, Any] = {"rows_fingerprint": _ROWS, **_whole(provenance.dtype)}
        if store.provenance == replace(provenance, **kept):
            self._store, self._ids = store, frozenset(store.ids)

    def of(self, row: Row) -> torch.Tensor | None:
        """[T, L, H] of the row's T tokens; None when they are not here."""
        name = sample_id(row.input_ids[: row.prompt_length])
        if self._store is None or name not in self._ids:
            return None
        sample = self._store.by_id(name)
        count = len(row.input_ids)
        if sample.token_ids[:count].tolist() != row.input_ids:
            return None
        return sample.hidden_states[:count].clone()
