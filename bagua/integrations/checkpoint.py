"""Checkpoints of ``torch.distributed.checkpoint``: what ranks have in common once, the rest by rank."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from bagua.checks import check_kind
from bagua.engine import EngineAccess, check_saved_state, name_of_rank
from bagua.errors import ConfigurationError
from bagua.parallel import BaguaModule

__all__ = ["load_training_state", "training_state"]

_SHARED = "shared"
_NOTHING_OF_ITS_OWN: dict[str, Any] = {"parameters": {}, "others": [], "flights": []}
Parameters = dict[str, torch.nn.Parameter]


def training_state(model: Any) -> dict[str, Any]:
    """All that training goes on from, as ``dcp.save`` takes it: weights, optimizers and what the algorithm remembers.

    Under ``shared`` stands what is equal on all ranks, under ``rank0``, ``rank1``, ... what is one rank's own, weights
    and optimizers where they differ. Shards are saved as shards. Collective: what is owed to other ranks is exchanged
    first. Exchanges under way are saved with it.

    Args:
        model: model that ``with_bagua``, ``DistributedDataParallel`` or ``exchange_shards`` returned.

    Returns:
        Text and tensors, in dictionaries. Save it under a key: ``dcp.save({"training": training_state(model)}, ...)``.

    Raises:
        ConfigurationError: something that cannot be saved, as an object in the state of an optimizer.
    """
    engine = _checked(model)
    remembered, parameters = engine.bagua_state_dict(), _parameters_of(engine)
    rank = name_of_rank(remembered["rank"])
    of_model = {
        "model": dict(_module_of(engine).state_dict()),
        "optimizers": [_by_name(one, parameters) for one in engine.bagua_optimizers],
    }
    shared: dict[str, Any] = {"algorithm": {k: v for k, v in remembered.items() if k not in ("rank", rank)}}
    own: dict[str, Any] = {"algorithm": remembered[rank]}
    sharded = any(isinstance(one, DTensor) for one in parameters.values())
    # State of flat memory as a whole cannot be told by parameter, so torch would take that of any shard for all.
    for other in [*remembered["others"], *own["algorithm"]["others"]] if sharded else ():
        for key, tensor in other["state"].items():
            if tensor.numel() > 1:
                raise ConfigurationError(
                    f"the state {key} does not belong to single parameters, and cannot be saved with shards",
                    argument="model",
                    expected="an algorithm that remembers something of each parameter, as diloco",
                    seen=f"a tensor of {tensor.numel()} elements",
                    advice="Save bagua_state_dict() of each rank in a file of its own.",
                )
    (own if engine.bagua_algorithm.options.ranks_differ else shared).update(of_model)
    return {_SHARED: _packed(shared, parameters), rank: _packed(own, parameters)}


def load_training_state(model: Any, checkpoint_id: Any, *, key: str = "training", **options: Any) -> None:
    """Go on from what ``training_state`` returned and ``dcp.save`` saved. Collective.

    On as many ranks as saved it, training goes on bit by bit, also where an exchange was under way. On another number
    of ranks, what all ranks had in common goes on, as the anchor of ``diloco`` after its last outer step; weights and
    optimizers are those of rank 0, where ranks differed. Models may be sharded in another way than before.

    Args:
        model: wrapped as it was, with the same optimizers, on any number of ranks.
        checkpoint_id: identifier that ``dcp.save`` was given, a folder for example.
        key: under which the state was saved.
        options: for ``dcp.load``, as ``storage_reader`` and ``process_group``.

    Raises:
        ConfigurationError: it belongs to another algorithm or model, or to other optimizers. Nothing was loaded.
        RuntimeError: torch's: the model has other parts, as buffers.
        CheckpointException: torch's: there is nothing under ``key``.
    """
    engine = _checked(model)
    reducer, parameters = engine._bagua_engine.reducer, _parameters_of(engine)  # noqa: SLF001 - ours
    group = reducer.group
    load = functools.partial(dcp.load, checkpoint_id=checkpoint_id, **options)
    shared = _read(key, _SHARED, parameters, load)
    fits = shared["algorithm"]["world_size"] == group.size
    rank = group.rank if fits else 0
    own = _read(key, name_of_rank(rank), parameters, load) if fits or "model" not in shared else {}
    of_model = shared if "model" in shared else own
    of_optimizers = _of_optimizers(engine.bagua_optimizers, of_model["optimizers"], parameters)
    of_rank = own["algorithm"] if fits else _NOTHING_OF_ITS_OWN
    remembered = _as_local({**shared["algorithm"], "rank": rank, name_of_rank(rank): of_rank})
    check_saved_state(reducer.formation, remembered)
    _module_of(engine).load_state_dict(of_model["model"])
    for optimizer, state in zip(engine.bagua_optimizers, of_optimizers, strict=True):
        optimizer.load_state_dict(state)
    engine.bagua_load_state_dict(remembered)


def _checked(model: Any) -> EngineAccess:
    kinds = (EngineAccess, BaguaModule)
    check_kind(kinds, "what with_bagua, DistributedDataParallel or exchange_shards returned", model=model)
    checked: EngineAccess = model
    return checked


def _module_of(engine: Any) -> torch.nn.Module:
    found: torch.nn.Module = engine if isinstance(engine, torch.nn.Module) else engine.module
    return found


def _parameters_of(engine: EngineAccess) -> Parameters:
    """By all their names: a tied parameter is in the state of a model once for each."""
    return dict(_module_of(engine).named_parameters(remove_duplicate=False))


# Optimizers number the parameters. Names are needed to know which of them are shards.


def _names(optimizer: torch.optim.Optimizer, parameters: Parameters) -> list[str]:
    known = {id(one): name for name, one in reversed(parameters.items())}  # A tied one by its first name.
    every = [one for group in optimizer.param_groups for one in group["params"]]
    return [known.get(id(one), f"parameter {number}") for number, one in enumerate(every)]


def _by_name(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Any]:
    names, state = _names(optimizer, parameters), optimizer.state_dict()
    return {**state, "state": {names[number]: one for number, one in state["state"].items()}}


def _of_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], saved: Sequence[dict[str, Any]], parameters: Parameters
) -> list[dict[str, Any]]:
    """What each optimizer loads, once it is certain that there is one for each that was saved."""
    if len(optimizers) != len(saved):
        raise _other_optimizers(f"{len(saved)} optimizer{'s'[: len(saved) != 1]}", str(len(optimizers)))
    return [_by_number(state, one, parameters) for one, state in zip(optimizers, saved, strict=True)]


def _other_optimizers(expected: str, seen: str) -> ConfigurationError:
    return ConfigurationError(
        "the checkpoint was saved with other optimizers",
        argument="model",
        expected=f"a model that was wrapped with {expected}",
        seen=seen,
    )


def _by_number(state: dict[str, Any], optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(_names(optimizer, parameters))}
    if unknown := state["state"].keys() - numbers.keys():
        raise _other_optimizers(f"an optimizer of {min(unknown)}", "one that does not have it")
    return {**state, "state": {numbers[name]: one for name, one in state["state"].items()}}


# Torch fills tensors that exist, so what is saved is a text that says which there are, and the tensors.


def _packed(value: Any, parameters: Parameters) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    return {"layout": json.dumps(_told(value, "", parameters, tensors)), "tensors": tensors}


def _read(key: str, part: str, parameters: Parameters, load: Callable[[dict[str, Any]], object]) -> Any:
    """What was saved under ``key`` as ``part``, by two calls of ``load``: the text, and the tensors that it names."""
    text: dict[str, Any] = {key: {part: {"layout": ""}}}
    load(text)
    tensors: dict[str, torch.Tensor] = {}
    value = _made(json.loads(text[key][part]["layout"]), parameters, tensors)
    if tensors:
        load({key: {part: {"tensors": tensors}}})
    return value


def _told(value: Any, name: str, parameters: Parameters, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` in what JSON knows; its tensors are put into ``tensors``. ``name``: of the parameter it belongs to."""
    if isinstance(value, torch.Tensor):
        number = str(len(tensors))
        tensors[number] = whole = _as_shard_of(parameters.get(name), value.detach())
        return {"tensor": number, "dtype": str(value.dtype).removeprefix("torch."), "shape": whole.shape, "of": name}
    if isinstance(value, Mapping):
        inside = ((key, key if key in parameters else name, one) for key, one in value.items())
        return {"dict": [(key, _told(one, of, parameters, tensors)) for key, of, one in inside]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_told(one, name, parameters, tensors) for one in value]}
    check_kind((bool, int, float, str, type(None)), "numbers, text and tensors", state=value)
    return value


