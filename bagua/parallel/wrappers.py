"""Wrappers around a module: one that overlaps communication with the backward pass, and one that switches algorithms.

``bagua_init`` makes the latter: one call to start, and another algorithm whenever it is wanted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from typing_extensions import Self, Unpack

from bagua import engine
from bagua.algorithms import Algorithm, DistributedAlgorithm, GradientAllReduceAlgorithm, as_algorithm
from bagua.checks import check_flags
from bagua.engine import BucketType, Reducer, ReducerOptions, SwitchOptions
from bagua.errors import ConfigurationError

__all__ = ["DistributedModule", "ModelSwitchWrapper", "OverlappingWrapper", "bagua_init"]


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module


class DistributedModule(torch.nn.Module):
    """Base of wrappers: an ordinary module that runs another one.

    Its ``state_dict`` has the keys of the inner module, and a copy or a pickle of it is
    a copy or a pickle of the inner module.

    Args:
        module: the inner module.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> wrapper = DistributedModule(layer)
        >>> wrapper.unwrap() is layer, list(wrapper.state_dict())
        (True, ['weight', 'bias'])
    """

    def __init__(self, module: torch.nn.Module) -> None:
        engine.check_module(module)
        super().__init__()
        self.module = module
        # For the case that this wrapper is a submodule of a module whose load_state_dict is called.
        self.register_load_state_dict_pre_hook(_insert_prefix)  # type: ignore[no-untyped-call]

    def unwrap(self) -> torch.nn.Module:
        """The inner module."""
        return self.module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the inner module."""
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the inner module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the inner module."""
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _itself, (self.module,)


def _insert_prefix(_wrapper: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    inner = prefix + "module."
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]:
        state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)


class OverlappingWrapper(engine.EngineAccess, DistributedModule):
    """Runs a module, and exchanges its gradients while the backward pass is still going on.

    Building one is collective. It starts from the parameters that the module has;
    ``broadcast_parameters`` makes them equal.

    Args:
        module: the module to train.
        optimizers: one or several optimizers that step its parameters.
        delay_reduce: exchange everything at the end of backward instead.
        bucket_type: ``Weight`` chooses a decentralized algorithm.
        hierarchical_reduce: inside each host first, then between hosts.
        decentralize_reduce: choose a decentralized algorithm.
        parameter_manager: not supported.
        align_bytes: buckets are padded to a multiple of this power of two.
        chunking: choose a scatter-gather algorithm, and pad buckets so that they split
            evenly over the ranks.
        fusion: one flat storage for the gradients and one for the weights of each bucket.
        kwargs: keyword arguments of ``Reducer``.

    Raises:
        CollectiveMismatchError: the models or options of the ranks differ.
        ConfigurationError: an argument that cannot be used.

    Example:
        >>> import bagua.comm
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model = OverlappingWrapper(layer, [optimizer], process_group=bagua.comm.solo_group())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer,
        delay_reduce: bool = False,
        bucket_type: BucketType = BucketType.Gradient,
        hierarchical_reduce: bool = False,
        decentralize_reduce: bool = False,
        parameter_manager: None = None,
        align_bytes: int = 8,
        chunking: bool = False,
        fusion: bool = True,
        **kwargs: Unpack[ReducerOptions],
    ) -> None:
        super().__init__(module)
        if parameter_manager is not None:
            raise ConfigurationError(
                "parameter managers are not supported",
                argument="parameter_manager",
                expected=None,
                seen=type(parameter_manager).__name__,
            )
        reducer = Reducer(
            module,
            engine.optimizer_list(optimizers),
            bucket_type,
            hierarchical_reduce=hierarchical_reduce,
            align_bytes=align_bytes,
            chunking=chunking,
            fusion=fusion,
            decentralize_reduce=decentralize_reduce,
            delay_reduce=delay_reduce,
            **kwargs,
        )
        self._engine = engine.BackwardHooks(reducer)
        self.create_hooks()

    @property
    def _bagua_engine(self) -> engine.BackwardHooks:  # type: ignore[override]
        return self._engine

    @property
    def reducer(self) -> Reducer:
        """The bucket manager."""
        return self._engine.reducer

    def create_hooks(self) -> None:
        """Attach to the parameters and the optimizers. Done by the constructor; idempotent."""
        self._engine.create_hooks()

    def reset_reducer(
        self,
        hierarchical_reduce: bool | None = None,
        buckets: Sequence[Sequence[torch.Tensor | str]] | None = None,
        *,
        bucket_bytes: int | None = None,
    ) -> None:
        """Go on with other settings. Collective; what the algorithm remembers is carried over.

        Args:
            hierarchical_reduce: None leaves it as it is.
            buckets: lists of parameters or names; None forms buckets in the next backward pass.
            bucket_bytes: None leaves it as it is.
        """
        self.reducer.formation.reset(hierarchical_reduce, buckets, bucket_bytes)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the inner module, after everything that is owed to it was exchanged."""
        self.reducer.after_optimizers()
        return super().state_dict(*args, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        # Some trainers bring only the inner module back to training after an evaluation.
        self._engine.before_forward(self.module.training)
        output = self.module(*inputs, **kwargs)
        self._engine.after_forward(output)
        return output


Optimizers = TypeVar("Optimizers", bound=Sequence[torch.optim.Optimizer] | torch.optim.Optimizer)

#: Keyword arguments of ``ModelSwitchWrapper`` and ``bagua_init`` beside the documented ones.
_OPTIONS = tuple(sorted(SwitchOptions.__annotations__))
_DOCUMENTED = ("broadcast_buffers", "delay_reduce", "hierarchical_reduce", "intra_comm_root_rank", "message_size")


class ModelSwitchWrapper(engine.EngineAccess, DistributedModule):
    """A module that trains on many ranks, with an algorithm that can be changed during training.

    It does nothing before the first ``switch_to``. That gives all ranks rank 0's
    parameters, buffers and optimizer state; a later one averages what is floating-point
    over the ranks, and takes the rest from rank 0.

    Args:
        module: the module to train.
        optimizer: optimizer that steps its parameters; one or a list.
        broadcast_buffers: take the buffers, too, from rank 0 at the start: in ``switch_to``, where weights
            are taken, and not in the first forward pass, before which the two would not fit together.
        delay_reduce: exchange everything at the end of backward.
        hierarchical_reduce: inside each host first, then between hosts. None means False
            for gradient allreduce and True for other algorithms that can.
        message_size: a bucket is closed when it holds so many bytes.
        intra_comm_root_rank: the local rank that speaks for its host, on every host.
        kwargs: ``align_bytes``, ``chunking``, ``fusion``, ``buckets``,
            ``process_group``, ``bucket_bytes`` (another name of ``message_size``),
            ``find_unused_parameters``, ``grad_scaler``; see ``Reducer``.

    Raises:
        ConfigurationError: an argument that cannot be used; some are looked at by ``switch_to``.
        TypeError: an unknown keyword; the message names the known ones. (Options of an
            algorithm belong to its declaration: ``switch_to(SomeAlgorithm(option=...))``.)

    Example:
        >>> import bagua.comm
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model = ModelSwitchWrapper(layer, optimizer, process_group=bagua.comm.solo_group())
        >>> model = model.switch_to(DistributedAlgorithm.GradientAllReduce)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer,
        broadcast_buffers: bool = True,
        delay_reduce: bool = False,
        hierarchical_reduce: bool | None = None,
        message_size: int = engine.DEFAULT_BUCKET_BYTES,
        intra_comm_root_rank: int = 0,
        **kwargs: Unpack[SwitchOptions],
    ) -> None:
        super().__init__(module)
        _refuse_unknown(kwargs)
        check_flags(broadcast_buffers=broadcast_buffers, delay_reduce=delay_reduce)
        engine.check_optional_flag(hierarchical_reduce=hierarchical_reduce)
        self._optimizers = engine.optimizer_list(optimizer, "optimizer")
        self._broadcast_buffers = broadcast_buffers
        self._delay_reduce = delay_reduce
        self._hierarchical_reduce = hierarchical_reduce
        bucket_bytes = kwargs.get("bucket_bytes", message_size)
        if message_size not in (engine.DEFAULT_BUCKET_BYTES, bucket_bytes):
            raise ConfigurationError(
                "two arguments say how large buckets are",
                argument="bucket_bytes",
                expected="one of message_size and bucket_bytes",
                seen=f"{message_size} and {bucket_bytes}",
            )
        self._options: dict[str, Any] = {
            "bucket_bytes": engine.check_bucket_bytes(message_size, "message_size"),
            "intra_comm_root_rank": intra_comm_root_rank,
            **kwargs,
        }
        self._engine: engine.BackwardHooks | None = None

    def switch_to(self, distributed_algorithm: DistributedAlgorithm | Algorithm | str) -> Self:
        """Train with this algorithm from now on. Collective.

        Args:
            distributed_algorithm: a name, or a declaration with options of its own. It has no default, as documented:
                ``DistributedAlgorithm.GradientAllReduce`` is the usual one.

        Returns:
            The wrapper itself.

        Raises:
            UnsupportedAlgorithmException: there is no such algorithm; the one before stays.
            CollectiveMismatchError: the models or options of the ranks differ.
        """
        engine.refuse_in_join(self._engine)
        options = dict(self._options)
        group = options.pop("process_group", None)
        algorithm = _with_hierarchy(distributed_algorithm, self._hierarchical_reduce)
        checked = engine.EngineOptions(delay_reduce=self._delay_reduce, **options)
        reducer = Reducer.of(self.module, self._optimizers, algorithm, group, checked)
        average = self._engine is not None and not self._engine.closed
        self._engine = engine.replace_engine(self._engine, reducer)
        engine.begin_training(reducer, average=average, broadcast_buffers=self._broadcast_buffers)
        return self

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            ConfigurationError: a forward pass in training comes before the first ``switch_to``.
        """
        hooks = self._engine
        if hooks is None:
            if self.training and torch.is_grad_enabled():
                raise _no_algorithm()
            return self.module(*inputs, **kwargs)
        hooks.before_forward(self.training)
        output = self.module(*inputs, **kwargs)
        hooks.after_forward(output)
        return output

    @property
    def _bagua_engine(self) -> engine.BackwardHooks:  # type: ignore[override]
        if self._engine is None:
            raise _no_algorithm()
        return self._engine

    def bagua_close(self) -> None:
        """See ``EngineAccess``. Before the first ``switch_to`` there is nothing to give back."""
        if self._engine is not None:
            super().bagua_close()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the plain module, after everything that is owed to it was exchanged."""
        if self._engine is not None:
            self._engine.reducer.after_optimizers()
        return super().state_dict(*args, **kwargs)

    def report_metrics(self, score_record_list: Sequence[float]) -> None:
        """Note measured speeds of the setting in force, for ``ask_and_update_hyperparameters``.

        Args:
            score_record_list: samples per second, or any score where more is better, since the last call. The median
                of all that was reported since the last question counts.

        Raises:
            ConfigurationError: one of them is not a finite number.
        """
        self._bagua_engine.tuner.report(score_record_list)

    def ask_and_update_hyperparameters(self) -> bool:
        """Apply the setting that tuning tries next: a bucket size, and hierarchical or flat. Collective.

        Called on all ranks after the same step, between the optimizer's step and the next
        forward pass. The first call only begins; each later one is a sample of the setting in force. It changes
        nothing after the final choice, which rank 0 logs.

        Returns:
            Whether anything was changed.

        Raises:
            ConfigurationError: on all ranks, if some rank has reported nothing since it last asked.
            CollectiveMismatchError: on all ranks, if they ask at different steps.
            CollectiveTimeoutError: not all ranks ask.
        """
        return self._bagua_engine.tuner.ask()


