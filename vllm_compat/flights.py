"""The requests of an EngineLoop, from when they enter the scheduler until they are handed out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from vllm_compat.values import DraftStep, FinishedRequest, RequestUpdate, ScheduledBatch


@dataclass
class _Flight:
    request: Any
    updates: list[RequestUpdate] = field(default_factory=list)
    drafts: list[DraftStep] = field(default_factory=list)


class Flights:
    """What a loop knows about its requests.

    Attributes:
        promised: Requests of a running ``generate``, which ``collect`` leaves to it.
        done: Finished requests that nobody has taken yet, in the order in which they finished.
    """

    def __init__(self) -> None:
        self.promised: set[str] = set()
        self.done: dict[str, FinishedRequest] = {}
        self._flying: dict[str, _Flight] = {}
        self._counter = 0

    def __bool__(self) -> bool:
        """Whether any is in flight."""
        return bool(self._flying)

    def ids(self) -> list[str]:
        """Of those in flight."""
        return list(self._flying)

    def is_flying(self, request_id: str) -> bool:
        return request_id in self._flying

    def is_used(self, request_id: str) -> bool:
        """Whether a request of this id is in flight, or was not taken yet."""
        return request_id in self._flying or request_id in self.done

    def next_id(self) -> str:
        """The next of "0", "1", … that is not in use."""
        while self.is_used(str(self._counter)):
            self._counter += 1
        self._counter += 1
        return str(self._counter - 1)

    def add(self, request: Any) -> None:
        """A native Request that the scheduler has."""
        self._flying[request.request_id] = _Flight(request)

    def num_logprobs(self, request_id: str) -> int | None:
        """How many log-probabilities per token it asked for."""
        flight = self._flying.get(request_id)
        params = flight.request.sampling_params if flight is not None else None
        return params.logprobs if params is not None else None

    def note_drafts(self, batch: ScheduledBatch, updates: Iterable[RequestUpdate]) -> None:
        """How many of the tokens that a step was given as drafts it emitted."""
        emitted = {update.request_id: update.new_token_ids for update in updates}
        for scheduled in batch.requests:
            flight = self._flying.get(scheduled.request_id)
            drafts, tokens = scheduled.draft_token_ids, emitted.get(scheduled.request_id)
            if flight is None or not drafts or not tokens:
                continue
            if -1 in drafts:
                # The asynchronous scheduler leaves the drafts in the worker: the last token counts as the target's.
                accepted = len(tokens) - 1
            else:
                # A rejected draft never equals what is emitted in its place, so equal tokens are accepted ones.
                matches = takewhile(lambda pair: pair[0] == pair[1], zip(drafts, tokens, strict=False))
                accepted = sum(1 for _ in matches)
            flight.drafts.append(DraftStep(len(drafts), accepted, len(tokens)))

    def take(self, update: RequestUpdate) -> FinishedRequest | None:
        """Note what a step brought a request; the whole of it, if it is done."""
        flight = self._flying.get(update.request_id)
        if flight is None:
            return None
        flight.updates.append(update)
        if update.finish_reason is None:
            return None
        return self.settle(update.request_id, update.finish_reason, update.stop_reason)

    def settle(self, request_id: str, reason: str, stop_reason: int | str | None) -> FinishedRequest:
        """A request is done."""
        flight = self._flying.pop(request_id)
        request, updates = flight.request, flight.updates
        has_logprobs = any(u.logprobs is not None for u in updates)
        finished = FinishedRequest(
            request_id=request_id,
            prompt_token_ids=tuple(request.prompt_token_ids or ()),
            token_ids=tuple(token for u in updates for token in u.new_token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=tuple(row for u in updates for row in u.logprobs or ()) if has_logprobs else None,
            prompt_logprobs=next((u.prompt_logprobs for u in updates if u.prompt_logprobs is not None), None),
            num_cached_tokens=next((u.num_cached_tokens for u in updates if u.num_cached_tokens is not None), 0),
            num_steps=sum(bool(u.new_token_ids) for u in updates),
            draft_steps=tuple(flight.drafts),
        )
        self.done[request_id] = finished
        return finished

    def collect(self) -> list[FinishedRequest]:
        """Hand out the finished ones that are promised to nobody."""
        ids = [request_id for request_id in self.done if request_id not in self.promised]
        return [self.done.pop(request_id) for request_id in ids]
