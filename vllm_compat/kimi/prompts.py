"""Kimi's turn format by token ids: rendered prompts, and the loss mask of a row.

A turn is `<|im_user|>name<|im_middle|>content<|im_end|>` (`<|im_assistant|>`, `<|im_system|>` likewise); the
generation prompt ends in `<|im_middle|>`, in K2.5 followed by a prefilled `<think>` or `<think></think>`. Ids
are looked up by the marker's text, because K3 gave K2's numbers to other markers. Nothing here needs offsets
or an assistant mask: Kimi's own tokenizer is a slow one and has neither.

Rows are never made by rendering a finished conversation: the template drops the reasoning of the last turn. A
row is the rendered prompt plus the answer's own ids, and only the answer carries loss.

Text that contains a marker ("<|im_end|>" typed by a user) is refused, not escaped: Kimi's template and
tokenizer, here as in serving, would turn it into the real token, so a row with it would not be what the
conversation says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import ConfigError, DataError

if TYPE_CHECKING:
    from .settings import TargetConfig

Message = Mapping[str, Any]

_REQUIRED = {
    "end": "<|im_end|>",
    "user": "<|im_user|>",
    "assistant": "<|im_assistant|>",
    "system": "<|im_system|>",
    "middle": "<|im_middle|>",
}
_OPTIONAL = {  # not in every generation: K2 has no think tokens
    "think": "<think>",
    "end_think": "</think>",
    "calls": "<|tool_calls_section_begin|>",
    "end_calls": "<|tool_calls_section_end|>",
    "call": "<|tool_call_begin|>",
    "arguments": "<|tool_call_argument_begin|>",
    "end_call": "<|tool_call_end|>",
}


@dataclass(frozen=True)
class Markers:
    """Token ids of Kimi's markers in one tokenizer.

    The optional ones are None where the tokenizer lacks them.

    `special` has every id that text can turn into a token of its own, `texts` what that text is.
    """

    end: int
    user: int
    assistant: int
    system: int
    middle: int
    think: int | None
    end_think: int | None
    calls: int | None
    end_calls: int | None
    call: int | None
    arguments: int | None
    end_call: int | None
    special: frozenset[int]
    texts: tuple[str, ...]

    @property
    def turns(self) -> frozenset[int]:
        """The ids that only a template may write: an answer that contains one is not an answer."""
        return frozenset((self.user, self.assistant, self.system, self.middle))


def load_tokenizer(target: TargetConfig) -> Any:
    """The target's tokenizer; ConfigError when there is none at `target.tokenizer` (or `target.model`)."""
    from transformers import AutoTokenizer

    name = target.tokenizer or target.model
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=target.trust_remote_code)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the tokenizer of {name}",
            needed="a local directory or a Hugging Face hub id that can be reached",
            found=str(error).split("\n")[0],
            advice="check target.model, target.tokenizer and (for Kimi's own) target.trust_remote_code",
        ) from error


def find_markers(tokenizer: Any) -> Markers:
    """Look the markers up and check that the chat template writes them.

    DataError: a marker is missing or is not one token (listed), or the template renders turns in another
    form, as K3's does although K2's markers may still be in its vocabulary. Without this check every mask
    would silently be zero.
    """
    ids: dict[str, int | None] = {key: _one_id(tokenizer, text) for key, text in {**_REQUIRED, **_OPTIONAL}.items()}
    missing = [text for key, text in _REQUIRED.items() if ids[key] is None]
    if missing:
        raise DataError(
            f"Kimi's turn format with the tokenizer {getattr(tokenizer, 'name_or_path', '') or 'given'}",
            needed="each turn marker to be one token: " + " ".join(_REQUIRED.values()),
            found="not one token here: " + " ".join(missing),
            advice="this is no Kimi-K2 or K2.5 tokenizer (K3 writes turns differently); set target.tokenizer",
        )
    added = {int(i): str(getattr(t, "content", t)) for i, t in tokenizer.added_tokens_decoder.items()}
    # Kimi's tokenizer also matches its reserved tokens, which it keeps in an attribute of its own.
    own = getattr(tokenizer, "special_tokens", None)
    if isinstance(own, dict):
        added.update({int(i): str(text) for text, i in own.items()})
    known = [i for i in ids.values() if i is not None]
    special = frozenset([*added, *known, *tokenizer.all_special_ids])
    texts = tuple(sorted({*added.values(), *tokenizer.all_special_tokens, *_REQUIRED.values()}))
    markers = Markers(**ids, special=special, texts=texts)  # type: ignore[arg-type]  # the required ones are not None
    generation_prefix(tokenizer, markers, thinking=False)
    return markers


