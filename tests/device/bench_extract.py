"""How fast hidden states leave a GPU, beside plain prefill and vLLM's own extraction; prints one JSON document.

    python tests/device/bench_extract.py --out bench_extract.json

Kimi-K2 at full width, 6 layers, 32 experts, dummy weights (``--shape tiny`` on a CPU shows that the script runs). Every
engine is a check of its own; within one, the ways take turns, and a ratio is the median of the rounds'. One round is
discarded: pinned memory is allocated in it.

    plain      prefill, one generated token, nothing captured
    aux/hooks  captured and copied to the CPU by another thread than the loop's; nothing is written
    files      captured (first way), a file per request written and fsynced by threads
    store      captured (first way), written by the pipeline's own store

A rate counts until the last byte is there; "tail" are the seconds of that after the last step, which a longer run
has once as well: "eager-long" goes over the prompts ten times, and another process makes room for what it writes. "KV
tokens" are what the cache has room for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from checks import Check, Checks, machine
from kimi_shape import KIMI

SHAPES = {
    "kimi": {"config": KIMI, "prompts": 1536, "length": 512, "batch": 16384},
    "tiny": {
        "config": {
            **KIMI,
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 64,
        },
        "prompts": 16,
        "length": 64,
        "batch": 512,
    },
}
THREADS = 6


# -- a store for what comes out --------------------------------------------------------------------------------------


class Sink:
    """Threads that take finished states, so that the loop goes on; bounded, so that a slow disk slows the loop down."""

    def __init__(self, put: Callable[[int, Any], None], threads: int, max_items: int = 64) -> None:
        self._put = put
        self._threads = ThreadPoolExecutor(threads)
        self._room = threading.Semaphore(max_items)
        self._puts: list[Future[None]] = []

    @property
    def taken(self) -> int:
        return len(self._puts)

    def add(self, index: int, states: Any) -> None:
        self._room.acquire()
        self._puts.append(self._threads.submit(self._take, index, states))

    def close(self) -> None:
        self._threads.shutdown()
        for put in self._puts:
            put.result()

    def _take(self, index: int, states: Any) -> None:
        try:
            self._put(index, states)
        finally:
            self._room.release()


@contextmanager
def discarding(_: Path) -> Iterator[Sink]:
    """States are waited for, and forgotten."""

    def arrive(_: int, states: Any) -> None:
        assert states.hidden_states.shape[0] == len(states.token_ids)

    sink = Sink(arrive, 1)
    yield sink
    sink.close()


def save(path: Path, tensor: Any) -> None:
    """One safetensors file, fsynced; written by hand, since safetensors before 0.8.0 holds the GIL meanwhile."""
    import torch

    names = {torch.bfloat16: "BF16", torch.uint8: "U8"}
    tensor = tensor.contiguous()
    entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [0, tensor.nbytes]}
    header = json.dumps({"tensor": entry}).encode()
    with path.open("wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        data = memoryview(tensor.view(torch.uint8).numpy()).cast("B")
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())


@contextmanager
def files(folder: Path) -> Iterator[Sink]:
    """A file per request, fsynced."""

    def write(index: int, states: Any) -> None:
        save(folder / f"{index}.safetensors", states.hidden_states)

    sink = Sink(write, THREADS)
    yield sink
    sink.close()


@contextmanager
def store(folder: Path) -> Iterator[Sink]:
    """The pipeline's store, as ``vllm-compat kimi extract`` writes it."""
    import torch

    import vllm_compat
    from vllm_compat.kimi.shards import Provenance, Sample
    from vllm_compat.kimi.store_writer import StoreWriter

    here = vllm_compat.installed()
    config = json.loads((folder.parent / "model" / "config.json").read_text())
    provenance = Provenance(
        layers=LAYERS,
        hidden_size=config["hidden_size"],
        num_hidden_layers=config["num_hidden_layers"],
        dtype="bfloat16",
        model_fingerprint="dummy",
        vllm_version=here.version,
        distribution=here.distribution or "source tree",
        runner="bench",
        created_with=vllm_compat.__version__,
        rows_fingerprint="random",
    )
    with StoreWriter(folder, provenance, 512 << 20) as writer:

        def write(index: int, states: Any) -> None:
            ids = torch.tensor(states.token_ids, dtype=torch.int32)
            mask = torch.ones(len(ids), dtype=torch.uint8)
            writer.add(Sample(str(index), ids, mask, states.hidden_states))

        sink = Sink(write, 1)
        yield sink
        sink.close()
    assert len(writer.done) == sink.taken, f"{len(writer.done)} samples of {sink.taken} are in the store"


