"""``module.with_bagua(...)``: the engine on the user's own module, which stays what it is."""

from __future__ import annotations

import copy
import copyreg
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from typing_extensions import Never, Self

from bagua.algorithms import Algorithm, DistributedAlgorithm
from bagua.checks import check_flags
from bagua.comm import Group
from bagua.engine import (
    DEFAULT_BUCKET_BYTES,
    BackwardHooks,
    EngineAccess,
    EngineOptions,
    Reducer,
    begin_training,
    check_module,
    refuse_in_join,
    refuse_unknown,
    replace_engine,
)
from bagua.errors import ConfigurationError, InvalidTypeError
from bagua.membership import Islands
from bagua.parallel.islands import come_in, group_of_island, over_islands, refuse_to_switch

_log = logging.getLogger("bagua")

AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)

#: Where a module keeps its engine: in its ``__dict__``, so that neither ``_modules`` nor copies see it.
_ENGINE = "_bagua_engine"


class BaguaModule(EngineAccess, torch.nn.Module):
    """What a module becomes through ``with_bagua``: an instance of its own class and of this one.

    It is the same object with the same submodules, parameter names and attributes. Copies
    and pickles of it are plain modules.

    Example:
        >>> import bagua.comm
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model = with_bagua(layer, [optimizer], "gradient_allreduce", bagua.comm.solo_group())
        >>> model is layer, isinstance(model, BaguaModule), isinstance(model, torch.nn.Linear)
        (True, True, True)
        >>> type(copy.deepcopy(model)) is torch.nn.Linear
        True
    """

    _bagua_plain_class: ClassVar[type[torch.nn.Module]]

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and let the engine follow."""
        engine = self._bagua_engine
        engine.before_forward(self.training)
        output = super().__call__(*inputs, **kwargs)
        engine.after_forward(output)
        return output

    def switch_to(self, algorithm: Algorithm | DistributedAlgorithm | str) -> Self:
        """Train with this algorithm from now on, with the same optimizers and options. Collective.

        Floating-point parameters, buffers and optimizer state are averaged over the ranks, the rest comes from rank 0.

        Args:
            algorithm: its name, or a declaration with options.

        Returns:
            The module itself.

        Raises:
            UnsupportedAlgorithmException: there is no such algorithm; the one before stays.
            CollectiveMismatchError: ranks ask for different ones.
        """
        reducer = self._bagua_engine.reducer
        group = reducer.algorithm.process_group
        _start(self, reducer.optimizers, algorithm, group, reducer.options, broadcast_buffers=True)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the module, after everything that is owed to it was exchanged."""
        self._bagua_engine.reducer.after_optimizers()
        return super().state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = _plain_twin(self).__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle compares this class with the one of the pickled object, which is another.
            function = copyreg._reconstructor  # type: ignore[attr-defined]  # noqa: SLF001 - what protocol 1 names
            arguments = (arguments[0], object, None)
        return function, arguments, *rest


def _plain_twin(module: BaguaModule) -> torch.nn.Module:
    """A plain module with the same contents: not a copy, it shares everything but the engine."""
    twin = object.__new__(type(module)._bagua_plain_class)  # noqa: SLF001 - ours
    twin.__dict__.update({name: value for name, value in module.__dict__.items() if name != _ENGINE})
    return twin


def _deepcopy_plain(module: BaguaModule, memo: dict[int, Any]) -> torch.nn.Module:
    return copy.deepcopy(_plain_twin(module), memo)


def _own_join(module: torch.nn.Module) -> Any:
    return vars(module)["join"] if "join" in vars(module) else torch.nn.Module.__getattr__(module, "join")


def _bagua_class(plain: type[torch.nn.Module], *, has_join: bool) -> type[torch.nn.Module]:
    """A class that is both ``BaguaModule`` and ``plain``, and looks like ``plain``. One for each ``plain``.

    Args:
        plain: class of the module.
        has_join: the module has something else of that name, which it keeps.
    """
    for kind in plain.__subclasses__():
        if kind.__dict__.get("_bagua_plain_class") is plain and ("join" in kind.__dict__) == has_join:
            return kind
    body: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_bagua_plain_class": plain,
    }
    if has_join:
        body["join"] = vars(plain).get("join", getattr(plain, "join", property(_own_join)))
    if hasattr(plain, "__deepcopy__"):  # It would be given the engine, too.
        body["__deepcopy__"] = _deepcopy_plain
    metaclass: Any = type(plain)
    made: type[torch.nn.Module] = metaclass(plain.__name__, (BaguaModule, plain), body)
    return made


