"""Every job of the project; `nox -l` lists them.

nox -s kimi     the whole pipeline on the tiny target, from conversations to a served head
nox -s tests    all tests: without vLLM, then on real vLLM
nox -s bench    what the factories cost beside vLLM's own constructors
nox -s matrix   the live tests on every release, within a budget of time and disk
nox -s speculators    speculators, unmodified, on every release
nox -s upstream    vLLM's own scheduler tests with our factories, on every release
nox -s bench-extract            durable extraction of hidden states beside plain prefill
nox -s bench-speculators        the same beside the unmodified generator of speculators
nox -s lint     ruff, mypy, import-linter, stale documents

nox -s contract                 a part of the tests: adapters against every recorded release, without vLLM
nox -s add_release -- 0.34.0    a new release of vLLM: recorded, in the table, what changed, what no longer fits
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "matrix"))
from cells.install import freeze_pins, install
from cells.recipe import KERNELS, NIGHTLY, NIGHTLY_PYTHON, PYTHON, numbers, recipe, rows
from upstream.deselected import WITHOUT_SOURCES

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "tests"]

#: The newest release with a CPU wheel: the pipeline and the tests run on it.
NEWEST = KERNELS
OLDEST, *_, LAST = RELEASES = list(rows())
SMOKE = (OLDEST, "0.16.0", LAST)
SPECULATORS = ("0.3.0", "0.4.0")
#: What speculators 0.3.0 pins, and runs on without us.
SPECULATORS_PIN = "0.11.0"
PYTEST = ("python", "-m", "pytest", "-p", "no:cacheprovider")


@nox.session(python=PYTHON)
def kimi(session: nox.Session) -> None:
    """The main job: `nox -s kimi -- --set train.max_seconds=30` and the like are passed on."""
    env = install(session, NEWEST)
    session.run("vllm-compat", "kimi", "run", "--preset", "tiny", *session.posargs, env=env)


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """All tests. `nox -s tests -- tests/live -k capture` runs a part."""
    env = install(session, NEWEST)
    if session.posargs:
        session.run(*PYTEST, *session.posargs, env=env)
        return
    # The first need no engine and share the cores; the second have one engine at a time.
    session.run(*PYTEST, "-n", "2", "tests/unit", "tests/contract", "tests/patches", "tests/kimi", env=env)
    session.run(*PYTEST, "tests/live", env=env)


@nox.session(python=PYTHON)
@nox.parametrize("release", [nox.param(r, id=r, tags=["full", *(["smoke"] if r in SMOKE else [])]) for r in RELEASES])
def live(session: nox.Session, release: str) -> None:
    """The live tests on one release: `nox -s "live(0.16.0)"`; `nox -t smoke`; `nox -s live` runs every release."""
    run_live(session, release)


@nox.session(python=NIGHTLY_PYTHON, name="live-nightly", tags=["full"])
def live_nightly(session: nox.Session) -> None:
    """The live tests on a build of vLLM's main branch, which is served by shape."""
    run_live(session, NIGHTLY)


def run_live(session: nox.Session, release: str) -> None:
    """Install a cell, see that it is what it should be, run tests/live, write down what they showed."""
    env = install(session, release)
    session.run("python", "matrix/cells/proof.py", release, env=env)
    # Not in session.create_tmp(), which sets TMPDIR: workers of Ray do not start with one below their environment.
    report = str(Path(session.virtualenv.location, "live.xml"))
    session.run(*PYTEST, "tests/live", f"--junitxml={report}", *session.posargs, env=env, success_codes=[0, 1])
    session.run("python", "matrix/record.py", "live", report, env=env)