#: Keeps the newest files of a folder; a process of its own, so that the loop does not share the GIL with it.
SWEEP = """
import pathlib, sys, time
while True:
    for file in sorted(pathlib.Path(sys.argv[1]).glob("shard-*"))[: -int(sys.argv[2])]:
        file.unlink()
    time.sleep(0.2)
"""


@contextmanager
def swept(folder: Path, keep: int = 24) -> Iterator[None]:
    """A run of minutes makes more states than memory or disk have room for: only the newest shards stay."""
    process = subprocess.Popen([sys.executable, "-c", SWEEP, str(folder), str(keep)])
    try:
        yield
        assert process.poll() is None, "nobody made room"
    finally:
        process.kill()
        process.wait()


#: What is captured, the final state (boundary 6) among it.
LAYERS = (2, 3, 4, 6)


def given_by_the_model() -> tuple[int, ...]:
    """As many boundaries, which DeepSeek's models return themselves: before 0.25.0 the final one is not among them."""
    import vllm_compat as vc

    return LAYERS if (vc.installed().release or (9,)) >= (0, 25) else (2, 3, 4, 5)


# -- engines ---------------------------------------------------------------------------------------------------------


def model_at(given: argparse.Namespace, folder: Path) -> str:
    """A configuration without weights."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES[given.shape]["config"]))
    return str(model)


def arguments_of(given: argparse.Namespace, model: str) -> dict[str, Any]:
    shape: Any = SHAPES[given.shape]
    made = {"model": model, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
    made |= {
        "max_model_len": 1024,
        "max_num_batched_tokens": shape["batch"],
        "max_num_seqs": min(256, shape["prompts"]),
    }
    if given.shape == "tiny":
        made["gpu_memory_utilization"] = 0.3
    return {**made, "enable_prefix_caching": False}


def prompts_of(given: argparse.Namespace, seed: int = 0) -> list[list[int]]:
    import torch

    shape: Any = SHAPES[given.shape]
    generator = torch.Generator().manual_seed(seed)
    size = (shape["prompts"], shape["length"])
    rows: list[list[int]] = torch.randint(2, shape["config"]["vocab_size"], size, generator=generator).tolist()
    return rows


def bytes_per_token(shape: Any) -> int:
    """Of its states, in bfloat16."""
    size: int = len(LAYERS) * shape["config"]["hidden_size"] * 2
    return size


def place(given: argparse.Namespace) -> Path:
    """Where files go: memory, if there is room for a run's, else the disk."""
    if given.folder:
        return Path(given.folder)
    memory = Path("/dev/shm")
    shape: Any = SHAPES[given.shape]
    needed = shape["prompts"] * shape["length"] * bytes_per_token(shape)
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1.1 * needed
    return memory if roomy else Path(tempfile.gettempdir())


def our_engine(
    given: argparse.Namespace, kinds: tuple[str, ...], *, eager: bool, prepared: bool, passes: int
) -> dict[str, Any]:
    """Rates of one EngineLoop, the kinds in turn; one round of many passes over the prompts, or some of one pass."""
    import vllm_compat as vc

    params = vc.make_sampling_params(temperature=0.0, max_tokens=1, detokenize=False)
    prompts = prompts_of(given)
    tokens = sum(map(len, prompts))
    with tempfile.TemporaryDirectory(dir=place(given)) as scratch:
        options = {**arguments_of(given, model_at(given, Path(scratch))), "enforce_eager": eager}
        if not eager:
            # A prefill is larger than any graph; these are recorded for the sake of being there.
            options["compilation_config"] = {"cudagraph_capture_sizes": [1, 8, 64]}
        config = vc.make_vllm_config(**options, async_scheduling=False)
        began = time.monotonic()
        with vc.EngineLoop(config, capture_layers=given_by_the_model() if prepared else ()) as loop:
            started = time.monotonic() - began
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            ways = {}
            tails: dict[str, list[float]] = {}
            for round_number in range((given.rounds if passes == 1 else 1) + 1):
                order = kinds if round_number % 2 else kinds[::-1]
                times = passes if round_number else 1
                for kind in order:
                    folder = Path(scratch, "out")
                    folder.mkdir()
                    with swept(folder) if passes > 1 else nullcontext():
                        began = time.perf_counter()
                        ways[kind], ended = run_once(loop, kind, prompts * times, params, folder)
                        seconds = time.perf_counter() - began
                    shutil.rmtree(folder)
                    if round_number:
                        rates[kind].append(tokens * times / seconds)
                        tails.setdefault(kind, []).append(round(seconds - (ended - began), 3))
            kv = config.cache_config.num_gpu_blocks * config.cache_config.block_size
            runner = type(loop.executor.driver_worker.worker.model_runner).__module__
        found = {"runner": runner, "kv_tokens": kv, "ways": ways, "tail_seconds": tails, "folder": str(place(given))}
    return {**found, "start_seconds": round(started, 1), "tokens": tokens * passes, **summary(rates, "plain")}


