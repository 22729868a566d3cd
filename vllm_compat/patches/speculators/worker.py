"""speculators' worker extension, for a driver of one's own: the same methods on our recorder.

``VllmHiddenStatesGenerator`` does not need it any more, its workers carry ours. Whoever names theirs in
``worker_extension_cls`` gets a class with both, so that ``capture_hidden_states`` works there as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat.errors import CaptureError
from vllm_compat.patches.replace import Replace
from vllm_compat.patches.speculators.record import boundaries


def _extension(theirs: type) -> type:
    from vllm_compat.capture.recorder import Recorder
    from vllm_compat.capture.worker import HiddenStatesWorkerExtension as Ours

    by_request = hasattr(theirs, "_set_request_metadata")  # 0.4.0

    class HiddenStatesWorkerExtension(Ours):
        """Rows are cut into requests by the runner's own batch, whatever the driver says of their order."""

        def _setup_hidden_states_capture(self, layer_ids: Sequence[int]) -> None:
            runner: Any = self.model_runner  # type: ignore[attr-defined]
            wanted = boundaries(layer_ids)
            layers = tuple(sorted(set(wanted)))
            keeps = self.rank == 0  # type: ignore[attr-defined]
            recorder = Recorder(runner, layers, way="hooks", speaks=keeps)
            if recorder.boundaries != layers:
                recorder.close()
                raise CaptureError(
                    "hidden states of a model split over pipeline stages, by this extension",
                    needed="all layers in one stage",
                    found=f"boundaries {list(recorder.boundaries)} of {list(layers)} in this one",
                    advice="use tensor parallelism, or capture_hidden_states, which puts the stages together",
                )
            self._recorder = recorder
            self._places = [layers.index(boundary) for boundary in wanted]

        def _set_request_metadata(self, request_metadata: Mapping[str, int]) -> None:
            """Not needed: the runner knows its batch."""

        def _reset_capture(self) -> None:
            self._asked().take_all()

        def _get_captured_states(self) -> Any:
            """0.4.0: request id -> a tensor [T, H] per layer id; 0.3.0: those tensors, of one request. Or None."""
            taken = self._asked().take_all()
            states = {name: [rows[:, at].clone() for at in self._places] for name, rows in taken.items()}
            if not states or by_request:
                return states or None
            if len(states) > 1:
                raise CaptureError(
                    f"hidden states of {len(states)} requests in one list",
                    needed="one request between _reset_capture and _get_captured_states",
                    found="rows whose order only the model runner knows",
                    advice="send one request at a time, or use VllmHiddenStatesGenerator",
                )
            return next(iter(states.values()))

        def _asked(self) -> Recorder:
            if not hasattr(self, "_recorder"):
                msg = "Must call _setup_hidden_states_capture before capturing states"
                raise RuntimeError(msg)
            return self._recorder

    HiddenStatesWorkerExtension.__module__ = theirs.__module__
    HiddenStatesWorkerExtension.__qualname__ = theirs.__qualname__
    return HiddenStatesWorkerExtension


CHANGES = (Replace("speculators.data_generation.custom_worker", "HiddenStatesWorkerExtension", _extension),)
