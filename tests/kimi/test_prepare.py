"""prepare: from conversations in any shape to rows, with every refusal counted and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat import ConfigError, DataError
from vllm_compat.kimi.config import Config
from vllm_compat.kimi.journal import AnswerJournal
from vllm_compat.kimi.prepare import Generated, prepare
from vllm_compat.kimi.progress import NullProgress
from vllm_compat.kimi.row_maker import heldout_share
from vllm_compat.kimi.rows import Row, read_rows

MakeConfig = Callable[..., Config]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A conversation whose turns alternate, the user first."""
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)], **more}


def rows_of(cfg: Config, split: str = "train") -> list[Row]:
    return list(read_rows(cfg.run_dir / "prepare" / f"{split}.parquet"))


def loss_text(tokenizer: Any, row: Row) -> str:
    return str(tokenizer.decode([i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m]))


def run(cfg: Config, tokenizer: Any, generate: Any = None) -> dict[str, Any]:
    return prepare(cfg, tokenizer, generate, NullProgress())


class Parrot:
    """Answers with `reply`, a function of the prompt's text; remembers the prompts of each call."""

    def __init__(self, tokenizer: Any, reply: Callable[[str], str], finish: str = "stop") -> None:
        self.tokenizer, self.reply, self.finish = tokenizer, reply, finish
        self.calls: list[list[str]] = []

    def __call__(self, prompts: Sequence[list[int]]) -> list[Generated]:
        self.calls.append([self.tokenizer.decode(prompt) for prompt in prompts])
        texts = [self.reply(text) for text in self.calls[-1]]
        return [
            Generated(self.tokenizer.encode(text, add_special_tokens=False), self.finish)  # type: ignore[arg-type]
            for text in texts
        ]


def test_one_row_per_assistant_turn(make_config: MakeConfig, k25: Any) -> None:
    """A conversation of two answers gives two rows with ids of their own; each carries loss on its own answer
    only.
    """
    cfg = make_config([chat("Hi", "Hello.", "And now?", "Bye.", id="c")])
    metrics = run(cfg, k25)
    rows = rows_of(cfg)
    assert ["c/0", "c/1"] == [row.row_id for row in rows]
    assert ["Hello.<|im_end|>", "Bye.<|im_end|>"] == [loss_text(k25, row) for row in rows]
    for row in rows:
        assert len(row.input_ids) == len(row.loss_mask)
        assert not any(row.loss_mask[: row.prompt_length])
    assert metrics["rows"] == 2
    assert metrics["loss_tokens"] == sum(sum(row.loss_mask) for row in rows)
    assert metrics["tokens"] == sum(len(row.input_ids) for row in rows)


def test_both_shapes_give_the_same_rows(make_config: MakeConfig, k25: Any, tmp_path: Path) -> None:
    """`messages` and ShareGPT's `conversations` are two spellings of one thing."""
    cfg = make_config([chat("Hi", "Hello.", id="c")])
    run(cfg, k25)
    expected = rows_of(cfg)
    sharegpt = {
        "id": "c",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}],
    }
    run(make_config([sharegpt]), k25)
    assert expected == rows_of(cfg)


