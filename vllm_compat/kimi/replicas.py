"""Several copies of the target on one machine or many, through Ray, filling one store.

Every replica is a Ray actor with an engine. It takes claims (the rows of one shard) from the ledger, an actor on the
machine that asked, which has the store's lock and writes its index. The run directory must be on a file system that
all of them see. A replica that dies is replaced, and what it had claimed is somebody else's. The store has the shards
that a single replica would have written, row by row.
"""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_compat import ConfigError, StoreError, capture_hidden_states

from .background import Background
from .claims import ATTEMPTS
from .codec import encode
from .files import sha256_file
from .ledger import Ledger, draft_name
from .one_pass import AnswerStates, folder_of
from .progress import Progress
from .provenance import provenance_of, room_for
from .row_states import States, sample_of, states_of_rows
from .rows import Row
from .sample_check import fitting, not_finite
from .shard_file import write_shard
from .shards import DTYPES, Provenance, Sample

if TYPE_CHECKING:
    from typing_extensions import Self

    from .claims import Claim
    from .config import Config

#: Seconds between two looks at how far the replicas are.
_LOOK = 0.5


def refuse_temporary_folder() -> None:
    """ConfigError where a Ray of this machine would start no worker, wait for them for ever and say nothing."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).resolve()
    environment = os.environ.get("VIRTUAL_ENV")
    if environment and Path(environment).resolve() in (folder, *folder.parents):
        raise ConfigError(
            "replicas through a Ray of this machine",
            needed=f"a folder for temporary files that is not below the virtual environment {environment}",
            found=str(folder),
            advice="set RAY_TMPDIR to another one",
        )


class Replica:
    """One engine, in a process of its own. `name` is no other replica's of the run, dead ones included."""

    def __init__(self, cfg: Config, layers: tuple[int, ...], name: str) -> None:
        from .extract import open_engine

        self.cfg, self.layers, self.name = cfg, layers, name
        self.loop = open_engine(cfg)

    def where(self, marker: Path) -> tuple[str, bool]:
        """The machine, and whether it sees a file of the run."""
        return socket.gethostname(), marker.exists()

    def provenance(self, rows_path: Path) -> Provenance:
        """Of the states that this replica makes."""
        with capture_hidden_states(self.loop, self.layers) as capture:
            return provenance_of(self.cfg, capture.model_info, self.layers, sha256_file(rows_path))

    def measure(self, rows: list[Row]) -> tuple[int, float]:
        """(tokens, seconds) of plain prefill."""
        from .extract import plain_prefill

        return plain_prefill(self.loop, rows)

    def self_check(self, rows: list[Row]) -> dict[str, Any]:
        """See ``selfcheck``."""
        from .extract import check_engine

        return check_engine(self.cfg, self.loop, self.layers, rows)

    def fill(self, folder: Path, provenance: Provenance, ledger: Any) -> dict[str, Any]:
        """Take claims until there is none left. Tokens prefilled, rows that had their states, seconds."""
        import ray

        def publish(claim: Claim, samples: list[Sample], refused: dict[str, str]) -> None:
            draft = folder / draft_name(self.name, claim.number)
            encoded = [encode(sample, provenance) for sample in samples]
            shard = write_shard(draft, encoded, provenance) if encoded else None
            answer_of(ray, ledger.publish.remote(self.name, claim.number, shard, refused))

        desk = Desk(folder, provenance, publish)

        def rows() -> Iterator[Row]:
            while (claim := answer_of(ray, ledger.take.remote(self.name))) is not None:
                desk.open(claim)
                yield from claim.rows

        dtype = DTYPES[provenance.dtype]
        answers = AnswerStates(folder_of(self.cfg), provenance)
        began = time.monotonic()
        with capture_hidden_states(self.loop, self.layers, dtype=dtype) as capture:
            room = room_for(self.cfg, self.loop, provenance)
            with Background[tuple[Row, States]](lambda item: desk.add(sample_of(*item, dtype)), room) as feeder:
                tokens, answered = states_of_rows(self.loop, capture, answers, rows(), feeder.put)
            way = capture.way
        return {"tokens": tokens, "answered": answered, "seconds": time.monotonic() - began, "way": way}


