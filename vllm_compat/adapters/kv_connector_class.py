"""What the base class of KV connectors adds to vLLM's own; ``adapters/kv_connector.py`` joins the two."""

from __future__ import annotations

import enum
import functools
import inspect
import logging
from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_compat.adapters.kv_connector_steps import Step
from vllm_compat.errors import VllmCompatError

if TYPE_CHECKING:
    from vllm_compat.adapters.kv_connector import KVConnector_0_31

logger = logging.getLogger(__name__)
_ALL_GROUPS, _ONE_GROUP = "request_finished_all_groups", "request_finished"


class ConnectorType(ABCMeta):
    """The class of connector classes: fits overrides to what vLLM calls, and sorts what its factory passes.

    ``inspect.signature`` of a connector class is that of ``__call__`` here. vLLM looks there for ``kv_cache_config``
    (from 0.21.0 on it refuses a class without), so a constructor of two arguments works in every release.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        compat = cls._compat  # type: ignore[attr-defined]
        for hook, written in list(_written(cls)):
            fitted = compat.fitted(hook, written)
            if fitted is not written:
                setattr(cls, hook, fitted)
        if inspect.getattr_static(cls, _ALL_GROUPS) is vars(ConnectorBase)[_ALL_GROUPS]:
            return
        compat.declare_hma(cls)
        writer = next(owner for owner in cls.__mro__ if {_ALL_GROUPS, _ONE_GROUP} & {*vars(owner)})
        if _ONE_GROUP not in vars(writer):
            # vLLM up to 0.11.0 knows only this one, and would find that of an older base.
            cls.request_finished = ConnectorBase.request_finished

    def __call__(cls, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> Any:
        values = arranged(vllm_config, role, kv_cache_config)
        try:
            inspect.signature(cls.__init__).bind(None, *values)  # type: ignore[misc]
        except TypeError:
            made = super().__call__(*values[:2])
            made.kv_cache_config = made._kv_cache_config = values[2]
        else:
            made = super().__call__(*values)
        return made


def _written(cls: type) -> Iterator[tuple[str, Any]]:
    """What a connector class has of its own and of mixins, which were not fitted when they were made."""
    seen: set[str] = set()
    for owner in cls.__mro__[: cls.__mro__.index(ConnectorBase)]:
        for name, value in vars(owner).items():
            if name not in seen and (owner is cls or not isinstance(owner, ConnectorType)):
                yield name, value
            seen.add(name)


def arranged(*values: Any) -> tuple[Any, Any, Any]:
    """(vllm_config, role, kv_cache_config) of values in any order, told apart by what they are."""
    role = next((value for value in values if isinstance(value, enum.Enum)), None)
    kv_cache_config = next((value for value in values if hasattr(value, "kv_cache_groups")), None)
    known = (role, kv_cache_config, None)
    vllm_config = next((value for value in values if not any(value is other for other in known)), None)
    return vllm_config, role, kv_cache_config


def tolerant(override: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
    """``override``, given no more than it takes when the method it overrides takes more.

    vLLM appends parameters to its methods, and passes keywords where a method has ``**kwargs`` (``start_load_kv`` of
    the V2 runner from 0.30.0 on). Only what follows the override's own parameters is dropped; one with other names is
    left alone, so that a call which does not fit stays a TypeError.
    """
    ours, theirs = (inspect.signature(function).parameters.values() for function in (override, native))
    kinds = inspect.Parameter
    positional = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    our_names = [p.name for p in ours if p.kind in positional]
    their_names = [p.name for p in theirs if p.kind in positional]
    any_position = any(p.kind is kinds.VAR_POSITIONAL for p in ours)
    any_keyword = any(p.kind is kinds.VAR_KEYWORD for p in ours)
    more = len(their_names) > len(our_names) and not any_position
    named = any(p.kind in (kinds.VAR_KEYWORD, kinds.KEYWORD_ONLY) for p in theirs) and not any_keyword
    shared = min(len(our_names), len(their_names))
    if our_names[1:shared] != their_names[1:shared] or not (more or named):
        return override
    limit = None if any_position else len(our_names)
    keywords = {p.name for p in ours if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}

    @functools.wraps(override)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = kwargs if any_keyword else {name: value for name, value in kwargs.items() if name in keywords}
        return override(*args[:limit], **given)

    return call


_warned: set[type] = set()


class ConnectorBase:
    """Base class of KV connectors: subclass it once, for every vLLM release from 0.10.2 on.

    It is a subclass of vLLM's ``KVConnectorBase_V1``, whose seven abstract methods a subclass has to write:
    ``get_num_new_matched_tokens``, ``update_state_after_alloc`` and ``build_connector_meta`` run beside the scheduler,
    ``start_load_kv``, ``wait_for_layer_load``, ``save_kv_layer`` and ``wait_for_save`` in the workers. vLLM's other
    methods may be overridden as documented there. What is the same in every release here, and is not in vLLM:

    - the constructor: ``(vllm_config, role, kv_cache_config=None)``;
    - ``request_finished_all_groups``, whether or not the hybrid KV cache manager is on; a subclass that overrides it is
      declared to vLLM as one that supports it (``SupportsHMA``, 0.11.1);
    - ``handle_preemptions`` is called with every step's metadata (vLLM itself: from 0.19.0 on), and ``wait_for_save``
      in every step, before ``get_finished`` where there is no forward pass (vLLM itself: from 0.31.0 on);
    - overrides may take fewer arguments than vLLM passes.

    Attributes:
        vllm_config: The VllmConfig.
        kv_transfer_config: Its KVTransferConfig; ``get_from_extra_config(key, default)`` reads what the user set.
        kv_cache_config: The KVCacheConfig; None up to 0.11.0, which does not tell connectors.

    Raises:
        SignatureMismatch: (on subclassing) the installed vLLM's base class fits no adapter.
    """

    _compat: ClassVar[KVConnector_0_31]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        if vllm_config.kv_transfer_config is None:
            raise VllmCompatError(
                f"a {type(self).__name__}",
                needed="a vllm_config with a kv_transfer_config",
                found="kv_transfer_config=None",
                advice="make_vllm_config(…, kv_transfer_config=make_kv_transfer_config(…))",
            )
        given = {"vllm_config": vllm_config, "role": role, "kv_cache_config": kv_cache_config}
        super().__init__(**{name: given[name] for name in self._compat.base.passes})
        self.vllm_config = vllm_config
        # The private names are vLLM's own; up to 0.11.0 it does not set the last two.
        self.kv_transfer_config = self._kv_transfer_config = vllm_config.kv_transfer_config
        self.kv_cache_config = self._kv_cache_config = kv_cache_config
        self._compat_step = Step()
        uncalled = self.uncalled_hooks()
        if uncalled and type(self) not in _warned:
            _warned.add(type(self))
            logger.warning("%s overrides %s, which this vLLM never calls", type(self).__name__, ", ".join(uncalled))

    @classmethod
    def uncalled_hooks(cls) -> tuple[str, ...]:
        """The methods that this class overrides and the installed vLLM never calls, being older or newer than they.

        The first connector made warns of them. Check it where doing without one would be wrong, e.g.
        ``get_block_ids_with_load_errors`` (0.11.1).
        """
        return cls._compat.uncalled(cls)

    def by_block(self, kv_layer: Any) -> Any:
        """A view of one layer's KV cache with the blocks first: ``by_block(kv_layer)[block_ids]`` reads and writes.

        Args:
            kv_layer: Tensor from ``register_kv_caches`` or ``save_kv_layer``. Where its blocks are depends on the
                release and the attention backend ([2, B, N, H, D], [B, 2, N, H, D], [B, N, C] with MLA, [B, H, N, C]
                from 0.29.0 on); what one block has inside, too.

        Raises:
            VllmCompatError: no dimension of it is as long as the cache has blocks.
        """
        known = self.kv_cache_config
        count = known.num_blocks if known is not None else self.vllm_config.cache_config.num_gpu_blocks
        shape = tuple(kv_layer.shape)
        if count not in shape:
            raise VllmCompatError(
                "the blocks of a layer's KV cache",
                needed=f"a dimension of {count}, the number of blocks",
                found=f"the shape {shape}",
                advice="index this layer by what its attention backend says",
            )
        return kv_layer.movedim(shape.index(count), 0)

    def group_of(self, layer_name: str) -> int:
        """Which of the lists of block ids is a layer's: the index of its KV cache group (up to 0.11.0 there is one)."""
        groups = () if self.kv_cache_config is None else self.kv_cache_config.kv_cache_groups
        return next((index for index, group in enumerate(groups) if layer_name in group.layer_names), 0)

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ARG002 - of those that override it
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called once when a request has finished, before its blocks are freed. Override this one.

        Args:
            request: vLLM's Request.
            block_ids: Its block ids, a list per KV cache group.

        Returns:
            (True to keep the blocks until ``get_finished`` of all workers has reported the request as sent,
            ``kv_transfer_params`` for the request's output or None).
        """
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """What vLLM calls for a connector that does not support several groups; ends in the method above.

        A subclass that overrides this one only is not declared to support the hybrid KV cache manager.
        """
        return self.request_finished_all_groups(request, (block_ids,))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Called by the model runner before each step."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        self._compat.bound(self, connector_metadata)

    def clear_connector_metadata(self) -> None:
        """Called by the model runner after each step."""
        self._compat.unbound(self)
        super().clear_connector_metadata()  # type: ignore[misc]