def bagua_init(
    module: torch.nn.Module,
    optimizer: Optimizers,
    distributed_algorithm: DistributedAlgorithm | Algorithm | str = DistributedAlgorithm.GradientAllReduce,
    broadcast_buffers: bool = True,
    delay_reduce: bool = False,
    hierarchical_reduce: bool | None = None,
    message_size: int = engine.DEFAULT_BUCKET_BYTES,
    *,
    intra_comm_root_rank: int = 0,
    **kwargs: Unpack[SwitchOptions],
) -> tuple[ModelSwitchWrapper, Optimizers]:
    """Make a module and its optimizer train on all ranks. Collective.

    Args:
        module: the module to train.
        optimizer: optimizer that steps its parameters; one or a list.
        distributed_algorithm: a name, or a declaration with options of its own.
        broadcast_buffers: take the buffers, too, from rank 0 at the start.
        delay_reduce: exchange everything at the end of backward.
        hierarchical_reduce: see ``ModelSwitchWrapper``.
        message_size: a bucket is closed when it holds so many bytes.
        intra_comm_root_rank: see ``ModelSwitchWrapper``.
        kwargs: see ``ModelSwitchWrapper``.

    Returns:
        The wrapped module, and ``optimizer`` as it was given.

    Raises:
        UnsupportedAlgorithmException: there is no such algorithm.
        CollectiveMismatchError: the models or options of the ranks differ.
        TypeError: an unknown keyword; the message names the known ones.

    Example:
        >>> import bagua.torch_api as bagua
        >>> bagua.init_process_group()
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model, optimizer = bagua.bagua_init(layer, optimizer)
        >>> bagua.destroy_process_group()
    """
    _refuse_unknown(kwargs, distributed_algorithm)
    wrapper = ModelSwitchWrapper(
        module,
        optimizer,
        broadcast_buffers,
        delay_reduce,
        hierarchical_reduce,
        message_size,
        intra_comm_root_rank,
        **kwargs,
    )
    return wrapper.switch_to(distributed_algorithm), optimizer


def _refuse_unknown(given: Mapping[str, Any], algorithm: DistributedAlgorithm | Algorithm | str | None = None) -> None:
    known = sorted({*_DOCUMENTED, *_OPTIONS})
    engine.refuse_unknown({name: value for name, value in given.items() if name not in known}, known, algorithm)


def _with_hierarchy(algorithm: DistributedAlgorithm | Algorithm | str, hierarchical: bool | None) -> Algorithm:
    """The declaration, with the documented meaning of ``hierarchical_reduce``."""
    engine.check_optional_flag(hierarchical_reduce=hierarchical)
    declaration = as_algorithm(algorithm)
    able = declaration.is_hierarchical is not None
    if hierarchical is None and not isinstance(algorithm, Algorithm):
        hierarchical = able and not isinstance(declaration, GradientAllReduceAlgorithm)
    if hierarchical or (hierarchical is False and able):
        return declaration.in_form(hierarchical=hierarchical)
    return declaration


def _no_algorithm() -> ConfigurationError:
    return ConfigurationError(
        "no algorithm was chosen yet",
        argument="distributed_algorithm",
        expected="switch_to(algorithm) before training",
        advice="Call switch_to(DistributedAlgorithm.GradientAllReduce), or use bagua_init.",
    )
