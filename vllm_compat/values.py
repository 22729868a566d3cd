"""Our vocabulary for what readers give back: plain frozen values, the same for every release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "BlockPoolState",
    "CachedPrefix",
    "DraftStep",
    "FinishedRequest",
    "RequestUpdate",
    "RunnerOutput",
    "ScheduledBatch",
    "ScheduledRequest",
]


@dataclass(frozen=True)
class ScheduledRequest:
    """What one step does for one request.

    Attributes:
        request_id: The request's id.
        num_computed_tokens: Tokens whose KV entries exist before the step; the step's first row is this position.
        num_scheduled_tokens: Rows of the step that belong to this request, draft tokens included.
        is_new: The request's first step.
        resumed: The request was preempted before and starts again. The scheduler gives such requests to the V2 runner
            as new ones; one that had generated nothing before it was preempted cannot be told from those.
        draft_token_ids: Draft tokens that the step verifies (-1 where only the worker knows them).
        new_block_ids: Blocks newly allocated, per KV cache group; all that the request has when it is new or resumed,
            () when the step needs none.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    is_new: bool
    resumed: bool
    draft_token_ids: tuple[int, ...]
    new_block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ScheduledBatch:
    """A SchedulerOutput as a value. ``requests`` is in the scheduler's order, which is *not* the runner's row order."""

    requests: tuple[ScheduledRequest, ...]
    total_num_scheduled_tokens: int
    finished_request_ids: frozenset[str]
    preempted_request_ids: frozenset[str]


@dataclass(frozen=True)
class RunnerOutput:
    """A ModelRunnerOutput as a value: request ids in row order, and the token ids sampled for each."""

    request_ids: tuple[str, ...]
    token_ids: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class RequestUpdate:
    """An EngineCoreOutput as a value: what a step brought for one request.

    Attributes:
        request_id: The request's id.
        new_token_ids: Tokens emitted by the step.
        finish_reason: "stop", "length", "abort", "error", "repetition", or None while the request goes on.
        stop_reason: The stop token id or string that ended it, if any.
        logprobs: Per new token: token id -> log-probability (natural), the emitted token first.
        prompt_logprobs: The same per prompt position 1 … n-1; brought once, when the prompt is done.
        num_cached_tokens: Prompt tokens taken from the prefix cache; None when the step does not say.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[dict[int, float], ...] | None
    prompt_logprobs: tuple[dict[int, float], ...] | None
    num_cached_tokens: int | None


@dataclass(frozen=True)
class BlockPoolState:
    """A BlockPool as a value.

    Attributes:
        num_blocks: Blocks of the pool, the null block included.
        num_free_blocks: Blocks that can be handed out. A free block may still be in the prefix cache.
        num_cached_hashes: Pairs of block hash and KV cache group under which the prefix cache finds a block.
        usage: Share of the blocks in use, 0 to 1, without the null block.
        null_block_id: The block that stands where a request needs none (outside of a sliding window); 0.
        caches_prefixes: Prefix caching is on.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_hashes: int
    usage: float
    null_block_id: int
    caches_prefixes: bool


@dataclass(frozen=True)
class CachedPrefix:
    """What the prefix cache has of a request.

    Attributes:
        num_tokens: Tokens from the start whose KV entries are there; at most the request's length less one.
        block_ids: The blocks that hold them, per KV cache group.
        shared_prefix_boundary: Where a prefix ends (in tokens) that other requests share, but whose state some group
            of a hybrid model does not have; 0 if there is none, and before 0.24.0.
    """

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    shared_prefix_boundary: int


@dataclass(frozen=True)
class DraftStep:
    """One step of a request that verified draft tokens.

    Attributes:
        drafted: Draft tokens that the target verified.
        accepted: How many of them, from the first on, were emitted.
        emitted: Tokens that the step brought; ``accepted + 1``, unless the request ended on an accepted draft.
    """

    drafted: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class FinishedRequest:
    """A request that is done.

    Attributes:
        request_id: The request's id.
        prompt_token_ids: Its prompt.
        token_ids: What was generated, the stop token included.
        finish_reason: "stop", "length", "abort", …
        stop_reason: The stop token id or string, if any.
        logprobs: Per generated token, if the sampling params asked for them; as many as they asked for, beside its own.
        prompt_logprobs: Per prompt position 1 … n-1, if asked for.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        num_steps: Steps that emitted tokens for it; with speculative decoding each may emit several.
        draft_steps: The steps that verified draft tokens, in order; empty without speculative decoding.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: tuple[dict[int, float], ...] | None
    prompt_logprobs: tuple[dict[int, float], ...] | None
    num_cached_tokens: int
    num_steps: int
    draft_steps: tuple[DraftStep, ...]
