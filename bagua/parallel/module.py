"""``module.with_bagua(...)``: the engine on the user's own module, which stays what it is.

Then a wrapped model as one of several islands: what a newcomer receives, and what must be equal on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import Never

from bagua import engine
from bagua.algorithms import Algorithm, DistributedAlgorithm, OverIslands, as_algorithm
from bagua.checks import check_flags, check_kind
from bagua.comm import Group, ProcessGroup, as_group, get_default_group, is_initialized, solo_group
from bagua.errors import ConfigurationError, InvalidTypeError
from bagua.membership import Islands
from bagua.parallel.wrappers import DistributedModule
from bagua.torch_private import do_not_compile

__all__ = ["BaguaModule", "install_with_bagua", "unwrap", "with_bagua"]

_log = logging.getLogger("bagua")

AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)

#: Where a module keeps its engine: in its ``__dict__``, so that ``_modules`` does not see it.
_ENGINE = "_bagua_engine"


class _Wrapped(type):
    """Class of ``BaguaModule``: its instances are modules of any class that have an engine."""

    def __instancecheck__(cls, instance: object) -> bool:
        return _ENGINE in getattr(instance, "__dict__", ())


class BaguaModule(engine.EngineAccess, torch.nn.Module, metaclass=_Wrapped):
    """What a module becomes through ``with_bagua``: the same object, of the same class, with an engine.

    A wrapped module answers to the names below. Those that begin with ``bagua_`` are its own; ``no_sync``, ``join`` and
    ``require_backward_grad_sync`` are those of PyTorch's DDP, and stay the user's where the module has them already.
    Copies and pickles of it are plain modules.

    Example:
        >>> import copy
        >>> import bagua.comm
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model = with_bagua(layer, [optimizer], "gradient_allreduce", bagua.comm.solo_group())
        >>> model is layer, type(model) is torch.nn.Linear, isinstance(model, BaguaModule)
        (True, True, True)
        >>> isinstance(copy.deepcopy(model), BaguaModule)
        False
    """

    #: Whether the backward pass of the next forward pass is a step: the switch of PyTorch's DDP.
    require_backward_grad_sync: bool


class _OfWrapped:
    """A name of ``EngineAccess`` on every module. Without an engine a property is None, and a method raises.

    It is always there, since tools read all names that ``dir`` lists.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._what: Any = vars(engine.EngineAccess)[name]

    def __get__(self, module: torch.nn.Module | None, kind: type) -> Any:
        if module is None:
            return self
        if _ENGINE in module.__dict__:
            return self._what.__get__(module, kind)
        try:  # As ``torch.compile``, a module may hand names on to the one inside.
            return type(module).__getattr__(module, self._name)
        except AttributeError:
            return None if isinstance(self._what, property) else partial(_refuse_plain, self._name, module)


