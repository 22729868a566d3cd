"""EngineLoop: executor and scheduler in this process, stepped by hand, the same for every release."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol

from vllm_compat._per_prompt import PerPrompt
from vllm_compat._token_ids import plain_token_ids
from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.errors import Refusal, VllmCompatError
from vllm_compat.factories.executor import initialize_kv_cache, make_executor
from vllm_compat.factories.scheduler import make_scheduler, make_structured_output_manager
from vllm_compat.flights import Flights
from vllm_compat.hashing import make_block_hasher
from vllm_compat.values import FinishedRequest, RequestUpdate

__all__ = ["EngineLoop", "LoopObserver"]

Prompt = Sequence[int] | str | Mapping[str, Any]

#: The worker extension that every loop installs, so that hidden states can be captured later.
WORKER_EXTENSION = "vllm_compat.capture.worker.HiddenStatesWorkerExtension"


class LoopObserver(Protocol):
    """Something that follows a loop: hidden-state capture, a progress bar."""

    def on_add(self, request: Any) -> None:
        """A native Request is about to enter the scheduler."""

    def on_finish(self, finished: FinishedRequest) -> None:
        """A request is done; called before the loop hands it out."""


#: Whether a loop's worker runs in this process. vLLM's process groups are global to a process and made for one model.
_in_process_loop_is_open = False


class EngineLoop:
    """vLLM's scheduler and executor with the loop between them in the caller's hands.

    What EngineCore does in a process of its own happens here in plain calls, so that schedulers, requests and hidden
    states are within reach. Greedy output is that of ``vllm.LLM`` token for token. The executor may still use worker
    processes (tensor parallelism).

    Args:
        vllm_config: From ``make_vllm_config``. Its worker extension is set to ours where it has none.
        num_blocks: Size of the KV cache in blocks; default: vLLM measures free memory.
        scheduler_cls: "sync", "async", a Scheduler subclass, or None for what the config asks for.
        executor_cls: An Executor subclass, or None for what the config asks for.
        log_stats: As in vLLM's Scheduler.
        capture_layers: Boundaries whose hidden states are going to be captured (``capture_hidden_states``). Needed
            where the model is compiled, which has to know them before its first forward pass.

    Raises:
        CaptureError: a compiled model that cannot return the hidden states of ``capture_layers``.

    Use it as a context manager, or call ``shutdown``: workers and KV cache live until then.
    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        num_blocks: int | None = None,
        scheduler_cls: str | type | None = None,
        executor_cls: type | None = None,
        log_stats: bool = False,
        capture_layers: Iterable[int] = (),
    ) -> None:
        if not vllm_config.parallel_config.worker_extension_cls:
            vllm_config.parallel_config.worker_extension_cls = WORKER_EXTENSION
        #: Boundaries that the model was told before its first forward pass.
        self.capture_layers = tuple(sorted(set(capture_layers)))
        self._note_capture_layers(vllm_config)
        self.vllm_config = vllm_config
        self._scheduling = adapter("scheduler")
        self._stepping = adapter("step")
        self._outputs = adapter("engine_core_output")
        self._scheduler_outputs = adapter("scheduler_output")
        self._inputs = adapter("input_processor")
        self._flights = Flights()
        self._observers: list[LoopObserver] = []
        self._input_processor: Any = None
        self._failed: BaseException | None = None
        self._ahead: list[RequestUpdate] = []
        self._refuse_unmatched_scheduler(scheduler_cls)
        self._claim_process(executor_cls)
        try:
            self.executor: Any = make_executor(vllm_config, executor_cls=executor_cls)
        except BaseException:
            self._release_process()
            raise
        try:
            if self.capture_layers:
                # Loaded, and not run yet: memory is measured by the first forward pass.
                self.call_workers("vllm_compat_capture_prepare", self.capture_layers)
            self.kv_cache_config = initialize_kv_cache(self.executor, vllm_config, num_blocks=num_blocks)
            self.structured_output_manager = make_structured_output_manager(vllm_config)
            self.scheduler = make_scheduler(
                vllm_config,
                self.kv_cache_config,
                self.structured_output_manager,
                scheduler_cls=scheduler_cls,
                log_stats=log_stats,
            )
            adapter("executor").connect(self.executor, self.scheduler)
            hashing = vllm_config.cache_config.enable_prefix_caching or vllm_config.kv_transfer_config is not None
            #: Hasher for requests of this loop; None where nothing reads hashes.
            self.block_hasher = make_block_hasher(vllm_config, self.kv_cache_config) if hashing else None
            sizes = adapter("block_hashing")
            self._hash_block_size = sizes.block_sizes(vllm_config, self.kv_cache_config)[1]
            self._hash_lookahead = sizes.lookahead(vllm_config)
        except BaseException:
            try:
                self.executor.shutdown()
            finally:
                self._release_process()
            raise

    def _note_capture_layers(self, vllm_config: Any) -> None:
        if self.capture_layers and isinstance(vllm_config.additional_config, dict):
            # Part of the hash by which vLLM finds compiled code again: code of other outputs would be taken otherwise.
            vllm_config.additional_config = {
                **vllm_config.additional_config,
                "vllm_compat_capture_layers": list(self.capture_layers),
            }

    def _refuse_unmatched_scheduler(self, scheduler_cls: str | type | None) -> None:
        if self.vllm_config.speculative_config is None:
            return
        configured = bool(self.vllm_config.scheduler_config.async_scheduling)
        chosen = self._scheduling.is_async(self._scheduling.scheduler_class(self.vllm_config, scheduler_cls))
        if chosen != configured:
            # The runner keeps the drafts, or hands them over, by the config; the wrong scheduler would never see one.
            raise VllmCompatError(
                f"speculative decoding with scheduler_cls={scheduler_cls!r}",
                needed="a scheduler of the kind that async_scheduling of the config says",
                found=f"async_scheduling={configured}",
                advice=f"make_vllm_config(…, async_scheduling={chosen}), or leave scheduler_cls unset",
            )

    def _claim_process(self, executor_cls: type | None) -> None:
        global _in_process_loop_is_open
        self._owns_process = adapter("executor").runs_in_process(executor_cls, self.vllm_config)
        if self._owns_process and _in_process_loop_is_open:
            raise VllmCompatError(
                "an EngineLoop whose worker runs in this process",
                needed="no other one here, since vLLM's process groups are global to a process",
                found="another EngineLoop is open in this process",
                advice="shut it down first, or give this one workers of its own: distributed_executor_backend='mp'",
            )
        _in_process_loop_is_open = _in_process_loop_is_open or self._owns_process

    def _release_process(self) -> None:
        global _in_process_loop_is_open
        if self._owns_process:
            # CPU experts hold themselves (a view of a weight, whose loader is their method), with them the config, and
            # through this the layers with the KV cache. vLLM's bug; seen on 0.16.0.
            self.vllm_config.compilation_config.static_forward_context.clear()
            adapter("executor").release()
            _in_process_loop_is_open = False

    # -- requests in ------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        sampling_params: Any,
        *,
        request_id: str | None = None,
        lora_request: Any = UNSET,
        priority: Any = UNSET,
        cache_salt: str | None = None,
        trace_headers: Any = UNSET,
        arrival_time: float | None = None,
    ) -> str:
        """Add a request the way ``vllm.LLM`` does: validated, with the defaults of the model's generation config.

        Args:
            prompt: Token ids (a sequence, NumPy array or tensor), or text, or one of vLLM's prompt dictionaries.
            sampling_params: vLLM's SamplingParams; not changed.
            request_id: Default: the next of "0", "1", … that is not in use.
            lora_request, priority, cache_salt, trace_headers, arrival_time (seconds since the epoch): as in vLLM.

        Returns:
            The request's id.

        Raises:
            VllmCompatError: see ``add_request``, or token ids that are none. Whatever vLLM's own validation raises.
        """
        self._check_open()
        if request_id is None:
            request_id = self._flights.next_id()
        if not isinstance(prompt, (str, Mapping)):
            prompt = plain_token_ids(request_id, prompt)
        if self._input_processor is None:
            self._input_processor = self._inputs.build(self.vllm_config)
        options = {
            "request_id": request_id,
            "params": sampling_params,
            "lora_request": lora_request,
            "priority": priority,
            "trace_headers": trace_headers,
            "arrival_time": time.time() if arrival_time is None else arrival_time,
            "cache_salt": cache_salt,
        }
        request = self._inputs.request(self._input_processor, prompt, options, self.block_hasher)
        self._refuse_cached_media(request)
        return self.add_request(request)

    def _refuse_cached_media(self, request: Any) -> None:
        multimodal = getattr(self.vllm_config.model_config, "multimodal_config", None)
        if request.mm_features and multimodal is not None and multimodal.mm_processor_cache_gb > 0:
            # vLLM's front end sends a repeated image without its data, for a cache that EngineCore keeps and we do not.
            raise VllmCompatError(
                f"media of request {request.request_id!r}",
                needed="mm_processor_cache_gb=0",
                found=f"mm_processor_cache_gb={multimodal.mm_processor_cache_gb}",
                advice="make_vllm_config(…, mm_processor_cache_gb=0)",
            )

    def _check_open(self) -> None:
        if self.executor is None:
            raise VllmCompatError(
                "a call of this loop",
                needed="an open loop",
                found="shutdown() was called",
                advice="open a new one, and do everything inside its `with`",
            )

    def add_request(self, request: Any) -> str:
        """Add a native Request (``make_request``).

        Raises:
            VllmCompatError: the id is in use; block hashes are needed and the request's do not fit this loop; or the
                request asks for what vLLM's front end does after EngineCore (stop strings, n > 1) or for pooling.
        """
        self._check_open()
        _refuse_unserved(request)
        request_id: str = request.request_id
        if self._flights.is_used(request_id):
            raise VllmCompatError(
                f"request {request_id!r}",
                needed="an id that is not in use",
                found="a request with this id is running or was not collected yet",
                advice="choose another request_id, or collect the finished one first",
            )
        self._check_hashes(request)
        if request.use_structured_output:
            self.structured_output_manager.grammar_init(request)
        for observer in self._observers:
            observer.on_add(request)
        self.scheduler.add_request(request)
        self._flights.add(request)
        if getattr(request, "abort_immediately", False):
            # As EngineCore.add_request: a KV connector frees what it holds for the request.
            self.abort(request_id)
        return request_id

    def _check_hashes(self, request: Any) -> None:
        if self.block_hasher is None:
            return
        size = self._hash_block_size
        expected = max(0, request.num_tokens - self._hash_lookahead) // size
        # From 0.33 vLLM itself stays silent when hashes are missing, and simply never caches.
        if len(request.block_hashes) != expected:
            raise VllmCompatError(
                f"request {request.request_id!r} in a loop with prefix caching",
                needed=f"{expected} block hashes (one per {size} of its {request.num_tokens} tokens)",
                found=f"{len(request.block_hashes)} block hashes",
                advice="make it with make_request(…, scheduler=loop.scheduler), or let loop.add make it",
            )

    # -- stepping ---------------------------------------------------------------------------------------------------

    def has_unfinished(self) -> bool:
        """Whether requests are waiting or running, or ``step`` has something to return."""
        return bool(self._flights or self._ahead)

    def step(self) -> list[RequestUpdate]:
        """Schedule, execute, sample and update once; returns what it brought, per request.

        Finished requests are kept until ``collect`` or ``generate`` takes them.
        """
        self._check_open()
        if self._failed is not None:
            raise VllmCompatError(
                "a step of this loop",
                needed="a loop whose steps all came to their end",
                found=f"a step failed before ({type(self._failed).__name__}: {self._failed})",
                advice="shut it down and open a new one",
            )
        ahead, self._ahead = self._ahead, []
        # Finished ids still have to reach the workers: has_requests stays true for one step after the last finish.
        if not self.scheduler.has_requests():
            return ahead
        try:
            return ahead + self._step()
        except BaseException as error:
            # Scheduler and runner are now between two states: whatever came next would be wrong.
            self._failed = error
            raise

    def step_ahead(self) -> None:
        """A step that an observer needs; what it brings, the next ``step`` returns."""
        self._ahead = self.step()

    def _step(self) -> list[RequestUpdate]:
        scheduled = self.scheduler.schedule()
        output = self._stepping.run(self.executor, self.scheduler, scheduled)
        outputs = self._scheduling.outputs(self.scheduler, scheduled, output)
        updates = [self._outputs.read(o, self._flights.num_logprobs(o.request_id)) for o in outputs]
        if self.vllm_config.speculative_config is not None:
            self._flights.note_drafts(self._scheduler_outputs.read(scheduled), updates)
            if not self.vllm_config.scheduler_config.async_scheduling and scheduled.total_num_scheduled_tokens:
                self._stepping.update_drafts(self.executor, self.scheduler)
        for update in updates:
            finished = self._flights.take(update)
            if finished is not None:
                self._notify(finished)
        return updates

    def _notify(self, finished: FinishedRequest) -> None:
        for observer in self._observers:
            observer.on_finish(finished)

    # -- requests out -----------------------------------------------------------------------------------------------

    def collect(self) -> list[FinishedRequest]:
        """Finished requests that nobody has taken yet, in the order in which they finished.

        Those of a running ``generate`` are left to it.
        """
        return self._flights.collect()

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Stop requests and free their blocks; they finish with reason "abort". Unknown ids are ignored, as in vLLM."""
        self._end(request_ids, "FINISHED_ABORTED", "abort")

    def finish(self, request_ids: str | Iterable[str]) -> None:
        """Stop requests because what they brought is enough; they finish with reason "stop"."""
        self._end(request_ids, "FINISHED_STOPPED", "stop")

    def _end(self, request_ids: str | Iterable[str], status: str, reason: str) -> None:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        known = [request_id for request_id in ids if self._flights.is_flying(request_id)]
        if known:
            self._scheduling.finish_requests(self.scheduler, known, status)
        # All books first: an observer that fails must not leave requests that the scheduler has forgotten.
        for finished in [self._flights.settle(request_id, reason, None) for request_id in known]:
            self._notify(finished)

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Any,
        *,
        lora_request: Any = UNSET,
        max_in_flight: int | None = None,
    ) -> Iterator[FinishedRequest]:
        """Run prompts to the end; yields them in the order given, each as soon as it and all before it are done.

        Args:
            prompts: Taken lazily, ``max_in_flight`` at a time.
            sampling_params: One SamplingParams for all, or a sequence with one per prompt.
            lora_request: One LoRARequest for all, or a sequence with one, or None, per prompt.
            max_in_flight: Requests handed to the scheduler at once (default: twice ``max_num_seqs``, so that the batch
                stays full while finished ones are taken).

        Requests added by other calls go on beside these. If the caller stops early, the rest is aborted.

        Raises:
            VllmCompatError: a sequence of sampling params or LoRA requests is shorter or longer than the prompts. Those
            of ``add``.
        """
        limit = max_in_flight or 2 * self.vllm_config.scheduler_config.max_num_seqs
        promised, finished = self._flights.promised, self._flights.done
        options = [PerPrompt("sampling params", sampling_params), PerPrompt("LoRA requests", lora_request)]
        source = iter(prompts)
        order: list[str] = []
        exhausted = False
        try:
            while True:
                while not exhausted and len(order) < limit:
                    try:
                        prompt = next(source)
                    except StopIteration:
                        exhausted = True
                        for each in options:
                            each.end()
                        break
                    params, lora = (each.take() for each in options)
                    order.append(self.add(prompt, params, lora_request=UNSET if lora is None else lora))
                    promised.add(order[-1])
                while order and order[0] in finished:
                    promised.discard(order[0])
                    yield finished.pop(order.pop(0))
                if not order:
                    if exhausted:
                        break
                    continue
                if not self.scheduler.has_requests():
                    raise VllmCompatError(
                        f"the output of request {order[0]!r}",
                        needed="requests that end by themselves, or through abort and finish of the loop",
                        found="a scheduler that has no request left",
                        advice="call loop.abort or loop.finish instead of the scheduler's own methods",
                    )
                self.step()
        finally:
            self.abort(order)
            for request_id in order:
                promised.discard(request_id)
                finished.pop(request_id, None)
        if not self._flights:
            self.step()  # tells the workers which requests are gone; their states would linger

    # -- the rest ---------------------------------------------------------------------------------------------------

    def observe(self, observer: LoopObserver) -> None:
        """Call ``observer`` for every request from now on."""
        self._observers.append(observer)

    def unobserve(self, observer: LoopObserver) -> None:
        """Undo ``observe``."""
        self._observers.remove(observer)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every worker; results in rank order.

        Raises:
            VllmCompatError: the loop is shut down; or a worker refused (``errors.Refusal``). What the method raises, as
                it is from a worker in this process, as RuntimeError with its text from a worker process.
        """
        self._check_open()
        answers: list[Any] = adapter("executor").call_workers(self.executor, method, *args)
        for answer in answers:
            if isinstance(answer, Refusal):
                raise answer.error
        return answers

    def shutdown(self) -> None:
        """Abort what is running, stop the workers, free the KV cache. A second call does nothing.

        Each of these is done even if one before it fails; that error is raised at the end.
        """
        if self.executor is None:
            return
        with ExitStack() as steps:  # last in, first out
            steps.callback(self._release_process)
            steps.callback(setattr, self, "executor", None)
            steps.callback(self.scheduler.shutdown)
            steps.callback(self.executor.shutdown)
            steps.callback(self.structured_output_manager.clear_backend)
            steps.callback(self.abort, self._flights.ids())

    def __enter__(self) -> EngineLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _refuse_unserved(request: Any) -> None:
    """Refuse what vLLM's LLM does outside of EngineCore: here it would be left out without a word."""
    params = request.sampling_params
    if params is None:
        found, advice = "pooling params", "use vllm.LLM to pool; make_scheduler takes pooling requests too"
    elif params.n != 1:
        found, advice = f"n={params.n}", "add the prompt n times, with seeds of their own"
    elif params.stop:
        found, advice = f"stop={params.stop!r}", "use stop_token_ids; strings are matched by vLLM's detokenizer"
    elif getattr(request, "resumable", False):
        found, advice = "resumable=True", "add each turn as a request of its own"
    else:
        return
    raise VllmCompatError(
        f"request {request.request_id!r} in an EngineLoop",
        needed="one generation, ended by tokens or length",
        found=found,
        advice=advice,
    )
