"""Tokenizers with Kimi's markers and chat templates, trained on the spot: no download, no target needed."""

from __future__ import annotations

from typing import Any

TURN_MARKERS = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
TOOL_MARKERS = [
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]
THINK_MARKERS = ["<think>", "</think>"]

_TURNS = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}"
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' and not m.tool_calls -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}<|im_user|>"
    "{%- elif m.role == 'assistant' -%}<|im_assistant|>{%- else -%}<|im_system|>{%- endif -%}"
    "{{ m.name or m.role }}<|im_middle|>"
    "{%- if m.role == 'assistant' -%}THINK{%- endif -%}"
    "{%- if m.role == 'tool' -%}## Return of {{ m.tool_call_id }}\n{% endif -%}"
    "{{ m.content }}"
    "{%- if m.tool_calls -%}<|tool_calls_section_begin|>{%- for c in m.tool_calls -%}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments }}<|tool_call_end|>"
    "{%- endfor -%}<|tool_calls_section_end|>{%- endif -%}"
    "<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>PREFILL{%- endif -%}"
)
# K2 has no think tokens. K2-Thinking empties past thinking and prefills nothing. K2.5 prefills by `thinking`.
_HISTORY_THINK = "<think>{%- if loop.index0 > ns.last -%}{{ m.reasoning_content or '' }}{%- endif -%}</think>"
TEMPLATES = {
    "k2": _TURNS.replace("THINK", "").replace("PREFILL", ""),
    "k2-thinking": _TURNS.replace("THINK", _HISTORY_THINK).replace("PREFILL", ""),
    "k2.5": _TURNS.replace("THINK", _HISTORY_THINK).replace(
        "PREFILL",
        "{%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}",
    ),
    # K3 keeps the markers in its vocabulary but writes turns with others.
    "k3": "{%- for m in messages -%}"
    "<|open|>{{ m.role }}<|sep|>{{ m.content }}<|end_of_msg|><|close|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|open|>assistant<|sep|>{%- endif -%}",
}


def make_tokenizer(template: str = "k2.5", markers: list[str] | None = None) -> Any:
    """A byte-level BPE of about 400 tokens with `markers` as specials at the top, as Kimi has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if markers is None:
        markers = [
            *TURN_MARKERS,
            *TOOL_MARKERS,
            *THINK_MARKERS,
            "<|open|>",
            "<|close|>",
            "<|sep|>",
            "<|end_of_msg|>",
        ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = ["What is the weather in Paris today? The sky is blue because of Rayleigh scattering."] * 3
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["[BOS]", "[PAD]", *markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="[BOS]",
        pad_token="[PAD]",
        eos_token="<|im_end|>" if "<|im_end|>" in markers else "[PAD]",
        chat_template=TEMPLATES[template],
    )