def engine(*kinds: str, eager: bool, prepared: bool | None = None, passes: int = 1) -> Check:
    """A check of one EngineLoop; a compiled one is told the layers when it is opened, unless said otherwise."""
    told = not eager if prepared is None else prepared
    return lambda given: our_engine(given, kinds, eager=eager, prepared=told, passes=passes)


def run_once(loop: Any, kind: str, prompts: list[list[int]], params: Any, folder: Path) -> tuple[str, float]:
    """One pass over the prompts; the way taken, and when the engine was done."""
    import vllm_compat as vc

    if kind == "plain":
        for _ in loop.generate(prompts, params):
            pass
        return "plain", time.perf_counter()
    way = kind if kind in ("aux", "hooks") else None
    into = {"files": files, "store": store}.get(kind, discarding)
    # The store wants the final state, whatever way gives it.
    layers = LAYERS if kind == "store" else given_by_the_model()
    with vc.capture_hidden_states(loop, layers, way=way) as capture, into(folder) as sink:
        for index, done in enumerate(loop.generate(prompts, params)):
            sink.add(index, capture.pop(done.request_id))
        ended = time.perf_counter()
    return capture.way, ended


def summary(rates: dict[str, list[float]], base: str) -> dict[str, Any]:
    """Tokens per second of each round, and the median ratio of each kind to the base of the same round."""
    ratios = {
        kind: round(statistics.median(a / b for a, b in zip(rates[kind], rates[base], strict=True)), 4)
        for kind in rates
        if base in rates and kind != base
    }
    return {
        "tokens_per_second": {kind: [round(rate) for rate in found] for kind, found in rates.items()},
        "ratio_to_plain": ratios,
    }


def vllm_engine(given: argparse.Namespace, *, extract: bool) -> dict[str, Any]:
    """vllm.LLM: plain, or with its own extraction into files."""
    from vllm import LLM, SamplingParams

    shape: Any = SHAPES[given.shape]
    with tempfile.TemporaryDirectory(dir=place(given)) as scratch:
        options: dict[str, Any] = {**arguments_of(given, model_at(given, Path(scratch))), "enforce_eager": True}
        out = Path(scratch, "out")
        if extract:
            ids = {"eagle_aux_hidden_state_layer_ids": list(given_by_the_model())}
            options["speculative_config"] = {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": ids},
            }
            extra = {"shared_storage_path": str(out), "use_synchronization_lock": False}
            options["kv_transfer_config"] = {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": extra,
            }
        began = time.monotonic()
        llm = LLM(**options)
        started = time.monotonic() - began
        prompts = prompts_of(given)
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        last = [{"prompt_token_ids": prompts[0][:16]}]
        found: list[float] = []
        for round_number in range(given.rounds + 1):
            out.mkdir(exist_ok=True)
            began = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            if extract:
                llm.generate(last, params, use_tqdm=False)  # files of the last step are written by the next one
                wait_for([Path((o.kv_transfer_params or {})["hidden_states_path"]) for o in outputs], shape)
            seconds = time.perf_counter() - began
            shutil.rmtree(out)
            if round_number:
                found.append(sum(map(len, prompts)) / seconds)
        cache = llm.llm_engine.vllm_config.cache_config
        kv = cache.num_gpu_blocks * cache.block_size
    kind = "native" if extract else "plain"
    return {"kv_tokens": kv, "start_seconds": round(started, 1), **summary({kind: found}, "none")}


def wait_for(paths: list[Path], shape: Any) -> None:
    """Until every file has all its bytes."""
    least = shape["length"] * bytes_per_token(shape)
    until = time.monotonic() + 30
    while not all(path.exists() and path.stat().st_size >= least for path in paths):
        if time.monotonic() > until:
            missing = sum(not path.exists() for path in paths)
            raise TimeoutError(f"{missing} of {len(paths)} files are not there")
        time.sleep(0.002)


# -- ceilings --------------------------------------------------------------------------------------------------------


