"""One frozen dataclass per stage: names, types, defaults and the values that are refused.

Layer ids are boundaries: id k is the residual stream after k decoder layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vllm_compat.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
STORE_DTYPES = (*DTYPES, "float8_e4m3fn")
#: Not float16: vLLM rescales DeepSeek's residual stream in it, and the trainer would need loss scaling.
COMPUTE_DTYPES = ("bfloat16", "float32")


def _require(section: str, name: str, value: Any, ok: bool, needed: str) -> None:
    if not ok:
        raise ConfigError(
            asked=f"{section}.{name} = {value!r}",
            needed=f"{name} must be {needed}",
            advice=f"change it in the TOML file or with --set {section}.{name}=…",
        )


class _Section:
    """Shared checks.

    A field named in `_POSITIVE` is > 0, in `_NOT_NEGATIVE` >= 0, in `_CHOICES` one of a list.

    None (an option left open) passes.
    """

    _NAME: ClassVar[str] = ""
    _POSITIVE: ClassVar[tuple[str, ...]] = ()
    _NOT_NEGATIVE: ClassVar[tuple[str, ...]] = ()
    _CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for name in self._POSITIVE:
            value = getattr(self, name)
            _require(self._NAME, name, value, value is None or value > 0, "greater than 0")
        for name in self._NOT_NEGATIVE:
            value = getattr(self, name)
            _require(self._NAME, name, value, value is None or value >= 0, "0 or greater")
        for name, choices in self._CHOICES.items():
            value = getattr(self, name)
            _require(self._NAME, name, value, value in choices, "one of " + ", ".join(choices))


@dataclass(frozen=True)
class TargetConfig(_Section):
    """The model that the head drafts for. `engine_args` go to `make_vllm_config` as they are."""

    model: str = ""
    tokenizer: str | None = None
    dtype: str = "bfloat16"
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int = 4096
    engine_args: dict[str, Any] = field(default_factory=dict)

    _NAME = "target"
    _POSITIVE = ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len")
    _CHOICES: ClassVar = {"dtype": COMPUTE_DTYPES}

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("target", "model", self.model, bool(self.model), "a local path or a Hugging Face hub id")


@dataclass(frozen=True)
class PrepareConfig(_Section):
    """Conversations in, rows out. Lengths are tokens.

    max_length bounds prompt + answer. `regenerate` replaces every answer by the target's own (a head must
    learn the target's text, not a human's); with `one_pass` it captures states as it answers, and `extract` takes them
    from there instead of prefilling the row. A row with fewer than `min_loss_tokens` loss tokens is dropped
    and counted; so are a row that is there already, and a training row with the prompt of a held-out row or with an
    answer that stands in held-out answers (n-grams of `decontaminate_ngram` tokens; 0 compares prompts only).
    """

    conversations: str = ""
    split: str | None = None
    max_conversations: int | None = None
    heldout_fraction: float = 0.05
    max_length: int = 2048
    max_rows: int | None = None
    regenerate: bool = True
    one_pass: bool = False
    temperature: float = 0.0
    max_new_tokens: int = 512
    thinking: bool = False
    min_loss_tokens: int = 1
    decontaminate_ngram: int = 13

    _NAME = "prepare"
    _POSITIVE = ("max_conversations", "max_length", "max_rows", "max_new_tokens", "min_loss_tokens")
    _NOT_NEGATIVE = ("temperature", "decontaminate_ngram")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            "prepare",
            "conversations",
            self.conversations,
            bool(self.conversations),
            "set: a .jsonl or .parquet file, or the name of a data set on the Hugging Face hub",
        )
        _require("prepare", "heldout_fraction", self.heldout_fraction, 0 <= self.heldout_fraction < 1, "in [0, 1)")


@dataclass(frozen=True)
class ExtractConfig(_Section):
    """`layers`: aux boundaries, ascending; empty = (2, N//2, N-3). The final boundary N is always stored too.

    dtype: float8_e4m3fn stores the aux states in 8 bits with a scale per 128 values, and the final one in bfloat16.
    finals: final states of all tokens, or those alone that training needs: where the next token carries loss.
    shard_mb: MiB of hidden states per shard; memory holds two to four (docs/store.md). max_bad_rows: rows with a
    NaN or infinite state that are left out and listed in refused.jsonl; one more stops the stage. baseline_rows:
    plain prefill is timed on so many rows for the ratio. replicas: copies of the target that fill one store,
    through Ray; ray_address: of a running cluster, on whose machines run_dir must be the same folder. Without it
    the replicas are on this machine.
    """

    layers: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    finals: str = "all"
    shard_mb: int = 512
    max_bad_rows: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    self_check: bool = True
    baseline_rows: int = 64
    replicas: int = 1
    ray_address: str | None = None

    _NAME = "extract"
    _POSITIVE = ("replicas", "shard_mb", "max_num_seqs", "max_num_batched_tokens")
    _NOT_NEGATIVE = ("baseline_rows", "max_bad_rows")
    _CHOICES: ClassVar = {"dtype": STORE_DTYPES, "finals": ("all", "loss")}

    def __post_init__(self) -> None:
        super().__post_init__()
        ascending = list(self.layers) == sorted(set(self.layers)) and all(k >= 0 for k in self.layers)
        _require("extract", "layers", list(self.layers), ascending, "ascending boundary ids, each once")


@dataclass(frozen=True)
class VocabConfig(_Section):
    """`draft_vocab_size`: tokens that the head can propose; the special tokens are always among them."""

    draft_vocab_size: int = 32768

    _NAME = "vocab"
    _POSITIVE = ("draft_vocab_size",)


@dataclass(frozen=True)
class TrainConfig(_Section):
    """EAGLE-3 with training-time test.

    Training ends at whichever of `steps`, `epochs`, `max_seconds` comes first.

    batch_tokens: tokens per optimiser step. ttt_decay: loss weight of TTT step k is ttt_decay**k. workers: processes
    that read batches ahead; 0 is a thread.
    intermediate_size, num_heads: None = the target's own.
    """

    architecture: str = "mla"
    steps: int | None = None
    epochs: int = 1
    max_seconds: float | None = None
    batch_tokens: int = 8192
    lr: float = 5e-5
    warmup_steps: int = 100
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    grad_clip: float = 1.0
    ttt_steps: int = 4
    ttt_decay: float = 0.8
    intermediate_size: int | None = None
    num_heads: int | None = None
    dtype: str = "bfloat16"
    log_every: int = 10
    checkpoint_every: int = 500
    threads: int | None = None
    workers: int = 0

    _NAME = "train"
    _POSITIVE = (
        "steps",
        "epochs",
        "max_seconds",
        "batch_tokens",
        "lr",
        "grad_clip",
        "ttt_steps",
        "ttt_decay",
        "intermediate_size",
        "num_heads",
        "log_every",
        "checkpoint_every",
        "threads",
    )
    _NOT_NEGATIVE = ("warmup_steps", "weight_decay", "workers")
    _CHOICES: ClassVar = {"architecture": ("mla", "llama"), "dtype": COMPUTE_DTYPES}

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _require("train", "betas", list(self.betas), ok, "two numbers in [0, 1)")


@dataclass(frozen=True)
class ExportConfig(_Section):
    """`dtype` of the exported head's weights."""

    dtype: str = "bfloat16"

    _NAME = "export"
    _CHOICES: ClassVar = {"dtype": DTYPES}


@dataclass(frozen=True)
class EvaluateConfig(_Section):
    """Serving on held-out conversations.

    temperature: 0 is what makes the token-identity check possible. untrained: also serve a head of the same
    shape with random weights, which shows what the training brought.
    """

    num_prompts: int = 64
    max_new_tokens: int = 256
    num_draft_tokens: int = 4
    temperature: float = 0.0
    max_num_seqs: int = 16
    untrained: bool = True

    _NAME = "evaluate"
    _POSITIVE = ("num_prompts", "max_new_tokens", "num_draft_tokens", "max_num_seqs")
    _NOT_NEGATIVE = ("temperature",)


@dataclass(frozen=True)
class Config:
    """Everything one run needs. `run_dir` receives all that the run writes."""

    run_dir: Path
    target: TargetConfig
    prepare: PrepareConfig
    seed: int = 0
    extract: ExtractConfig = field(default_factory=ExtractConfig)
    vocab: VocabConfig = field(default_factory=VocabConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        fits = self.prepare.max_length < self.target.max_model_len
        needed = f"below target.max_model_len = {self.target.max_model_len} (a row's engine pass adds one token)"
        _require("prepare", "max_length", self.prepare.max_length, fits, needed)


def aux_layers(layers: tuple[int, ...], num_hidden_layers: int) -> tuple[int, ...]:
    """The aux boundaries to capture, without the final one; empty `layers` = vLLM's default (2, N//2, N-3).

    N - 1 is refused: it is the input of the last layer, and stands in lists that count layer *outputs* and
    mean the final state by it.

    ConfigError when an id is outside 1…N-2 or when the default's three ids coincide (N < 7). The id N is
    refused because it is the teacher's state, which is always stored last and is never an input of the head.
    """
    n = num_hidden_layers
    chosen = tuple(layers) or (2, n // 2, n - 3)
    if list(chosen) != sorted(set(chosen)) or chosen[0] < 1 or chosen[-1] > n - 2:
        raise ConfigError(
            asked=f"aux boundaries {list(chosen)}" + ("" if layers else " (the default 2, N//2, N-3)"),
            needed=f"different ascending ids between 1 and {n - 2} for a target with {n} layers"
            f" (id k = after k layers; {n} is the final state, stored anyway)",
            advice="set extract.layers; in a list of 0-based layer outputs add 1 to each id and leave the last one out",
        )
    return chosen
