"""What frameworks have in common: algorithms with options, pauses of a training, and a file for each rank."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from bagua.algorithms import Algorithm, AsyncModelAverageAlgorithmImpl, DistributedAlgorithm, as_algorithm, registry
from bagua.comm import as_group, available, solo_group
from bagua.engine import check_saved_state
from bagua.errors import ConfigurationError
from bagua.parallel import BaguaModule, with_bagua


def declare(
    algorithm: Algorithm | DistributedAlgorithm | str, options: dict[str, Any]
) -> tuple[Algorithm, dict[str, Any]]:
    """An algorithm with those of the options that are its own; and the other ones.

    Args:
        algorithm: the name of an algorithm, which takes options; or a declaration, which has its own.
        options: options of the algorithm and of ``with_bagua``.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm, options
    names = {field.name for field in dataclasses.fields(registry.get(algorithm))}  # type: ignore[arg-type]
    own = {name: value for name, value in options.items() if name in names}
    declared = Algorithm.init(algorithm, **own) if own else as_algorithm(algorithm)
    return declared, {name: value for name, value in options.items() if name not in own}


def wrap(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    algorithm: Algorithm,
    scaler: Any,
    options: dict[str, Any],
) -> None:
    """``with_bagua`` over the processes that torch has connected, or over this one alone."""
    options = {"grad_scaler": scaler, **options}
    if options.get("process_group") is None:
        options["process_group"] = as_group() if available() else solo_group()
    with_bagua(model, optimizers, algorithm, **options)


def pause(model: Any) -> None:
    """Before weights are looked at: end what ranks owe each other, and averages in the background, with equal weights.

    Collective, and idempotent.

    Args:
        model: model that has an engine.
    """
    model._bagua_engine.reducer.after_optimizers()  # noqa: SLF001 - ours
    if averaging := _averaging_of(model):
        averaging.abort(model)


def go_on(model: Any) -> None:
    """Let averages in the background go on, after ``pause``. Collective."""
    if averaging := _averaging_of(model):
        averaging.resume(model)


def _averaging_of(model: Any) -> AsyncModelAverageAlgorithmImpl | None:
    bound = model.bagua_algorithm
    return bound if isinstance(bound, AsyncModelAverageAlgorithmImpl) else None


def collect(model: BaguaModule) -> dict[str, Any]:
    """What the algorithm remembers on this rank; with weights and optimizers where ranks differ. Collective."""
    saved: dict[str, Any] = {"remembered": model.bagua_state_dict()}
    if model.bagua_algorithm.options.ranks_differ:
        saved["weights"] = model.state_dict()
        saved["optimizers"] = [optimizer.state_dict() for optimizer in model.bagua_optimizers]
    return saved


def restore(model: BaguaModule, saved: dict[str, Any]) -> None:
    """Go on from what ``collect`` returned. Collective."""
    if "remembered" in saved:  # Before weights are loaded: another algorithm's are not for this one.
        check_saved_state(model._bagua_engine.reducer.formation, saved["remembered"])  # noqa: SLF001 - ours
    if "weights" in saved:
        model.load_state_dict(saved["weights"])
        for optimizer, state in zip(model.bagua_optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    if "remembered" in saved:
        model.bagua_load_state_dict(saved["remembered"])


def write_own_file(folder: Path, rank: int, world_size: int, saved: list[dict[str, Any]]) -> None:
    """Save what is this rank's in a checkpoint.

    Args:
        folder: the checkpoint.
        rank: number of this process.
        world_size: number of processes.
        saved: state that is remembered of each model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = _file(folder, rank)
    draft = file.with_suffix(".tmp")
    torch.save({"world_size": world_size, "models": saved}, draft)
    draft.replace(file)  # A rank that is killed before this leaves no half of a file that looks like one.


def read_own_file(folder: Path, rank: int, world_size: int) -> list[dict[str, Any]]:
    """What this rank saved in a checkpoint; with another number of ranks, what rank 0's algorithms remembered."""
    own = _read(_file(folder, rank)) or _read(_file(folder, 0))
    if not own:
        warnings.warn(
            f"{folder} was saved without bagua: what it would remember of earlier steps begins anew", stacklevel=3
        )
        return []
    if own["world_size"] == world_size:
        return list(own["models"])
    first = _read(_file(folder, 0)) or own  # Not every node sees the folder of rank 0.
    return [{"remembered": one["remembered"]} for one in first["models"]]


def read_on_all_ranks(model: BaguaModule, folder: Path, rank: int, world_size: int) -> list[dict[str, Any]]:
    """``read_own_file``, or an error on all ranks: to go on is collective, so no rank may begin anew alone.

    Args:
        model: one of the models, whose ranks are asked.
        folder: the checkpoint.
        rank: number of this process.
        world_size: number of processes.

    Raises:
        ConfigurationError: some ranks have a file that can be read, and others do not.
    """
    found, damage = list[dict[str, Any]](), ""
    try:
        found = read_own_file(folder, rank, world_size)
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, pickle.UnpicklingError) as error:
        damage = f"a file that cannot be read: {type(error).__name__}"
    communicator = model._bagua_engine.reducer.formation.communicator  # noqa: SLF001 - ours
    answers = communicator.allgather_object("" if found else damage or "no file")
    if len(set(answers)) > 1 or answers[0] not in {"", "no file"}:
        raise ConfigurationError(
            "not all ranks can go on from this checkpoint",
            argument="checkpoint",
            expected=f"{_file(folder, 0)} and so on, one file for each rank",
            seen="; ".join(f"rank {other}: {answer}" for other, answer in enumerate(answers) if answer),
            advice="Bring the files of all ranks to the folder, or load the weights alone and begin anew.",
        )
    return found


def _file(folder: Path, rank: int) -> Path:
    return folder / f"bagua-rank{rank}.pt"


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
