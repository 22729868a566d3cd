"""The rendered blocks of the documents: what is stale is found, and rendering is the cure."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "matrix"))

import blocks  # noqa: E402
import render  # noqa: E402


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The documents of this project, rendered, in a folder of their own."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    assert render.main([], tmp_path) == 0
    return tmp_path


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in render.documents(root)}


def test_the_documents_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """What stands in README.md and docs/ is what the code and the measurements say now."""
    assert render.main(["--check"]) == 0, capsys.readouterr().err


def test_rendering_twice_changes_nothing(copy: Path) -> None:
    """The second time every file keeps its bytes."""
    before = contents(copy)

    assert render.main([], copy) == 0
    assert before == contents(copy)
    assert render.main(["--check"], copy) == 0


def test_a_stale_block_is_named_with_its_cure(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One number changed in one block: exit code 1, that block of that file, the command to run; nothing is written."""
    page = copy / "docs" / "kimi.md"
    page.write_text(
        page.read_text(encoding="utf-8").replace("`draft_vocab_size` | int > 0", "`draft_vocab_size` | int")
    )
    before = contents(copy)

    assert render.main(["--check"], copy) == 1
    assert capsys.readouterr().err == "docs/kimi.md: the block 'config-keys' is stale; run `python matrix/render.py`\n"
    assert before == contents(copy)
    assert render.main([], copy) == 0
    assert render.main(["--check"], copy) == 0


def test_text_outside_of_blocks_is_left_alone(copy: Path) -> None:
    """Rendering replaces what stands between the marks and not a byte else."""
    page = copy / "README.md"
    written = page.read_text(encoding="utf-8")
    start, end = written.index("<!-- rendered: support -->"), written.index("<!-- end -->")
    page.write_text(f"{written[:start]}<!-- rendered: support -->\nold\n{written[end:]}\nby hand\n", encoding="utf-8")

    render.main([], copy)

    assert f"{written}\nby hand\n" == page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- rendered: suport -->\n<!-- end -->", "x.md, line 2: no block is called 'suport' (there are: support, "),
        ("<!-- rendered: support -->", "x.md: the block 'support' has no <!-- end -->"),
        ("<!-- end -->", "x.md, line 2: <!-- end --> does not pair"),
        ("<!-- rendered: support -->\n<!-- rendered: patches -->\n<!-- end -->", "line 3: <!-- rendered: patches -->"),
    ],
)
def test_broken_marks_are_refused(text: str, message: str) -> None:
    """A misspelt block or an unpaired mark would otherwise stay as it is for ever."""
    with pytest.raises(render.BrokenDocument) as caught:
        render.render(f"\n{text}\n", blocks.Results(render.RESULTS), "x.md")
    assert message in str(caught.value)


def test_a_broken_document_is_an_error_of_the_command(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 with the place, with and without --check."""
    (copy / "docs" / "new.md").write_text("<!-- rendered: nothing -->\n<!-- end -->\n")

    assert [1, 1] == [render.main([], copy), render.main(["--check"], copy)]
    assert "docs/new.md, line 1: no block is called 'nothing'" in capsys.readouterr().err


def test_every_result_and_every_block_is_used(copy: Path) -> None:
    """A measurement that no document shows, or a block that stands nowhere, is forgotten work."""
    results = blocks.Results(render.RESULTS)
    texts = [path.read_text(encoding="utf-8") for path in render.documents(copy)]
    for text in texts:
        render.render(text, results, "")

    assert set(results.names()) == results.used
    assert set(blocks.BLOCKS) == {mark["name"] for text in texts for mark in render._MARK.finditer(text)} - {None}


def test_every_config_key_is_in_its_table(copy: Path) -> None:
    """The settings page has a row for each field of each section, with the preset's value."""
    from vllm_compat.kimi.config import load_config

    page = (copy / "docs" / "kimi.md").read_text(encoding="utf-8")
    for section in ("target", "prepare", "extract", "vocab", "train", "export", "evaluate"):
        table = page.split(f"### [{section}]")[1].split("\n### ")[0]
        for key in vars(getattr(load_config("tiny"), section)):
            assert f"\n| `{key}` |" in table
    assert "| `draft_vocab_size` | int > 0 | `32768` | `32768` | `384` |" in page


def test_every_release_is_in_the_support_table(copy: Path) -> None:
    """A row each, newest first; and each release has its adapter of every surface in the second table."""
    from vllm_compat import releases
    from vllm_compat.adapters.select import SURFACES, by_number

    page = (copy / "docs" / "support.md").read_text(encoding="utf-8")
    first, second = page.split("<!-- rendered: support-matrix -->")
    versions = [row.version for row in releases.all_releases()]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in first.splitlines() if line.startswith("| 0.")]
    assert rows == versions[::-1]
    (row,) = [line for line in second.splitlines() if line.startswith("| 0.32.0 | ")]
    since = [".".join(map(str, by_number(surface, (0, 32, 0)).since)) for surface in SURFACES]
    assert ["0.32.0", *since] == row.strip("| ").split(" | ")


def test_releases_that_follow_each_other_are_a_range() -> None:
    """By the rows of the table, three or more; whatever order they are written in."""
    versions = ["0.32.0", "0.10.2", "0.11.0", "0.11.1", "0.14.0", "0.14.1"]
    assert "0.10.2 to 0.11.1, 0.14.0, 0.14.1, 0.32.0" == blocks._ranges(versions)


def test_a_release_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract column is computed, not claimed: with one surface unfit its name stands there, and no adapter."""
    chosen = blocks._chosen
    monkeypatch.setattr(
        blocks, "_chosen", lambda release: {**chosen(release), "request": (chosen(release)["request"][0], None)}
    )
    results = blocks.Results(render.RESULTS)
    assert "| NOT request |" in blocks.all_releases(results)
    assert " surfaces |" not in blocks.all_releases(results)
    assert "| NONE |" in blocks.support_matrix(results)


def test_every_public_name_is_in_the_reference(copy: Path) -> None:
    """Each name of ``vllm_compat.__all__`` has a row with a description."""
    import vllm_compat

    page = (copy / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in vllm_compat.__all__:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(row.split("|")[2].split()) >= 3, row
