"""The way "native": vLLM's own extraction, which writes a file per request.

``speculative_config.method = "extract_hidden_states"`` makes the runner keep the model's auxiliary outputs in the KV
cache, and ExampleHiddenStatesConnector writes them in the step after a request has finished. Right from 0.24.0 on:
before, it has prompts only, and 0.22 and 0.23 lose rows of prompts that are chunked or beside decodes (issue 44485).
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import CaptureError
from vllm_compat.installed import installed

if TYPE_CHECKING:
    from vllm_compat.engine import EngineLoop

__all__ = ["native_capture_args"]

METHOD = "extract_hidden_states"
_SINCE = (0, 24)


def native_capture_args(layers: Iterable[int], folder: str | Path) -> dict[str, Any]:
    """Engine arguments for a loop whose hidden states vLLM extracts itself (``way="native"``).

    ::

        config = make_vllm_config(model=…, **native_capture_args((2, 30, 58, 61), "/dev/shm/states"))

    Args:
        layers: Boundary ids; they cannot be changed later. 0 and, of DeepSeek before 0.25.0, N are not among those that
            models return.
        folder: Where vLLM writes a file per request, which ``pop`` reads and removes.

    Returns:
        ``speculative_config`` and ``kv_transfer_config``.
    """
    ids = sorted(set(layers))
    return {
        "speculative_config": {
            "method": METHOD,
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }


@dataclass(frozen=True)
class _File:
    """What vLLM writes of one request, under a lock that it holds from the request's first step on."""

    path: Path

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f"{self.path.name}.lock")

    def is_begun(self) -> bool:
        """Whether vLLM has seen the request."""
        return self._lock.exists()

    def is_written(self) -> bool:
        """Whether the file is complete."""
        try:
            with self._lock.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return False
        return self.path.exists()

    def wait(self) -> None:
        """For vLLM's writer."""
        with self._lock.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)


@dataclass(frozen=True)
class FileStates:
    """States of one request in the file that vLLM writes."""

    layers: tuple[int, ...]
    nbytes: int
    file: _File
    token_ids: tuple[int, ...]
    places: tuple[int, ...]
    dtype: Any

    def tensor(self) -> Any:
        """[T, L, H]; waits for vLLM's writer, and removes the file.

        Raises:
            CaptureError: the file holds other tokens than the model was fed.
        """
        from safetensors.torch import load_file

        self.file.wait()
        found = load_file(self.file.path)
        if tuple(found["token_ids"].tolist()) != self.token_ids:
            raise CaptureError(
                f"hidden states in {self.file.path}",
                needed=f"states of the {len(self.token_ids)} tokens that the model was fed",
                found=f"states of {len(found['token_ids'])} tokens",
                advice="use another way",
            )
        self.file.remove()
        return found["hidden_states"][:, list(self.places)].to(self.dtype)


class NativeFiles:
    """Reads what vLLM's connector writes.

    Args:
        loop: A loop whose config has ``native_capture_args``.
        layers: Boundary ids, ascending; any of those that the loop extracts.
        dtype: Of the states; None for the model's.

    Raises:
        CaptureError: a release or a loop that cannot, with the reason.
    """

    def __init__(self, loop: EngineLoop, layers: tuple[int, ...], dtype: Any) -> None:
        reason = _why_not(loop.vllm_config, layers)
        if reason:
            raise CaptureError(
                f"hidden states at boundaries {list(layers)} by way='native'",
                needed="vLLM 0.24.0 or newer, and a loop with the engine arguments of native_capture_args",
                found=f"vLLM {installed().version}: {reason}",
                advice=f"make_vllm_config(…, **native_capture_args({layers}, folder)), or leave way unset",
            )
        self._loop = loop
        extracted = _extracted(loop.vllm_config)
        self._places = tuple(extracted.index(layer) for layer in layers)
        self._layers = layers
        self._folder = Path(loop.vllm_config.kv_transfer_config.kv_connector_extra_config["shared_storage_path"])
        model = loop.vllm_config.model_config
        self._dtype = dtype or model.dtype
        self._row = model.get_hidden_size() * self._dtype.itemsize * len(layers)
        #: Of requests whose states nobody will take; vLLM writes them in a later step.
        self._unwanted: list[_File] = []
        self.info = {
            "num_hidden_layers": model.hf_text_config.num_hidden_layers,
            "hidden_size": model.get_hidden_size(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "runner": loop.call_workers("vllm_compat_capture_runner")[0],
            "way": "native",
            "why": "asked for",
        }

    def add(self, request: Any) -> None:
        """Have the states of generated tokens written too."""
        if self._file(request.request_id) in self._unwanted:
            self.clear()  # it will be written under the same name
        request.kv_transfer_params = {**(request.kv_transfer_params or {}), "include_output_tokens": True}

    def take(self, request_id: str, token_ids: tuple[int, ...]) -> FileStates:
        """The states of a request that has just finished; its file comes with the next step."""
        file = self._file(request_id)
        return FileStates(self._layers, self._row * len(token_ids), file, token_ids, self._places, self._dtype)

    def see_to(self, states: FileStates) -> None:
        """Run the step in which vLLM writes, if it is still to come."""
        if not states.file.is_written() and self._loop.scheduler.has_requests():
            self._loop.step_ahead()

    def drop(self, request_id: str) -> None:
        """A finished request whose states nobody will take."""
        written = [file for file in self._unwanted if file.is_written()]
        for file in written:
            file.remove()
        self._unwanted = [file for file in self._unwanted if file not in written]
        self._unwanted.append(self._file(request_id))

    def clear(self) -> None:
        """Remove the files that nobody will take, once vLLM has written them."""
        if self._unwanted and self._loop.scheduler.has_requests():
            self._loop.step_ahead()
        for file in self._unwanted:
            if file.is_begun():  # not of a request that was aborted before its first step
                file.wait()
                file.remove()
        self._unwanted.clear()

    def _file(self, request_id: str) -> _File:
        return _File(self._folder / f"{request_id}.safetensors")


def _extracted(vllm_config: Any) -> tuple[int, ...]:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD:
        return ()
    return tuple(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)


def _why_not(vllm_config: Any, layers: tuple[int, ...]) -> str:
    extracted, release = _extracted(vllm_config), installed().release
    if release is not None and release < _SINCE:
        return "its extraction has no generated tokens, or loses rows"
    if not extracted:
        return "speculative_config is another one"
    missing = [layer for layer in layers if layer not in extracted]
    if missing:
        return f"the loop extracts {list(extracted)}, and not {missing}"
    if vllm_config.parallel_config.tensor_parallel_size > 1 and release is not None and release < (0, 31):
        return "with tensor parallelism its connector never lets go of a request (until 0.30.0)"
    return ""