def with_bagua(
    self: AnyModule,
    optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer,
    algorithm: Algorithm | DistributedAlgorithm | str = "gradient_allreduce",
    process_group: Group | None = None,
    do_flatten: bool = True,
    *,
    broadcast_buffers: bool = True,
    delay_reduce: bool = False,
    align_bytes: int = 8,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    find_unused_parameters: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
    check_every: int | None = None,
    between: Islands | None = None,
    elastic: bool = False,
    **unknown: Never,
) -> AnyModule:
    """Make this module a distributed one, in place. Collective.

    The first time, all ranks start from rank 0's parameters, buffers and optimizer state.
    Calling it again changes the algorithm; floating-point state is then averaged over
    the ranks, and the rest taken from rank 0.

    Args:
        self: the module.
        optimizers: optimizers that step its parameters.
        algorithm: algorithm that says what is exchanged, and when: its name, or a declaration with options.
        process_group: the ranks that train together; None means all.
        do_flatten: gradients and weights of a bucket live in flat memory, parameters are views of it.
        broadcast_buffers: take the buffers, too, from rank 0 at the start.
        delay_reduce: exchange everything at the end of backward.
        align_bytes: buckets are padded to a multiple of this power of two.
        bucket_bytes: a bucket is closed when it holds so many bytes.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it
            is an error.
        grad_scaler: the ``GradScaler`` of the training loop, if there is one.
        check_every: compare what must be equal on all ranks in the first step, in the second one if ranks hold equal
            weights, and then after so many; 0 for the first step alone; None for 100 where ranks hold equal weights,
            and what suits the algorithm elsewhere.
        between: islands that ``join_islands`` returned: this island trains with others that come and go, by
            ``diloco``, ``local_sgd`` or ``slowmo``; its ranks exchange gradients in each step. Waits until it takes
            part; a newcomer starts from the state of the others.
        elastic: with ``between``: algorithms that sum gradients, as ``gradient_allreduce``, may do so between islands
            in each step, all at once when the backward pass ends. Islands come and go between steps.
        unknown: anything else is a ``TypeError`` that names the above.

    Returns:
        The module itself, now also a ``BaguaModule``.

    Raises:
        CollectiveMismatchError: the models or options of the ranks differ.
        UnsupportedAlgorithmException: there is no such algorithm.
        ConfigurationError: an argument or a module that cannot be used.

    Example:
        >>> import bagua.torch_api as bagua
        >>> bagua.init_process_group()
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model = layer.with_bagua([optimizer], bagua.algorithms.Algorithm.init("gradient_allreduce"))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> bagua.destroy_process_group()
    """
    refuse_unknown(unknown, with_bagua.__kwdefaults__ or (), algorithm)
    _refuse_other_order(self, optimizers)
    check_module(self, "model")
    check_flags(do_flatten=do_flatten, broadcast_buffers=broadcast_buffers, elastic=elastic)
    if isinstance(self, torch.jit.ScriptModule):
        raise ConfigurationError(
            "a scripted module cannot be changed in place",
            argument="model",
            expected="an ordinary module",
            seen=type(self).__name__,
            advice="Use DistributedDataParallel, or torch.compile in place of torch.jit.",
        )
    options = EngineOptions(
        bucket_bytes=bucket_bytes,
        align_bytes=align_bytes,
        fusion=do_flatten,
        find_unused_parameters=find_unused_parameters,
        delay_reduce=delay_reduce,
        grad_scaler=grad_scaler,
        check_every=check_every,
    )
    group, over = group_of_island(process_group, between), over_islands(algorithm, between, elastic=elastic)
    come_in(_start(self, optimizers, over, group, options, broadcast_buffers=broadcast_buffers, warn=True), between)
    plain: torch.nn.Module = self
    if not isinstance(plain, BaguaModule):
        plain.__class__ = _bagua_class(type(plain), has_join=hasattr(plain, "join"))
    return self


def _refuse_other_order(model: object, optimizers: object) -> None:
    """Models, optimizers and algorithms that stand in each other's places."""
    if isinstance(optimizers, torch.nn.Module) and not isinstance(model, torch.nn.Module):
        problem = "the first two arguments are swapped"
    elif isinstance(optimizers, torch.nn.Module | Algorithm | DistributedAlgorithm | str):
        problem = "the second argument is no optimizer"
    else:
        return
    raise InvalidTypeError(
        problem,
        argument="optimizers",
        expected="the model first, then its optimizers, then the algorithm",
        seen=f"{type(model).__name__}, then {type(optimizers).__name__}",
        advice="Call with_bagua(model, optimizer, 'gradient_allreduce'), or model.with_bagua(optimizer).",
    )


def _start(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer,
    algorithm: Algorithm | DistributedAlgorithm | str,
    process_group: Group | None,
    options: EngineOptions,
    *,
    broadcast_buffers: bool,
    warn: bool = False,
) -> BackwardHooks:
    """Put an engine on ``module``, after the one before it, if there is one, has ended. Collective."""
    before: BackwardHooks | None = module.__dict__.get(_ENGINE)
    refuse_to_switch(before)
    refuse_in_join(before)
    reducer = Reducer.of(module, optimizers, algorithm, process_group, options)
    average = before is not None and not before.closed
    engine = replace_engine(before, reducer)
    declared = reducer.formation.declaration
    if warn and before is not None and average and before.reducer.formation.declaration == declared:
        _warn_of_repetition(reducer)
    begin_training(reducer, average=average, broadcast_buffers=broadcast_buffers)
    module.__dict__[_ENGINE] = engine
    return engine


def _warn_of_repetition(reducer: Reducer) -> None:
    if reducer.group.rank == 0:
        _log.warning(
            "this model was wrapped with %r before, and is wrapped with it again, which averages the weights over all "
            "ranks. Wrap it once; with another algorithm, wrapping again switches to that.",
            reducer.formation.declaration,
        )


def install_with_bagua() -> None:
    """Make ``with_bagua`` a method of every module. Called by the import of ``bagua.torch_api``, as documented."""
    torch.nn.Module.with_bagua = with_bagua  # type: ignore[attr-defined]