def _refuse_plain(name: str, module: torch.nn.Module, *_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(
        f"{name} is a call of a wrapped module",
        argument="model",
        expected="what with_bagua returned",
        seen=f"a {type(module).__name__} without an engine",
        advice="Wrap it first, or call this on the model that was wrapped; copies of it are plain modules.",
    )


# The hooks on a wrapped module. A shallow copy of it has the same hooks, so they look for the engine.


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    if not torch.compiler.is_exporting():
        module.__dict__[_ENGINE].before_forward(module.training)


def _after_forward(module: torch.nn.Module, _: Any, output: Any) -> None:
    if not torch.compiler.is_exporting():
        module.__dict__[_ENGINE].after_forward(output)


def _before_state_dict(module: torch.nn.Module, *_: Any) -> None:
    """Exchange everything that is owed to the weights before they are saved."""
    module.__dict__[_ENGINE].reducer.after_optimizers()


do_not_compile(_before_forward, _after_forward)


def _listen(wrapping: engine.Wrapping, handles: list[RemovableHandle], on: bool) -> None:
    """Have forward passes told of, or no longer: torch calls a module without hooks some 25 us faster."""
    while handles:
        handles.pop().remove()
    if on:
        module = wrapping.module
        handles.append(module.register_forward_pre_hook(_before_forward, prepend=True))
        handles.append(module.register_forward_hook(_after_forward, prepend=True))
        wrapping.add(handles)


def _put_on(module: torch.nn.Module, hooks: engine.BackwardHooks) -> None:
    """Give ``module`` its engine; the first time, hooks and names as well."""
    wrapping = engine.Wrapping.to(module)
    known = isinstance(module, BaguaModule)
    before: engine.BackwardHooks | None = module.__dict__.get(_ENGINE)
    wrapping.add(names={_ENGINE: hooks})
    if known and before is not None:
        hooks.listen = before.listen
        return
    for name in vars(engine.EngineAccess):  # Wrapped modules answer to those that cannot be the user's.
        if name.startswith("bagua_") and name not in vars(torch.nn.Module):
            setattr(torch.nn.Module, name, _OfWrapped(name))
    hooks.listen = partial(_listen, wrapping, [])
    hooks.listen(True)
    handles = [module.register_state_dict_pre_hook(_before_state_dict)]  # type: ignore[no-untyped-call]
    if not hasattr(module, engine.SWITCH):
        setattr(module, engine.SWITCH, True)
    of_ddp = [name for name in ("no_sync", "join") if not hasattr(module, name)]
    wrapping.add(handles, {name: MethodType(vars(engine.EngineAccess)[name], module) for name in of_ddp})


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The plain module behind ``model``: weights, buffers and submodules are the same objects, without the engine.

    Args:
        model: model that ``with_bagua``, ``bagua_init`` or ``DistributedDataParallel`` returned; a plain module is
            returned as it is.

    Example:
        >>> import bagua.comm
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model = with_bagua(layer, [optimizer], "gradient_allreduce", bagua.comm.solo_group())
        >>> plain = unwrap(model)
        >>> plain.weight is model.weight, isinstance(plain, BaguaModule)
        (True, False)
    """
    engine.check_module(model, "model")
    if isinstance(model, DistributedModule):
        return model.unwrap()
    if not isinstance(model, BaguaModule):
        return model
    return engine.Wrapping.to(model).twin()


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
    bucket_bytes: int = engine.DEFAULT_BUCKET_BYTES,
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
        The module itself, which ``BaguaModule`` describes.

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
    engine.refuse_unknown(unknown, with_bagua.__kwdefaults__ or (), algorithm)
    _refuse_other_order(self, optimizers)
    engine.check_module(self, "model")
    check_flags(do_flatten=do_flatten, broadcast_buffers=broadcast_buffers, elastic=elastic)
    if isinstance(self, torch.jit.ScriptModule):
        raise ConfigurationError(
            "a scripted module cannot be changed in place",
            argument="model",
            expected="an ordinary module",
            seen=type(self).__name__,
            advice="Use DistributedDataParallel, or torch.compile in place of torch.jit.",
        )
    options = engine.EngineOptions(
        bucket_bytes=bucket_bytes,
        align_bytes=align_bytes,
        fusion=do_flatten,
        find_unused_parameters=find_unused_parameters,
        delay_reduce=delay_reduce,
        grad_scaler=grad_scaler,
        check_every=check_every,
    )
    group, over = group_of_island(process_group, between), over_islands(algorithm, between, elastic=elastic)
    before: engine.BackwardHooks | None = self.__dict__.get(_ENGINE)
    if before is not None and not before.closed and isinstance(before.reducer.formation.declaration, OverIslands):
        raise ConfigurationError(
            "this model trains between islands",
            argument="algorithm",
            expected="the one that all islands have agreed on",
            seen="another one, or the same once more",
            advice="Leave the islands and call bagua_close() first.",
        )
    engine.refuse_in_join(before)
    reducer = engine.Reducer.of(self, optimizers, over, group, options)
    average = before is not None and not before.closed
    hooks = engine.replace_engine(before, reducer)
    declared = reducer.formation.declaration
    again = before is not None and average and before.reducer.formation.declaration == declared
    if again and reducer.group.rank == 0:
        _log.warning(
            "this model was wrapped with %r before, and is wrapped with it again, which averages the weights over all "
            "ranks. Wrap it once; with another algorithm, wrapping again switches to that.",
            declared,
        )
    engine.begin_training(reducer, average=average, broadcast_buffers=broadcast_buffers)
    _put_on(self, hooks)
    come_in(hooks, between)
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


def install_with_bagua() -> None:
    """Make ``with_bagua`` a method of every module. Called by the import of ``bagua.torch_api``, as documented."""
    torch.nn.Module.with_bagua = with_bagua  # type: ignore[attr-defined]


#: What belongs to one island stays there, as what its own codec has lost.
_NOTHING_OF_ITS_OWN: dict[str, Any] = {"parameters": {}, "others": [], "flights": []}


def over_islands(
    algorithm: Algorithm | DistributedAlgorithm | str, islands: Islands | None, *, elastic: bool
) -> Algorithm | DistributedAlgorithm | str:
    """``algorithm`` between ``islands``, if there are any; ``elastic`` lets gradients be exchanged between them.

    Raises:
        ConfigurationError: it cannot run there.
    """
    if islands is None and not elastic:
        return algorithm
    if islands is None:
        raise ConfigurationError(
            "only islands come and go",
            argument="elastic",
            expected="False without between=islands",
            seen=elastic,
            advice="Pass what join_islands returned as between=.",
        )
    check_kind(Islands, "what join_islands returned, or None", between=islands)
    return OverIslands(as_algorithm(algorithm), islands, elastic)


def group_of_island(process_group: Group | None, islands: Islands | None) -> Group | None:
    """The ranks of this island: those that joined, or this process alone.

    Raises:
        ConfigurationError: ``process_group`` has other ranks.
    """
    if islands is None:
        return process_group
    if process_group is None and not is_initialized():
        return solo_group()
    group: ProcessGroup = get_default_group() if process_group is None else as_group(process_group, "process_group")
    here = islands.ranks or (group.ranks[group.rank],)
    if group.ranks != here:
        raise ConfigurationError(
            "the ranks of this island are those that joined",
            argument="process_group",
            expected=f"a group of rank{'s' if len(here) > 1 else ''} {', '.join(map(str, here))}",
            seen=repr(group),
            advice="Call join_islands on all ranks, with the same process_group as here.",
        )
    return group


class HasState(Protocol):
    """What gives its state away and takes that of another, as an optimizer does."""

    def state_dict(self) -> dict[str, Any]:
        """The state, made of numbers, strings, tensors and containers of these."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace it."""


def come_in(hooks: engine.BackwardHooks, islands: Islands | None, optimizers: Sequence[HasState] | None = None) -> None:
    """Come in with the model of ``hooks``: wait until this process takes part, and has the state of the others.

    Args:
        hooks: hooks of the engine of the model.
        islands: islands that it comes into; None for none.
        optimizers: optimizers whose state a newcomer receives; None for those of the engine.
    """
    if islands is None:
        return
    state = _State(hooks.reducer, hooks.reducer.optimizers if optimizers is None else optimizers)
    try:
        exchanges = hooks.reducer.formation.declaration.every_exchange()
        early = not any("gradients" in one.needs for one in exchanges)
        islands.bind(hooks.reducer.formation.facts, state, early=early)
        hooks.reducer.after_failure = islands.save_if_lost
        gauges = hooks.reducer.group.gauges
        gauges.update(islands.metrics())
        islands.on_change(lambda *_: gauges.update(islands.metrics()))
    except BaseException:
        hooks.close()
        raise


class _State:
    """All that a newcomer receives: weights, buffers, optimizers, and what the algorithm remembers."""

    def __init__(self, reducer: engine.Reducer, optimizers: Sequence[HasState]) -> None:
        self._reducer = reducer
        self._optimizers = optimizers

    def give(self) -> dict[str, Any]:
        """The state between two steps: tensors as they are, which change with the next step or exchange."""
        reducer = self._reducer
        remembered = reducer.state_dict(copy=False)
        return {
            "tensors": {name: tensor.detach() for name, tensor in _tensors(reducer.module).items()},
            "optimizers": [engine.sendable(optimizer.state_dict()) for optimizer in self._optimizers],
            "engine": {**remembered, engine.name_of_rank(remembered["rank"]): _NOTHING_OF_ITS_OWN},
        }

    def step(self) -> int:
        """Number of the last step."""
        return self._reducer.step

    def take(self, state: Mapping[str, Any], step: int) -> None:
        """Replace all of it before training begins, after step number ``step``; -1 for the one of the state."""
        reducer = self._reducer
        here = _tensors(reducer.module)
        with torch.no_grad():
            for name, tensor in state["tensors"].items():
                here[name].copy_(tensor)
        for optimizer, found in zip(self._optimizers, state["optimizers"], strict=True):
            if isinstance(optimizer, torch.optim.Optimizer):
                engine.take_state(optimizer, found)
            else:
                optimizer.load_state_dict(found)
        remembered = state["engine"]
        reducer.load_state_dict({**remembered, "step": max(step, remembered["step"])})


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
