"""dry-run: everything about a run that can be checked without loading the weights.

Each check is ok, "wrong" (the configuration cannot work anywhere) or "missing" (this machine lacks
something).
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_compat import installed
from vllm_compat.errors import ConfigError, DataError, VllmCompatError, VllmNotInstalled

from .conversations import Reading, read_conversations
from .prompts import find_markers, load_tokenizer, marker_in, render_prompt
from .settings import aux_layers
from .target_config import TargetShape, read_target_shape

if TYPE_CHECKING:
    from .config import Config

_SAMPLE = 200  # conversations that stand for all of them
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1 + 4 / 128}
_HEADS = {"mla": "Eagle3DeepseekV2ForCausalLM", "llama": "LlamaForCausalLMEagle3"}
# The state after the last layer of DeepSeek-class models: vLLM PR 46973. MLA heads: PR 36361, in 0.18.0.
_GIVES_FINAL_STATE = (0, 25, 0)


@dataclass(frozen=True)
class Check:
    """One line of the dry run."""

    name: str
    status: Literal["ok", "missing", "wrong"]
    text: str


def dry_run(cfg: Config) -> list[Check]:
    """All checks, in order; later ones that need a failed one are left out."""
    checks: list[Check] = []

    def check(name: str, made: Callable[[], str]) -> bool:
        try:
            checks.append(Check(name, "ok", made()))
        except _Missing as error:
            checks.append(Check(name, "missing", str(error)))
        except VllmCompatError as error:
            checks.append(Check(name, "wrong", str(error)))
        return checks[-1].status == "ok"

    shape: list[TargetShape] = []
    tokenizer: list[Any] = []
    if check("target", lambda: _target(cfg, shape)):
        check("layers", lambda: _layers(cfg, shape[0]))
        check("lengths", lambda: _lengths(cfg, shape[0]))
        check("vocabulary", lambda: _vocabulary(cfg, shape[0]))
    if check("tokenizer", lambda: _tokenizer(cfg, tokenizer)):
        tokens: list[float] = []
        if check("conversations", lambda: _conversations(cfg, tokenizer[0], tokens)) and shape:
            check("disk", lambda: _disk(cfg, shape[0], tokens[0]))
    check("accelerators", lambda: _accelerators(cfg))
    if check("vllm", lambda: _release(cfg)):
        check("models", lambda: _models(cfg, shape[0].architecture if shape else None))
        check("engine_args", lambda: _engine_args(cfg))
    return checks


class _Missing(Exception):
    """This machine lacks what the configuration needs."""


def _target(cfg: Config, shape: list[TargetShape]) -> str:
    made = read_target_shape(cfg.target.model)
    shape.append(made)
    return (
        f"{made.architecture}: {made.num_hidden_layers} layers, hidden {made.hidden_size}, vocabulary"
        f" {made.vocab_size:,}"
    )


def _layers(cfg: Config, shape: TargetShape) -> str:
    layers = aux_layers(cfg.extract.layers, shape.num_hidden_layers)
    return f"boundaries {', '.join(map(str, layers))} and {shape.num_hidden_layers} (final)"


def _lengths(cfg: Config, shape: TargetShape) -> str:
    longest = shape.max_position_embeddings
    if longest is not None and cfg.target.max_model_len > longest:
        raise ConfigError(
            f"target.max_model_len = {cfg.target.max_model_len}",
            needed=f"at most {longest}, the target's own limit",
        )
    return f"rows up to {cfg.prepare.max_length} tokens, engine {cfg.target.max_model_len}, target {longest}"


def _vocabulary(cfg: Config, shape: TargetShape) -> str:
    if cfg.vocab.draft_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"vocab.draft_vocab_size = {cfg.vocab.draft_vocab_size}",
            needed=f"at most the target's {shape.vocab_size}",
        )
    return f"{cfg.vocab.draft_vocab_size:,} of {shape.vocab_size:,} tokens"


def _tokenizer(cfg: Config, tokenizer: list[Any]) -> str:
    made = load_tokenizer(cfg.target)
    markers = find_markers(made)
    tokenizer.append(made)
    return f"Kimi's turn markers are there (<|im_end|> = {markers.end}), the chat template writes them"


def _conversations(cfg: Config, tokenizer: Any, tokens: list[float]) -> str:
    """Render a sample; leaves the estimated tokens of all rows in `tokens`."""
    markers, reading = find_markers(tokenizer), Reading()
    lengths = []
    for conversation in islice(read_conversations(cfg.prepare, reading), _SAMPLE):
        marker = marker_in(conversation.texts(), markers)
        if marker is not None:
            reading.refuse(conversation.place, f"the text contains the special token {marker!r}")
            continue
        messages = conversation.messages
        for at in range(1, len(messages) + 1):
            if messages[at - 1]["role"] in ("user", "tool"):
                prompt = render_prompt(tokenizer, messages[:at], conversation.tools, cfg.prepare.thinking)
                answer = cfg.prepare.max_new_tokens if cfg.prepare.regenerate else len(prompt)
                lengths.append(min(len(prompt) + answer, cfg.prepare.max_length))
    bad = len(reading.malformed)
    if bad * 2 > reading.read or not lengths:
        raise DataError(
            f"prepare.conversations = {cfg.prepare.conversations!r}",
            needed="conversations that can be used",
            found=f"{bad} malformed among the first {reading.read}: {reading.malformed[:3]}",
        )
    number = _count(cfg, reading.read)
    rows = number * len(lengths) / reading.read
    if cfg.prepare.max_rows is not None:
        rows = min(rows, cfg.prepare.max_rows)
    tokens.append(rows * sum(lengths) / len(lengths))
    return (
        f"{bad} of the first {reading.read} malformed; at most {rows:,.0f} rows and"
        f" {tokens[0]:,.0f} tokens from {number:,} conversations"
    )


def _count(cfg: Config, at_least: int) -> int:
    """Conversations in all, where that can be known without reading the data through a parser."""
    path, number = Path(cfg.prepare.conversations), at_least
    if path.suffix == ".jsonl":
        with path.open("rb") as stream:
            number = sum(1 for line in stream if line.strip())
    elif path.suffix == ".parquet":
        from .rows import count_rows

        number = count_rows(path)
    most = cfg.prepare.max_conversations
    return number if most is None else min(number, most)


def _disk(cfg: Config, shape: TargetShape, tokens: float) -> str:
    aux = len(aux_layers(cfg.extract.layers, shape.num_hidden_layers))
    value = _BYTES[cfg.extract.dtype]
    per_token = round(shape.hidden_size * (aux * value + max(value, 2)))  # fp8: the final state in bfloat16
    needed = per_token * tokens
    place = next(path for path in (cfg.run_dir.absolute(), *cfg.run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    text = f"{per_token:,} bytes/token: at most {_size(needed)}; {_size(free)} free at {cfg.run_dir}"
    if needed > free:
        raise _Missing(text)
    return text


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _accelerators(cfg: Config) -> str:
    needed = cfg.target.tensor_parallel_size * cfg.target.pipeline_parallel_size
    import torch

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if needed > max(here, 1):
        raise _Missing(f"tensor x pipeline parallel needs {needed} accelerators, {here} here")
    return f"{here} accelerators for {needed} workers" if here else "none here, one worker runs on the CPU"


def _release(cfg: Config) -> str:
    try:
        here = installed()
    except VllmNotInstalled as error:
        raise _Missing(str(error)) from error
    release = here.release
    if release is not None and tuple(release) < _GIVES_FINAL_STATE:
        raise _Missing(
            f"{here}; the state after the last layer of a DeepSeek-class model needs vLLM 0.25.0,"
            " serving an MLA head 0.18.0"
        )
    return f"{here}, runner {here.runner}; {cfg.train.architecture} heads since 0.18.0"


def _models(cfg: Config, target: str | None) -> str:
    """Are target and head in the installed vLLM's registry? Read as text: importing vLLM takes seconds."""
    registry = installed().location / "model_executor" / "models" / "registry.py"
    text = registry.read_text(encoding="utf-8")
    wanted = [name for name in (target, _HEADS[cfg.train.architecture]) if name]
    unknown = [name for name in wanted if f'"{name}"' not in text]
    if unknown:
        raise _Missing(f"{installed()} has no {', '.join(unknown)}")
    return f"{', '.join(wanted)} are in its registry"


def _engine_args(cfg: Config) -> str:
    source = installed().location / "engine" / "arg_utils.py"
    known = _fields(ast.parse(source.read_text(encoding="utf-8")), "EngineArgs")
    unknown = sorted(set(cfg.target.engine_args) - known)
    if unknown:
        raise ConfigError(
            f"target.engine_args: {', '.join(unknown)}",
            needed=f"fields of EngineArgs in {installed()}",
            advice="remove them, or use the name of this release",
        )
    return ", ".join(f"{key}={value}" for key, value in cfg.target.engine_args.items()) or "none"


def _fields(tree: ast.Module, name: str) -> set[str]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    annotated = [node for cls in classes for node in cls.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id for node in annotated if isinstance(node.target, ast.Name)}


def as_json(checks: list[Check]) -> list[Mapping[str, str]]:
    """For --json."""
    return [{"name": check.name, "status": check.status, "text": check.text} for check in checks]