@nox.session(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Every live cell, one after the other: `nox -s matrix -- --hours 5 --gigabytes 25`; `-- --help` has the rest."""
    session.run(sys.executable, "matrix/whole.py", *session.posargs)


@nox.session(python=PYTHON)
@nox.parametrize("release", [nox.param(r, id=r, tags=["libraries"]) for r in RELEASES if numbers(r) >= (0, 11)])
def speculators(session: nox.Session, release: str) -> None:
    """speculators, unmodified, on one release: `nox -s "speculators(0.32.0)"`. Without an id: on every release.

    Its script is in its repository alone; where that is out of reach, SPECULATORS_SCRIPTS names a folder with
    <version>/data_generation_offline.py.
    """
    env = install(session, release)
    reports = []
    for version in SPECULATORS:
        session.install("--no-deps", "-r", "matrix/constraints/speculators.txt", f"speculators=={version}")
        reports.append(str(Path(session.create_tmp(), f"speculators-{version}.xml")))
        command = (*PYTEST, "tests/live/speculators", f"--junitxml={reports[-1]}", *session.posargs)
        session.run(*command, env=env, success_codes=[0, 1])
    session.run("python", "matrix/record.py", "speculators", *reports, env=env)


@nox.session(python=PYTHON)
@nox.parametrize("release", [nox.param(r, id=r) for r in RELEASES if r not in WITHOUT_SOURCES])
def upstream(session: nox.Session, release: str) -> None:
    """vLLM's own scheduler tests, as they are and with our factories: `nox -s "upstream(0.32.0)"`; all without one.

    A test that passes as it is and fails with our factories is red. `-- -k prefix` goes to pytest.
    """
    env = install(session, release)
    folder = str(Path(session.create_tmp(), "upstream").resolve())
    run = ("python", "-m", "upstream.run", release, folder)
    session.run(*run, *session.posargs, env={**env, "PYTHONPATH": str(Path("matrix").resolve())})
    if session.posargs:
        session.log("a part of the tests is no result, and not written down")
        return
    session.run("python", "matrix/record.py", "upstream", folder, env=env)


@nox.session(python=PYTHON)
def trl(session: nox.Session) -> None:
    """TRL 0.25.0 on a vLLM that it was not written for: the example of docs/patching-your-library.md."""
    env = install(session, NEWEST)
    session.install("--no-deps", "-r", "matrix/constraints/trl.txt")
    session.run(*PYTEST, "tests/live/trl", *session.posargs, env=env)


@nox.session(python=PYTHON)
def bench(session: nox.Session) -> None:
    """How much the factories add to vLLM's own constructors: `nox -s bench -- --only request`, `-- --write`."""
    env = install(session, NEWEST)
    session.run("python", "matrix/bench.py", *session.posargs, env=env)


@nox.session(python=PYTHON, name="bench-extract")
def bench_extract(session: nox.Session) -> None:
    """Durable extraction beside plain prefill, on the target of the preset tiny: `-- --write` writes it down.

    Then the store alone, with states of the real width, beside plain files.
    """
    env = install(session, NEWEST)
    session.run("python", "matrix/bench_extract.py", *session.posargs, env=env)
    session.run("python", "matrix/bench_store.py", *({"--write"} & {*session.posargs}), env=env)


@nox.session(python=PYTHON, name="bench-speculators")
def bench_speculators(session: nox.Session) -> None:
    """Durable extraction beside the unmodified generator of speculators, on the release that it is written for."""
    env = install(session, SPECULATORS_PIN)
    session.install("--no-deps", "-r", "matrix/constraints/speculators.txt", f"speculators=={SPECULATORS[0]}")
    session.run("python", "matrix/bench_extract.py", "--beside-speculators", *session.posargs, env=env)


@nox.session(python=PYTHON)
def contract(session: nox.Session) -> None:
    """Adapters against the recorded API of every release; neither vLLM nor torch is installed. Part of `tests`."""
    install_light(session)
    run_contract(session, *session.posargs)


@nox.session(python=PYTHON)
def add_release(session: nox.Session) -> None:
    """`nox -s add_release -- 0.34.0`: record a release, add its row and pins, and say what changed and does not fit.

    Fails when the contract tests do: then there are adapters to write (docs/adding-a-release.md).
    """
    if len(session.posargs) != 1:
        session.error("name one release: nox -s add_release -- 0.34.0")
    install_light(session)
    session.run("python", "matrix/add_release.py", "add", *session.posargs)
    session.run("python", "matrix/render.py")
    run_contract(session)


def install_light(session: nox.Session) -> None:
    """This project and what its tests without vLLM run with."""
    session.install("-e", ".[test]", "numpy", "-c", str(recipe(NEWEST).constraints))


def run_contract(session: nox.Session, *arguments: str) -> None:
    session.run("python", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "2", "tests/contract", *arguments)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Ruff (lint and format), mypy --strict, import-linter, rendered documents."""
    session.install("-e", ".[cli,lint]", "-c", str(Path("matrix", "constraints", "lint.txt")))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")
    session.run("python", "matrix/render.py", "--check")


@nox.session(venv_backend="none")
def freeze(session: nox.Session) -> None:
    """Resolve what releases run with anew, into their constraints files: `nox -s freeze -- 0.16.0`; all without one."""
    for release in session.posargs or [*RELEASES, NIGHTLY]:
        freeze_pins(session, release)
