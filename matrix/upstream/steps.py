"""What goes to the workers in a step, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upstream.ledger import Left


def runner_output(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """Tokens by request, instead of a list, its index and the lists of tokens."""
    options = dict(stated)
    request_ids, index = options.pop("req_ids"), options.pop("req_id_to_index")
    if index != {request_id: row for row, request_id in enumerate(request_ids)}:
        raise Left("rows-in-another-order")
    return {"token_ids": _by_request(request_ids, options.pop("sampled_token_ids", [])), **options}


def drafts(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """Draft tokens by request."""
    return {"draft_token_ids": _by_request(stated["req_ids"], stated["draft_token_ids"])}


def scheduler_output(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """The total is the factory's to add up."""
    options = dict(stated)
    if options.pop("total_num_scheduled_tokens") != sum(options["num_scheduled_tokens"].values()):
        raise Left("another-total")
    return options


def new_request(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """``req_id`` is ``request_id``."""
    options = dict(stated)
    return {"request_id": options.pop("req_id"), **options}


def cached_requests(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """Lists side by side become values by request."""
    ids = stated["req_ids"]
    options: dict[str, Any] = {
        name: _by_request(ids, stated[name]) for name in ("num_computed_tokens", "num_output_tokens", "new_block_ids")
    }
    if stated["new_token_ids"]:
        options["new_token_ids"] = _by_request(ids, stated["new_token_ids"])
    return {**options, **{name: stated[name] for name in ("resumed_req_ids", "all_token_ids") if name in stated}}


def _by_request(request_ids: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    if len({*request_ids}) != len(values) or len(request_ids) != len(values):
        raise Left("not-one-list-per-request")
    return dict(zip(request_ids, values, strict=True))
