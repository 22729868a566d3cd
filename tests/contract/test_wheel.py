"""Reading single files out of a wheel, and comparing two wheels; a real zip file, no network."""

from __future__ import annotations

import io
import zipfile

import add_release
import pytest
from api_record.record import record
from api_record.targets import Target
from api_record.tree import Tree
from api_record.wheel import Wheel


class Remote(io.BytesIO):
    """An archive that counts the bytes read from it, as reading from the network costs them."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


def wheel(files: dict[str, str], *, damage: bytes = b"", compression: int = zipfile.ZIP_DEFLATED) -> Wheel:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    content = buffer.getvalue()
    if damage:
        assert damage in content
        content = content.replace(damage, bytes(len(damage)), 1)
    return Wheel("vllm", "0.0.0", "vllm.whl", "sha", Remote(content))


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_files_are_read(compression: int) -> None:
    """Text comes back as it went in, umlauts included; what is not there is None."""
    text = "# vLLM läuft\n" + "x = 1\n" * 1000
    found = wheel({"vllm/__init__.py": "", "vllm/a.py": text, "vllm/b/c.py": "y = 2\n"}, compression=compression)
    assert ("", text, "y = 2\n") == tuple(map(found.read, ("vllm/__init__.py", "vllm/a.py", "vllm/b/c.py")))
    assert found.read("vllm/missing.py") is None


def test_only_what_is_needed_is_fetched() -> None:
    """Megabytes of compiled code between the Python files stay where they are."""
    binary = "".join(chr(65 + (i * i + i // 7) % 26) for i in range(200_000))
    found = wheel(
        {"vllm/a.py": "a = 1\n", "vllm/_C.so": binary, "vllm/b.py": "b = 2\n"}, compression=zipfile.ZIP_STORED
    )
    archive = found._archive
    assert isinstance(archive, Remote)
    archive.taken = 0
    assert ("a = 1\n", "b = 2\n") == (found.read("vllm/a.py"), found.read("vllm/b.py"))
    assert archive.taken < 3000


def test_a_damaged_file_is_refused() -> None:
    """A record is never made of bytes that are not what the wheel says they are."""
    found = wheel({"vllm/a.py": "MARKER = 1\n"}, damage=b"MARKER", compression=zipfile.ZIP_STORED)
    with pytest.raises(zipfile.BadZipFile, match=r"vllm/a\.py of vllm\.whl"):
        found.read("vllm/a.py")


def test_a_symbol_is_recorded_from_a_wheel() -> None:
    """A wheel is a tree like any folder."""
    tree = Tree(wheel({"vllm/__init__.py": "", "vllm/a.py": "from .b import f\n", "vllm/b.py": "def f(x=1): ...\n"}))
    assert {"kind": "function", "call": "(x=)", "module": "vllm.b", "also": ["vllm.a"]} == record(
        tree, Target.parse("vllm.a : f")
    )


def test_two_wheels_are_compared() -> None:
    """Files that differ, that are missing and that were added; what kernels bring along does not count."""
    ours = wheel({"vllm/a.py": "1", "vllm/b.py": "1", "vllm/third_party/x.py": "1", "vllm/_version.py": "1"})
    theirs = wheel({"vllm/a.py": "2", "vllm/c.py": "1", "vllm/_version.py": "2", "torch_ext/y.py": "1"})
    assert {"version": "0.0.0", "differs": ["vllm/a.py"], "lacks": ["vllm/b.py"], "adds": ["vllm/c.py"]} == (
        add_release.compare(ours, theirs)
    )