def render_prompt(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None, thinking: bool = False
) -> list[int]:
    """Token ids of `messages` in the target's chat template, with the generation prompt at the end.

    `thinking` is passed on for templates that know it. DataError when the template refuses the messages.
    """
    from jinja2 import TemplateError

    try:
        made = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            thinking=thinking,
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise DataError(
            "rendering a conversation with the target's chat template",
            found=f"{type(error).__name__}: {error}",
            advice="look at the message fields that the template reads",
        ) from error
    # Tokenizers with code of their own differ in what they make of return_dict and of tensors.
    if isinstance(made, Mapping) or hasattr(made, "input_ids"):
        made = made["input_ids"]
    made = made.tolist() if hasattr(made, "tolist") else made
    return [int(i) for i in (made[0] if made and isinstance(made[0], list) else made)]


def generation_prefix(tokenizer: Any, markers: Markers, thinking: bool) -> list[int]:
    """What the template puts after the generation prompt's `<|im_middle|>`.

    Nothing, `<think>`, or `<think></think>`.

    DataError when the template does not write one user turn and an open assistant turn in Kimi's form.
    """
    ids = render_prompt(tokenizer, [{"role": "user", "content": "a"}], thinking=thinking)
    skeleton = [i for i in ids if i in markers.turns or i == markers.end]
    wanted = [markers.user, markers.middle, markers.end, markers.assistant, markers.middle]
    prefix = ids[len(ids) - ids[::-1].index(markers.middle) :] if markers.middle in ids else []
    if skeleton[-5:] != wanted or not set(prefix) <= {markers.think, markers.end_think}:
        raise DataError(
            "Kimi's turn format with this chat template",
            needed="<|im_user|>…<|im_middle|>…<|im_end|><|im_assistant|>…<|im_middle|>, at most think tags",
            found=repr(tokenizer.decode(ids)),
            advice="use the tokenizer of a Kimi-K2 or K2.5 model, with its own chat template",
        )
    return prefix


def loss_mask(ids: Sequence[int], prompt_length: int, markers: Markers, prefix: Sequence[int]) -> list[int]:
    """1 on the answer's own tokens, `<|im_end|>`, tool calls and reasoning included.

    0 elsewhere. Same length as `ids`.

    prefix: what `generation_prefix` gave for this row's prompt; prefilled, so it carries no loss. The answer
    starts at `prompt_length`, and again where a scan of the ids finds the last assistant turn; DataError when
    the two disagree, for then prompt and answer are not what they are taken for.
    """
    scanned = answer_start(ids, markers, prefix)
    if scanned != prompt_length:
        raise DataError(
            "the loss mask of a row",
            needed=f"the answer to start at {prompt_length}, the prompt's length",
            found=f"the last <|im_assistant|> turn's content starts at {scanned}",
            advice="prompt and answer do not belong together, or the answer contains a turn marker",
        )
    stop = len(ids)
    if markers.end in ids[prompt_length:]:
        stop = ids.index(markers.end, prompt_length) + 1
    return [0] * prompt_length + [1] * (stop - prompt_length) + [0] * (len(ids) - stop)


def answer_start(ids: Sequence[int], markers: Markers, prefix: Sequence[int]) -> int | None:
    """Where the last assistant turn's own tokens begin.

    After its `<|im_middle|>` (the role's *name* between the two can be anything) and after the prefilled
    `prefix`. None when there is no assistant turn.
    """
    if markers.assistant not in ids:
        return None
    last = len(ids) - 1 - list(reversed(ids)).index(markers.assistant)
    if markers.middle not in ids[last:]:
        return None
    start = ids.index(markers.middle, last) + 1
    return start + len(prefix) if list(ids[start : start + len(prefix)]) == list(prefix) else start


def marker_in(texts: Iterable[str], markers: Markers) -> str | None:
    """The first special token's text that occurs in one of `texts`, or None."""
    for text in texts:
        for special in markers.texts:
            if special in text:
                return special
    return None


def _one_id(tokenizer: Any, text: str) -> int | None:
    """The id of `text` if the tokenizer makes exactly one token of it and gives that text back.

    Some releases of transformers read Kimi's tokenizer wrongly and split `<think>`.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 and tokenizer.convert_ids_to_tokens(ids[0]) == text else None
