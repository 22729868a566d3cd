"""Fill the rendered blocks of README.md and docs/ from data; what each says is in ``blocks.py``.

    python matrix/render.py            write
    python matrix/render.py --check    write nothing; exit with 1 when a block is stale

A block stands between ``<!-- rendered: NAME -->`` and ``<!-- end -->``. Needs no vLLM.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from blocks import BLOCKS, Results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "matrix" / "results"

_MARK = re.compile(r"^<!-- (?:rendered: (?P<name>\S+)|end) -->$", re.MULTILINE)


class BrokenDocument(Exception):
    """A document whose marks cannot be followed; says where."""


def documents(root: Path) -> list[Path]:
    """The files that may have blocks."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def render(text: str, results: Results, where: str) -> tuple[str, list[str]]:
    """The document with its blocks filled, and the names of those that were not as they should be.

    BrokenDocument: a block that nobody knows, or marks that do not come in pairs.
    """
    parts: list[str] = []
    stale: list[str] = []
    at, name = 0, None
    for mark in _MARK.finditer(text):
        line = text.count("\n", 0, mark.start()) + 1
        if (mark["name"] is None) == (name is None):
            raise BrokenDocument(f"{where}, line {line}: {mark[0]} does not pair with the mark before it")
        if name is None:
            name = mark["name"]
            if name not in BLOCKS:
                known = ", ".join(BLOCKS)
                raise BrokenDocument(f"{where}, line {line}: no block is called {name!r} (there are: {known})")
            parts.append(text[at : mark.end()])
        else:
            filled = f"\n\n{BLOCKS[name](results)}\n\n"
            if text[at : mark.start()] != filled:
                stale.append(name)
            parts.append(filled + mark[0])
            name = None
        at = mark.end()
    if name is not None:
        raise BrokenDocument(f"{where}: the block {name!r} has no <!-- end -->")
    return "".join([*parts, text[at:]]), stale


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the documents, or with --check say what is stale."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a block is stale")
    check = parser.parse_args(arguments).check
    results, trouble = Results(RESULTS), False
    for path in documents(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        try:
            made, stale = render(text, results, name)
        except BrokenDocument as error:
            sys.stderr.write(f"{error}\n")
            return 1
        for block in stale if check else ():
            trouble = True
            sys.stderr.write(f"{name}: the block {block!r} is stale; run `python matrix/render.py`\n")
        if not check and made != text:
            path.write_text(made, encoding="utf-8")
            print(f"{name}: {', '.join(stale)}")
    return int(trouble)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
