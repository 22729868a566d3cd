"""The target's own answers, for regeneration and for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

from vllm_compat import EngineLoop, make_sampling_params

from .journal import Generate, Generated
from .one_pass import open_one_pass
from .progress import Progress
from .prompts import find_markers, load_tokenizer
from .settings import Config
from .target_engine import open_target


@contextmanager
def open_generator(cfg: Config, progress: Progress) -> Iterator[Generate]:
    """A function prompts -> answers on a running target.

    Each answer ends at ``<|im_end|>`` or after ``prepare.max_new_tokens``, or where ``max_model_len`` ends. With a
    temperature every prompt has a seed of its own, made of the run's seed and its tokens, so that a resumed run
    writes the same answers.
    """
    tokenizer = load_tokenizer(cfg.target)
    end = find_markers(tokenizer).end
    if cfg.prepare.one_pass:
        stops = {end} if tokenizer.eos_token_id is None else {end, tokenizer.eos_token_id}
        with open_one_pass(cfg, stops, partial(unending_params, cfg), progress) as generate:
            yield generate
        return
    # Turns of one conversation share their history: prefix caching saves most of the prefill.
    loop = open_target(
        cfg.target,
        max_num_seqs=cfg.extract.max_num_seqs,
        max_num_batched_tokens=cfg.extract.max_num_batched_tokens,
        enable_prefix_caching=True,
    )
    with loop:

        def generate(prompts: Sequence[list[int]]) -> list[Generated]:
            answers = []
            with progress.task("generating answers", total=len(prompts)) as bar:
                params = [answer_params(cfg, prompt, end) for prompt in prompts]
                for done in loop.generate(prompts, params):
                    reason = cast(Literal["stop", "length"], done.finish_reason)
                    answers.append(Generated(list(done.token_ids), reason))
                    bar.advance(1)
            return answers

        yield generate


def answer_params(cfg: Config, prompt: Sequence[int], end: int) -> Any:
    """SamplingParams for one prompt of prepare."""
    most = min(cfg.prepare.max_new_tokens, cfg.target.max_model_len - len(prompt))
    return make_sampling_params(**_sampling(cfg, prompt), max_tokens=most, stop_token_ids=[end])


def unending_params(cfg: Config, prompt: Sequence[int], most: int) -> Any:
    """The same, for answers that somebody else ends; after `most` tokens at the latest."""
    return make_sampling_params(**_sampling(cfg, prompt), max_tokens=most, ignore_eos=True)


def _sampling(cfg: Config, prompt: Sequence[int]) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": cfg.prepare.temperature, "detokenize": False}
    if cfg.prepare.temperature > 0:
        options["seed"] = answer_seed(cfg.seed, prompt)
    return options


def answer_seed(seed: int, prompt: Sequence[int]) -> int:
    """A seed from 0 to 2**31 - 1 for one prompt, the same in every process and every Python (``hash`` is not)."""
    digest = hashlib.blake2b(",".join(map(str, (seed, *prompt))).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def greedy(loop: EngineLoop, prompts: Sequence[Sequence[int]], params: Any, progress: Progress, what: str) -> list[Any]:
    """Run prompts to the end under a progress bar; FinishedRequests in the order of the prompts."""
    finished = []
    with progress.task(what, total=len(prompts)) as bar:
        for done in loop.generate(prompts, params):
            finished.append(done)
            bar.advance(1)
    return finished