class Desk:
    """The claims of a replica that are not complete, and what there is of them.

    Claims come from the thread of the engine, samples from the one that stores them.
    """

    def __init__(
        self, folder: Path, provenance: Provenance, publish: Callable[[Claim, list[Sample], dict[str, str]], None]
    ) -> None:
        self._folder, self._provenance, self._publish = folder, provenance, publish
        self._claim_of: dict[str, Claim] = {}
        self._samples: dict[int, dict[str, Sample]] = {}
        self._refused: dict[int, dict[str, str]] = {}

    def open(self, claim: Claim) -> None:
        """A claim whose samples will come."""
        self._samples[claim.number], self._refused[claim.number] = {}, {}
        self._claim_of |= {row.row_id: claim for row in claim.rows}

    def add(self, sample: Sample) -> None:
        """A sample of a claim; the last one publishes the claim, in the order of its rows.

        StoreError: the sample is not what the provenance says. One that is not finite is refused.
        """
        sample = fitting(sample, self._provenance, self._folder)
        claim = self._claim_of.pop(sample.sample_id)
        samples, refused = self._samples[claim.number], self._refused[claim.number]
        bad = not_finite(sample, self._provenance)
        if bad is None:
            samples[sample.sample_id] = sample
        else:
            refused[sample.sample_id] = bad
        if len(samples) + len(refused) == len(claim.rows):
            del self._samples[claim.number], self._refused[claim.number]
            self._publish(claim, [samples[row.row_id] for row in claim.rows if row.row_id in samples], refused)