def ceilings(given: argparse.Namespace) -> dict[str, Any]:
    """GB/s from device to pinned memory, from one place in memory to another, and into files."""
    import torch

    size = 1 << 30 if given.shape == "kimi" else 1 << 26
    made: dict[str, Any] = {"folder": str(place(given))}
    host = torch.empty(size, dtype=torch.uint8)
    if torch.cuda.is_available():
        host = host.pin_memory()
        device = torch.ones(size, dtype=torch.uint8, device="cuda")
        host.copy_(device)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        made["device_to_pinned_GB_s"] = round(8 * size / (time.perf_counter() - began) / 1e9, 2)
    other = torch.empty_like(host)
    other.copy_(host)
    began = time.perf_counter()
    other.copy_(host)
    made["memory_copy_GB_s"] = round(size / (time.perf_counter() - began) / 1e9, 2)
    with tempfile.TemporaryDirectory(dir=place(given)) as scratch:
        for threads in (1, THREADS):
            made[f"files_{threads}_threads_GB_s"] = round(write_rate(Path(scratch), host, threads), 2)
    shape: Any = SHAPES[given.shape]
    return {**made, "bytes_per_token": bytes_per_token(shape)}


def write_rate(folder: Path, data: Any, threads: int) -> float:
    """GB/s of fsynced files of 32 MiB."""
    part = data[: 32 << 20]
    count = max(threads, min(128, len(data) * 4 // max(1, len(part))))

    def write(index: int, _: Any) -> None:
        save(folder / str(index), part)

    began = time.perf_counter()
    sink = Sink(write, threads)
    for index in range(count):
        sink.add(index, None)
    sink.close()
    rate = count * len(part) / (time.perf_counter() - began) / 1e9
    for index in range(count):
        (folder / str(index)).unlink()
    return rate


# -- all of it -------------------------------------------------------------------------------------------------------


def together(_: argparse.Namespace, checks: dict[str, Any]) -> dict[str, Any]:
    """Ratios across engines of this run, and which ceiling is the lowest."""
    made: dict[str, Any] = {}
    medians = {
        (name, kind): statistics.median(rates)
        for name, entry in checks.items()
        for kind, rates in entry.get("tokens_per_second", {}).items()
        if rates
    }

    def ratio(of: tuple[str, str], to: tuple[str, str]) -> float | None:
        return round(medians[of] / medians[to], 4) if of in medians and to in medians else None

    made["files_of_eager_plain"] = ratio(("eager", "files"), ("eager", "plain"))
    made["store_of_eager_plain"] = ratio(("eager", "store"), ("eager", "plain"))
    made["store_of_plain_over_minutes"] = ratio(("eager-long", "store"), ("eager-long", "plain"))
    made["compiled_files_of_compiled_plain"] = ratio(("compiled", "files"), ("compiled", "plain"))
    made["compiled_files_of_plain_without_outputs"] = ratio(("compiled", "files"), ("compiled-plain", "plain"))
    made["vllm_native_of_our_plain"] = ratio(("vllm-native", "native"), ("eager", "plain"))
    made["vllm_native_of_vllm_plain"] = ratio(("vllm-native", "native"), ("vllm-plain", "plain"))
    made["our_files_of_vllm_native"] = ratio(("eager", "files"), ("vllm-native", "native"))
    made["our_plain_of_vllm_plain"] = ratio(("eager", "plain"), ("vllm-plain", "plain"))
    made["kv_tokens"] = {name: entry["kv_tokens"] for name, entry in checks.items() if "kv_tokens" in entry}
    limits = checks.get("ceilings", {})
    if limits.get("ok") and ("eager", "plain") in medians:
        row = limits["bytes_per_token"]
        ceiling = {"prefill": medians["eager", "plain"]}
        for name, key in (("bus", "device_to_pinned_GB_s"), ("files", f"files_{THREADS}_threads_GB_s")):
            if key in limits:
                ceiling[name] = limits[key] * 1e9 / row
        made["ceilings_tokens_per_second"] = {name: round(value) for name, value in ceiling.items()}
        made["limit"] = min(ceiling, key=lambda name: ceiling[name])
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="kimi")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", help="where files are written; default: /dev/shm if it has the room")
    checks = Checks(__file__, parser)
    checks.add("ceilings", ceilings, limit=60)
    checks.add("eager", engine("plain", "files", "store", eager=True), limit=220)
    checks.add("eager-long", engine("plain", "store", eager=True, passes=10), limit=300, usual=False)
    checks.add("vllm-native", lambda given: vllm_engine(given, extract=True), limit=120)
    checks.add("compiled", engine("plain", "files", "store", eager=False), limit=260)
    checks.add("compiled-plain", engine("plain", eager=False, prepared=False), limit=160, usual=False)
    for way in ("aux", "hooks"):
        checks.add(way, engine("plain", way, eager=True), limit=140, usual=False)
    checks.add("vllm-plain", lambda given: vllm_engine(given, extract=False), limit=100, usual=False)
    v1 = engine("plain", "files", "store", eager=True)
    checks.add("eager-v1", v1, limit=220, usual=False, VLLM_USE_V2_MODEL_RUNNER="0")
    return checks.main(machine, together)


if __name__ == "__main__":
    sys.exit(main())