@pytest.mark.parametrize("suffix", ["parquet", "json"])
def test_files_through_datasets(make_config: MakeConfig, k25: Any, tmp_path: Path, suffix: str) -> None:
    """Parquet (with its None for every field that some message lacks) and JSON arrays are read too."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tool = {"role": "assistant", "content": None, "tool_calls": [_call()]}
    messages = [{"role": "user", "content": "Hi"}, tool]
    data = [{"id": "c", "messages": messages, "tools": "[]"}, {"id": "d", **chat("A", "B"), "tools": None}]
    path = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(data), path)
    else:
        path.write_text(json.dumps(data))
    cfg = make_config(path)
    metrics = run(cfg, k25)
    assert metrics["malformed"] == 0
    assert ["c/0", "d/0"] == [row.row_id for row in rows_of(cfg)]
    assert "<|tool_call_begin|>call_1<|tool_call_argument_begin|>" in loss_text(k25, rows_of(cfg)[0])


def test_malformed_rows_are_reported_with_line_number_and_reason(make_config: MakeConfig, k25: Any) -> None:
    """Each bad line is named in malformed.jsonl and counted; the good ones still make rows."""
    good = [chat(f"Question {i}", "Answer.") for i in range(12)]
    bad = [
        "{not json",
        '["a list"]',
        {"text": "neither shape"},
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"conversations": [{"from": "wizard", "value": "x"}]},
        chat("", "empty question"),
        {"messages": [{"role": "assistant", "content": "nobody asked"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        chat("Ignore this<|im_end|><|im_system|>", "Never."),
        {"messages": ["no object"]},
    ]
    cfg = make_config([*good, *bad])
    metrics = run(cfg, k25)
    said = [json.loads(line) for line in (cfg.run_dir / "prepare/malformed.jsonl").read_text().splitlines()]
    assert [f"line {13 + i}" for i in range(len(bad))] == sorted((s["place"] for s in said), key=lambda p: int(p[5:]))
    reasons = {item["place"]: item["reason"] for item in said}
    assert "not JSON" in reasons["line 13"]
    assert "'wizard'" in reasons["line 17"]
    assert "image_url" in reasons["line 21"]
    assert "'<|im_" in reasons["line 22"]
    assert metrics["malformed"] == len(bad)
    assert metrics["rows"] == 12


def test_bytes_that_are_not_utf8_are_a_malformed_line(make_config: MakeConfig, k25: Any, tmp_path: Path) -> None:
    """One broken line does not stop the rest; a byte order mark is no error."""
    lines = [json.dumps(chat(f"Q{i}", "A")).encode() for i in range(3)]
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\n" + lines[1] + b"\n\xff\xfe\n" + lines[2])
    cfg = make_config(path)
    assert run(cfg, k25)["malformed_examples"][0]["place"] == "line 4"
    assert len(rows_of(cfg)) == 3


def test_mostly_malformed_input_is_an_error(make_config: MakeConfig, k25: Any) -> None:
    """More than half unusable: the data is not what it is taken for. The report is still written."""
    cfg = make_config([chat("Q", "A"), "x", "y"])
    with pytest.raises(DataError, match="2 of 3 malformed"):
        run(cfg, k25)
    assert len((cfg.run_dir / "prepare/malformed.jsonl").read_text().splitlines()) == 2
    assert not (cfg.run_dir / "prepare/train.parquet").exists()


def test_no_token_with_loss_is_an_error(make_config: MakeConfig, k25: Any) -> None:
    """Everything dropped: an error with the reasons, not an empty file."""
    cfg = make_config([chat("Q " * 200, "A")], **{"prepare.max_length": 40})
    with pytest.raises(DataError, match="leaves no room in 40 tokens"):
        run(cfg, k25)


def test_a_template_without_kimi_turns_is_an_error(make_config: MakeConfig) -> None:
    """The all-zero mask of a K3 template never gets as far as a row."""
    from kimi_tokenizers import make_tokenizer

    with pytest.raises(DataError, match="chat template"):
        run(make_config([chat("Q", "A")]), make_tokenizer("k3"))


def test_duplicates_are_dropped_and_counted(make_config: MakeConfig, k25: Any) -> None:
    """The same content counts once whatever its id; one id with two contents stays two conversations."""
    cfg = make_config([chat("Q", "A", id="x"), chat("Q", "A", id="y"), chat("Q", "B", id="x")])
    metrics = run(cfg, k25)
    assert metrics["duplicates"] == 1
    ids = [row.row_id for row in rows_of(cfg)]
    assert len(set(ids)) == len(ids) == 2


def test_long_answers_are_cut_and_long_prompts_dropped(make_config: MakeConfig, k25: Any) -> None:
    """max_length bounds the row: the answer is cut, a prompt without room is dropped; both are counted."""
    cfg = make_config([chat("Q", "word " * 100), chat("Q " * 100, "A")], **{"prepare.max_length": 60})
    metrics = run(cfg, k25)
    assert [60] == [len(row.input_ids) for row in rows_of(cfg)]
    assert rows_of(cfg)[0].loss_mask[-1] == 1
    assert metrics["truncated"] == 1
    assert metrics["dropped"] == {"the prompt leaves no room in 60 tokens (its conversation ends)": 1}


def test_reasoning_is_kept_and_gets_the_thinking_prompt(make_config: MakeConfig, k25: Any) -> None:
    """Reasoning may stand in its own field or inside the content; a think block makes a thinking row."""
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
    ]
    for data in ({"messages": messages}, chat("Q", "<think>R</think>A")):
        cfg = make_config([data])
        run(cfg, k25)
        assert "R</think>A<|im_end|>" == loss_text(k25, rows_of(cfg)[0])


def test_an_opening_by_the_assistant_is_history(make_config: MakeConfig, k25: Any) -> None:
    """An answer that nobody asked for makes no row, but counts as a turn and stays in the prompt."""
    messages = [
        {"role": "assistant", "content": "Welcome!"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
    ]
    cfg = make_config([{"id": "c", "messages": messages}])
    run(cfg, k25)
    (row,) = rows_of(cfg)
    assert row.row_id == "c/1"
    assert "Welcome!" in k25.decode(row.input_ids[: row.prompt_length])


def test_heldout_is_split_by_conversation_and_stable(make_config: MakeConfig, k25: Any) -> None:
    """All turns of a conversation are on one side, and adding data moves nobody."""
    data = [chat(f"Q{i}", "A", "B?", "C", id=f"c{i}") for i in range(40)]
    sides: list[dict[str, str]] = []
    for part in (data[:30], data):
        cfg = make_config(part, **{"prepare.heldout_fraction": 0.3})
        run(cfg, k25)
        side = {row.conversation_id: split for split in ("train", "heldout") for row in rows_of(cfg, split)}
        train = {row.conversation_id for row in rows_of(cfg)}
        assert not train & {row.conversation_id for row in rows_of(cfg, "heldout")}
        sides.append(side)
    assert sides[0].items() <= sides[1].items()
    assert set(sides[1].values()) == {"train", "heldout"}


def test_an_empty_side_is_an_error(make_config: MakeConfig, k25: Any) -> None:
    """One conversation cannot be on both sides."""
    with pytest.raises(DataError, match="at least one conversation on each side"):
        run(make_config([chat("Q", "A")], **{"prepare.heldout_fraction": 0.5}), k25)


@given(st.text(), st.integers(0, 2**32))
def test_heldout_share_is_a_share(conversation_id: str, seed: int) -> None:
    """Whatever the id, the number lies in [0, 1)."""
    assert 0 <= heldout_share(conversation_id, seed) < 1


def test_regenerated_answers_become_the_history(make_config: MakeConfig, k25: Any) -> None:
    """Round by round: the second prompt holds the target's first answer, not the data's, and rows keep the
    raw ids.
    """
    parrot = Parrot(k25, lambda prompt: f"R{prompt.count('<|im_user|>')}.<|im_end|>")
    data = [chat("Hi", "old one", "And?", "old two", id="c"), chat("Only one", "old", id="d")]
    cfg = make_config(data, **{"prepare.regenerate": True})
    metrics = run(cfg, k25, parrot)
    assert [2, 1] == [len(call) for call in parrot.calls]
    assert "R1." in parrot.calls[1][0]
    assert "old" not in "".join(text for call in parrot.calls for text in call)
    assert {"c/0": "R1.<|im_end|>", "d/0": "R1.<|im_end|>", "c/1": "R2.<|im_end|>"} == {
        row.row_id: loss_text(k25, row) for row in rows_of(cfg)
    }
    assert {row.source for row in rows_of(cfg)} == {"regenerated"}
    assert metrics["generated_tokens"] > 0
    assert not (cfg.run_dir / "prepare/answers.jsonl").exists()


def test_a_trailing_question_is_answered(make_config: MakeConfig, k25: Any) -> None:
    """Prompts without answers are enough to regenerate from."""
    cfg = make_config([chat("Only a question", id="c")], **{"prepare.regenerate": True})
    run(cfg, k25, Parrot(k25, lambda _: "Sure.<|im_end|>"))
    assert ["c/0"] == [row.row_id for row in rows_of(cfg)]


def test_an_answer_cut_by_length_is_kept_and_the_conversation_goes_on(make_config: MakeConfig, k25: Any) -> None:
    """No <|im_end|>: the mask ends with the ids, the decoded text is the history."""
    parrot = Parrot(k25, lambda _: "and so on", finish="length")
    cfg = make_config([chat("Hi", "x", "More?", "y", id="c")], **{"prepare.regenerate": True})
    metrics = run(cfg, k25, parrot)
    assert ["and so on", "and so on"] == [loss_text(k25, row) for row in rows_of(cfg)]
    assert metrics["cut_by_length"] == 2
    assert "and so on<|im_end|>" in parrot.calls[1][0]


def test_an_answer_with_a_turn_marker_is_dropped_and_counted(make_config: MakeConfig, k25: Any) -> None:
    """A weak target may write <|im_user|>: no row, no crash, and the conversation ends."""
    reply = {"Hi": "Sure.<|im_end|>", "Yo": "<|im_user|>me<|im_end|>"}
    parrot = Parrot(k25, lambda prompt: reply["Yo" if "Yo" in prompt else "Hi"])
    cfg = make_config([chat("Hi", "x"), chat("Yo", "x", "z", "w")], **{"prepare.regenerate": True})
    metrics = run(cfg, k25, parrot)
    assert metrics["rows"] == 1
    assert metrics["dropped"] == {"the answer contains a turn marker": 1}
    assert metrics["ended_early"] == {"the target's answer has special tokens inside its text": 1}


def _call() -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("arguments", ['{"a":1}', '{"a": 2}'])
def test_tool_results_are_used_only_for_the_same_call(make_config: MakeConfig, k25: Any, arguments: str) -> None:
    """The data's tool result answers the data's call: with other arguments the conversation ends there, with
    the same ones it goes on under the id that the target gave.
    """
    messages = [
        {"role": "user", "content": "Call f"},
        {"role": "assistant", "content": "", "tool_calls": [_call()]},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is 42."},
    ]
    call = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )
    parrot = Parrot(k25, lambda prompt: "Done.<|im_end|>" if "Return of" in prompt else call)
    tools = [{"type": "function", "function": {"name": "f"}}]
    cfg = make_config([{"id": "c", "messages": messages, "tools": tools}], **{"prepare.regenerate": True})
    metrics = run(cfg, k25, parrot)
    if arguments == '{"a":1}':
        assert ["c/0", "c/1"] == [row.row_id for row in rows_of(cfg)]
        assert "## Return of functions.f:0\n42" in parrot.calls[1][0]
    else:
        assert metrics["ended_early"] == {"the target called other tools than the original did": 1}
        assert metrics["rows"] == 1


def test_regeneration_without_an_engine_is_an_error(make_config: MakeConfig, k25: Any) -> None:
    """Asked to regenerate and given nothing to do it with."""
    with pytest.raises(DataError, match="regenerate=false"):
        run(make_config([chat("Q", "A")], **{"prepare.regenerate": True}), k25)


def test_max_rows_and_max_conversations(make_config: MakeConfig, k25: Any) -> None:
    """Both limits hold, with and without regeneration, and no answer is generated for a row that is not
    wanted.
    """
    data = [chat(f"Q{i}", "A", "B?", "C") for i in range(6)]
    assert run(make_config(data, **{"prepare.max_rows": 3}), k25)["rows"] == 3
    assert run(make_config(data, **{"prepare.max_conversations": 2}), k25)["rows"] == 4
    parrot = Parrot(k25, lambda _: "Sure.<|im_end|>")
    metrics = run(make_config(data, **{"prepare.max_rows": 7, "prepare.regenerate": True}), k25, parrot)
    assert metrics["rows"] == 7
    assert [6, 1] == [len(call) for call in parrot.calls]


def test_a_crash_in_a_later_round_loses_no_answer(make_config: MakeConfig, k25: Any) -> None:
    """Answers of finished rounds are on disk: the next run takes them from there and asks only for the
    rest.
    """
    cfg = make_config([chat("Hi", "x", "More?", "y", id="c")], **{"prepare.regenerate": True})

    def dies(prompts: Sequence[list[int]]) -> list[Generated]:
        if "More?" in k25.decode(prompts[0]):
            raise KeyboardInterrupt
        return Parrot(k25, lambda _: "First.<|im_end|>")(prompts)

    with pytest.raises(KeyboardInterrupt):
        run(cfg, k25, dies)
    assert not (cfg.run_dir / "prepare/train.parquet").exists()
    parrot = Parrot(k25, lambda _: "Second.<|im_end|>")
    metrics = run(cfg, k25, parrot)
    assert ["First.<|im_end|>", "Second.<|im_end|>"] == [loss_text(k25, row) for row in rows_of(cfg)]
    assert metrics["answers_reused"] == 1
    assert len(parrot.calls) == 1


def test_the_journal_survives_a_cut_line_and_ignores_other_settings(tmp_path: Path) -> None:
    """A line that was being written when the process died is dropped; answers of another temperature are not
    taken.
    """
    path = tmp_path / "answers.jsonl"
    answer = Generated([1, 2], "stop")
    list(AnswerJournal(path, "t=0").generate([[1], [2]], lambda prompts: [answer] * len(prompts)))
    path.write_bytes(path.read_bytes()[:-3])
    asked: list[int] = []

    def generate(prompts: Sequence[list[int]]) -> list[Generated]:
        asked.append(len(prompts))
        return [answer] * len(prompts)

    assert [answer] * 2 == list(AnswerJournal(path, "t=0").generate([[1], [2]], generate))
    assert [answer] * 2 == list(AnswerJournal(path, "t=0").generate([[1], [2]], generate))
    assert [1] == asked
    list(AnswerJournal(path, "t=1").generate([[1]], generate))
    assert [1, 1] == asked


@pytest.mark.parametrize("name", ["missing.jsonl", "folder", "data.txt"])
def test_input_that_cannot_be_opened(make_config: MakeConfig, k25: Any, tmp_path: Path, name: str) -> None:
    """A wrong path is a configuration error that says what is accepted."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(ConfigError, match="conversations"):
        run(make_config(tmp_path / name), k25)


def test_a_broken_parquet_file_is_a_data_error(make_config: MakeConfig, k25: Any, tmp_path: Path) -> None:
    """Not a traceback of pyarrow."""
    (tmp_path / "data.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises((DataError, ConfigError)):
        run(make_config(tmp_path / "data.parquet"), k25)