def _made(told: Any, parameters: Parameters, tensors: dict[str, torch.Tensor]) -> Any:
    """What ``_told`` told of, with tensors that are to be filled, which are put into ``tensors``."""
    if not isinstance(told, dict):
        return told
    if "dict" in told:
        return {key: _made(one, parameters, tensors) for key, one in told["dict"]}
    if "tensor" not in told:
        ((kind, inside),) = told.items()
        made = [_made(one, parameters, tensors) for one in inside]
        return tuple(made) if kind == "tuple" else made
    like, dtype, shape = parameters.get(told["of"]), getattr(torch, told["dtype"]), torch.Size(told["shape"])
    if isinstance(like, DTensor) and like.shape == shape:
        found = _as_shard_of(like, torch.empty_like(like.to_local(), dtype=dtype))
    else:
        found = torch.empty(shape, dtype=dtype, device="cpu")
    tensors[told["tensor"]] = found
    return found


def _as_shard_of(parameter: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """``value`` as a part of a tensor that is sharded as ``parameter``, if it belongs to a shard of one."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if value.shape != parameter.to_local().shape or parameter.dim() == 0:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def _as_local(value: Any) -> Any:
    """``value`` with the shards of this rank in the place of sharded tensors."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: _as_local(one) for key, one in value.items()}
    return [_as_local(one) for one in value] if isinstance(value, list) else value
