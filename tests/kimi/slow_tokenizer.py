"""A tokenizer of the same kind as Kimi's own (tokenization_kimi.py): Python code around tiktoken, one byte
per token.

Its traits that matter: encode() and decode() with signatures of their own, every special token matched inside
text, reserved tokens known only to `special_tokens`, apply_chat_template overridden.
"""

from __future__ import annotations

from typing import Any

import tiktoken
from transformers import PreTrainedTokenizer


def _visible(index: int) -> str:
    return chr(0x100 + index)  # a private alphabet: one character per byte


class TikTokenTokenizer(PreTrainedTokenizer):
    """Bytes plus specials; `markers` follow the 256 bytes, then ten reserved tokens."""

    def __init__(self, markers: list[str], chat_template: str) -> None:
        names = ["[BOS]", "[EOS]", *markers, *(f"<|reserved_token_{i}|>" for i in range(10))]
        self.special_tokens = {name: 256 + i for i, name in enumerate(names)}
        self.model = tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens=self.special_tokens,
        )  # fmt: skip
        self.decoder = {
            **{i: _visible(i) for i in range(256)},
            **{i: n for n, i in self.special_tokens.items()},
        }
        self.encoder = {text: i for i, text in self.decoder.items()}
        super().__init__(
            bos_token="[BOS]",
            eos_token="[EOS]",
            additional_special_tokens=markers,
            chat_template=chat_template,
        )

    def encode(self, text: str, allow_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        if kwargs:
            return super().encode(text, **kwargs)
        return self.model.encode(text, allowed_special="all")

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        return super().decode(token_ids, **kwargs) if kwargs else self.model.decode(token_ids)

    @property
    def vocab_size(self) -> int:
        return len(self.decoder)

    def get_vocab(self) -> dict[str, int]:
        return self.encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self.decoder[i] for i in self.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.encoder[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self.decoder[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(ord(c) - 0x100 for c in "".join(tokens)).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        return super().apply_chat_template(
            conversation,
            tools=tools,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
