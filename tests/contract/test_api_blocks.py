"""The rendered pages that come from the recordings: moved names, and what changed under plugins."""

from __future__ import annotations

import collections
import functools
import re

import api_blocks
import pytest
from markdown_table import table

page = functools.cache(api_blocks.plugin_changes)
names = functools.cache(api_blocks.moved)


def section(text: str, title: str) -> list[str]:
    """The lines of a section's table, without its head."""
    found = re.search(rf"^### {title}\n\n(.*?)(?=\n\n### |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1].splitlines()[2:]


#: Reported by people whose plugins broke.
REPORTED = """
AsyncScheduler | 0.27.0 | `_update_request_with_output` | `is_stale` is new |
KVCacheManager | 0.26.0 | `get_computed_blocks` | returns `tuple[KVCacheBlocks, int, int]`, not
Scheduler | 0.26.0 | `finish_requests` | returns `list[Request]`, not `list[tuple[str, int]]` |
Scheduler | 0.11.1 | `__init__` | `block_size` is new and required |
KVConnectorBase_V1 | 0.21.0 | `__init__` | `kv_cache_config` is now required |
KVConnectorBase_V1 | 0.19.0 | `handle_preemptions` | `preempted_req_ids` is gone; `kv_connector_metadata` is new
"""


@pytest.mark.parametrize("reported", REPORTED.strip().splitlines())
def test_what_broke_plugins_is_on_the_page(reported: str) -> None:
    """The change stands in the section of its base class, under its release."""
    base, _, line = reported.rstrip().partition(" ")
    assert any(found.startswith(line) for found in section(page(), base))


@pytest.mark.parametrize("base", api_blocks.BASES)
def test_one_line_per_change(base: str) -> None:
    """A method has one line per release, in the order of the releases."""
    cells = [tuple(re.findall(r"[^|]+", line)[:2]) for line in section(page(), base)]
    assert cells
    assert [] == [cell for cell, count in collections.Counter(cells).items() if count > 1]
    releases = [tuple(map(int, release.strip().split("."))) for release, _ in cells]
    assert sorted(releases) == releases


def test_insides_of_the_runner_are_left_out() -> None:
    """Underscored methods are on the page where plugins override them, and nowhere else."""
    assert any("`_free_request`" in line for line in section(page(), "Scheduler"))
    assert not any("| `_" in line.replace("`__init__`", "") for line in section(page(), "GPUModelRunner"))


def test_names_with_the_same_moves_share_a_row() -> None:
    """A row says where, from which release on, and in which releases a call that worked broke."""
    (row,) = [line for line in names().splitlines() if "`cdiv`" in line]
    assert row.startswith("| `cdiv`, `round_up`, ")
    assert "| 0.10.2 `vllm.utils`<br>0.11.1 `vllm.utils.math_utils` |  |  |" in row
    (row,) = [line for line in names().splitlines() if "`get_kv_cache_configs`" in line]
    assert "| 0.33.0 |" in row


def test_a_cell_cannot_break_its_table() -> None:
    """Bars and line breaks inside a cell do not end it."""
    assert r"| a \| b c |" == table(("x",), [["a | b\nc"]]).splitlines()[-1]