class Team:
    """The replicas of a run, on a Ray cluster: this machine's processors, or ``extract.ray_address``."""

    def __init__(self, cfg: Config, layers: tuple[int, ...]) -> None:
        self._ray = ray = _import_ray()
        self._cfg, self._layers = cfg, layers
        self._names = (f"replica{number}" for number in itertools.count())
        self._mine = not ray.is_initialized()
        if self._mine:
            options: dict[str, Any] = {"address": cfg.extract.ray_address, "log_to_driver": False}
            if cfg.extract.ray_address is None:
                refuse_temporary_folder()
                # A place for each, however few cores there are: where there are GPUs, they are what is short.
                options |= {"address": "local", "num_cpus": cfg.extract.replicas, "include_dashboard": False}
            ray.init(**options)
        #: Name -> actor.
        self.replicas: dict[str, Any] = {}
        try:
            for _ in range(cfg.extract.replicas):
                self._hire()
            self._meet()
        except BaseException:
            self.dismiss()
            raise

    def _hire(self) -> str:
        name = next(self._names)
        options = {"num_cpus": 1, "num_gpus": _gpus(self._ray, self._cfg), "max_restarts": 0}
        self.replicas[name] = self._ray.remote(**options)(Replica).remote(self._cfg, self._layers, name)
        return name

    def _meet(self) -> None:
        """Every replica has its engine and sees the run; ConfigError names a machine that does not."""
        marker = self._cfg.run_dir / "config.toml"
        asked = [replica.where.remote(marker.resolve()) for replica in self.replicas.values()]
        blind = sorted({machine for machine, sees in self._answers(asked) if not sees})
        if blind:
            raise ConfigError(
                f"replicas on {', '.join(blind)}",
                needed=f"a run directory that every machine sees at the same path ({self._cfg.run_dir})",
                found="no config.toml there",
                advice="put run_dir on a file system that all machines mount",
            )

    def self_check(self, rows: list[Row]) -> dict[str, Any]:
        """Every replica checks itself, see ``selfcheck``; what the first one found. It raises when one fails."""
        found: dict[str, Any] = self._ask_all("self_check", rows)[0]
        return found

    def measure(self, rows: list[Row]) -> list[tuple[int, float]]:
        """(tokens, seconds) of plain prefill by all replicas at once."""
        measured = self._ask_all("measure", rows)
        return [(sum(tokens for tokens, _ in measured), max(seconds for _, seconds in measured))]

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._answers([getattr(one, method).remote(*arguments) for one in self.replicas.values()])

    def _answers(self, references: list[Any]) -> list[Any]:
        """What was answered. Raises what a replica raised; StoreError when one died, which has nothing claimed yet."""
        try:
            return [answer_of(self._ray, reference) for reference in references]
        except self._ray.exceptions.RayActorError as error:
            raise StoreError(
                "replicas that open the target",
                needed="every one of them to live",
                found=str(error),
                advice="see the workers' logs (ray logs)",
            ) from error

    def fill(self, split: str, rows_path: Path, progress: Progress) -> dict[str, Any]:
        """Fill the store of a split. A replica that dies is replaced.

        StoreError: the rows of a claim kill every replica; see ``Claims``. What a replica raises is raised here.
        """
        ray = self._ray
        provenances = self._ask_all("provenance", rows_path.resolve())
        different = next((other for other in provenances if other != provenances[0]), None)
        if different is not None:
            raise StoreError(
                "replicas that fill one store",
                needed="the same vLLM, model and rows on every machine",
                found=provenances[0].differences(different),
            )
        provenance, folder = provenances[0], (self._cfg.run_dir / "extract" / split).resolve()
        here = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        office = ray.remote(num_cpus=0, scheduling_strategy=strategy, max_concurrency=1)(Ledger)
        extract = self._cfg.extract
        ledger = office.remote(folder, provenance, rows_path.resolve(), extract.shard_mb << 20, extract.max_bad_rows)
        began = time.monotonic()
        rows_done, _, rows = answer_of(ray, ledger.progress.remote())
        reports: list[dict[str, Any]] = []
        deaths = 0  # since a shard was last published
        at_work = {self._start(name, folder, provenance, ledger): name for name in self.replicas}
        with progress.task(f"extracting {split}, {len(at_work)} replicas", total=rows) as bar:
            bar.advance(rows_done)
            while at_work:
                ended, _ = ray.wait(list(at_work), timeout=_LOOK)
                for reference in ended:
                    name = at_work.pop(reference)
                    try:
                        reports.append(answer_of(ray, reference))
                    except ray.exceptions.RayActorError as error:
                        deaths += 1
                        if deaths > len(self.replicas) + ATTEMPTS:
                            raise _they_all_die(deaths, error) from error
                        del self.replicas[name]
                        answer_of(ray, ledger.give_back.remote(name))
                        again = self._hire()
                        at_work[self._start(again, folder, provenance, ledger)] = again
                before = rows_done
                rows_done, _, _ = answer_of(ray, ledger.progress.remote())
                deaths = deaths if rows_done == before else 0
                bar.advance(rows_done - before)
        seconds = time.monotonic() - began
        recovered, refused = answer_of(ray, ledger.close.remote())
        ray.kill(ledger)
        return {
            "tokens": sum(report["tokens"] for report in reports),
            "answered": sum(report["answered"] for report in reports),
            "seconds": seconds,
            "recovered": recovered,
            "refused": refused,
            "waited": 0.0,
            "way": reports[0]["way"],
        }

    def _start(self, name: str, folder: Path, provenance: Provenance, ledger: Any) -> Any:
        return self.replicas[name].fill.remote(folder, provenance, ledger)

    def dismiss(self) -> None:
        """End the replicas, and Ray where this run began it."""
        for replica in self.replicas.values():
            self._ray.kill(replica)
        self.replicas.clear()
        if self._mine:
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss()


def answer_of(ray: Any, reference: Any) -> Any:
    """An actor's answer, or the very error that it raised, without Ray's traceback around it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def _they_all_die(deaths: int, error: Exception) -> StoreError:
    return StoreError(
        "extraction by replicas",
        needed="replicas that live until a shard is written",
        found=f"{deaths} that died one after the other; the last: {error}",
        advice="see the workers' logs (ray logs); what is stored stays, and the same command goes on",
    )


def _gpus(ray: Any, cfg: Config) -> int:
    """GPUs that a replica takes for itself; none where vLLM asks Ray for them, or where there are none."""
    if cfg.target.engine_args.get("distributed_executor_backend") == "ray":
        return 0
    world = cfg.target.tensor_parallel_size * cfg.target.pipeline_parallel_size
    return world if ray.cluster_resources().get("GPU") else 0


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            "extract.replicas",
            needed="Ray",
            found=str(error),
            advice="pip install 'vllm-compat[replicas]' on every machine",
        ) from error
    return ray
