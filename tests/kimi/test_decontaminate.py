"""No row twice, and nothing of the held-out set among the training rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from vllm_compat.kimi.config import Config
from vllm_compat.kimi.decontaminate import HeldOut
from vllm_compat.kimi.prepare import prepare
from vllm_compat.kimi.progress import NullProgress
from vllm_compat.kimi.row_maker import heldout_share
from vllm_compat.kimi.rows import Row, read_rows


def row(prompt: list[int], answer: list[int]) -> Row:
    ids = prompt + answer
    return Row("a/0", "a", 0, ids, len(prompt), [0] * len(prompt) + [1] * len(answer), "original")


def words(number: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(5000), number)


HELD = row(words(30, 0), words(60, 1))


@pytest.mark.parametrize(
    ("prompt", "answer", "contaminated"),
    [
        (words(30, 0), words(40, 9), True),  # its prompt
        (words(30, 0)[:-1], words(40, 9), False),  # the system prompt, say, and another question
        (words(30, 8), words(60, 1), True),  # its answer to another prompt
        (words(30, 8), words(60, 1)[10:50], True),  # a piece of it
        (words(30, 8), words(60, 1)[:12], False),  # shorter than an n-gram: may be chance
        (words(30, 8), words(60, 1)[:40] + words(9, 7), True),  # 40 of 49
        (words(30, 8), words(60, 1)[:40] + words(12, 7), False),  # 40 of 52
        (words(30, 8), [x for pair in zip(words(60, 1), words(60, 7), strict=True) for x in pair], False),
        (words(30, 8), words(60, 6), False),
    ],
)
def test_what_counts_as_contaminated(prompt: list[int], answer: list[int], contaminated: bool) -> None:
    """The prompt of a held-out row, or 80 % of the answer in 13-grams of held-out answers."""
    assert contaminated == (HeldOut([HELD], 13).reason(row(prompt, answer)) is not None)


def test_ngrams_can_be_switched_off() -> None:
    """With 0 the prompts alone are compared."""
    assert HeldOut([HELD], 0).reason(row(words(30, 8), words(60, 1))) is None
    assert HeldOut([HELD], 0).reason(row(words(30, 0), words(60, 9))) is not None


def test_rows_of_a_run(make_config: Callable[..., Config], k25: Any) -> None:
    """Counted by reason; the held-out rows stay; the token counts are those of what is left."""

    def chat(name: str, *texts: str) -> dict[str, Any]:
        roles = ("user", "assistant")
        return {"id": name, "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}

    held, *rest = (str(i) for i in range(1000) if heldout_share(str(i), 0) < 0.1)
    learned = [str(i) for i in range(1000) if heldout_share(str(i), 0) >= 0.1]
    poem = " ".join(f"line {i} of a poem that nobody wrote" for i in range(20))
    cfg = make_config(
        [
            chat(held, "Write a poem.", poem),
            chat(rest[0], "How are you?", "Well."),
            chat(learned[0], "Write a poem.", "No."),  # the prompt
            chat(learned[1], "A poem, please!", poem),  # the answer
            chat(learned[2], "What is 2 + 2?", "4", "Sure?", "Yes."),
            chat(learned[3], "What is 2 + 2?", "4", "And 3 + 3?", "6"),  # its first turn is there already
        ],
        **{"prepare.heldout_fraction": 0.1},
    )
    metrics = prepare(cfg, k25, None, NullProgress())
    kept = {split: list(read_rows(cfg.run_dir / "prepare" / f"{split}.parquet")) for split in ("train", "heldout")}
    assert [f"{learned[2]}/0", f"{learned[2]}/1", f"{learned[3]}/1"] == [r.row_id for r in kept["train"]]
    assert [f"{held}/0", f"{rest[0]}/0"] == [r.row_id for r in kept["heldout"]]
    assert {
        "the same tokens as another row": 1,
        "the prompt of a held-out row": 1,
        "80% of the answer stand in held-out answers (13-grams)": 1,
    } == metrics["dropped"]
    assert metrics["contaminated"] == 2
    assert (3, 2) == (metrics["train_rows"], metrics["heldout_rows"])
    every = kept["train"] + kept["heldout"]
    assert sum(len(r.input_ids) for r in every) == metrics["tokens"]
    assert sum(sum(r.loss_mask) for r in every) == metrics["loss_tokens"]
    assert not list((cfg.run_dir / "prepare").glob(".tmp-*"))
