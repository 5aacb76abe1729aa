"""Checkpoints through ``torch.distributed.checkpoint``: the same run again, or one of another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bagua.comm
from bagua.algorithms import Algorithm, DiLoCoAlgorithm
from bagua.errors import ConfigurationError
from bagua.integrations.checkpoint import load_training_state, training_state
from bagua.integrations.fsdp import exchange_shards
from bagua.parallel import with_bagua
from tests.harness import State, adam, assert_same_on_all_ranks, mlp, on_ranks, snapshot, train_steps
from tests.versions import TORCH, needs

SAVES = needs("torch.distributed.checkpoint that saves without a warning", TORCH >= (2, 13))

pytestmark = pytest.mark.gloo

ALGORITHMS = {
    "streaming": DiLoCoAlgorithm(4, fragments=2, overlap=3, codec="int4", error_feedback=True),
    "eager": DiLoCoAlgorithm(4, eager=True),
    "local_sgd": Algorithm.init("local_sgd", sync_every=3),
    "allreduce": Algorithm.init("gradient_allreduce"),
}
BEFORE, AFTER = range(6), range(6, 11)


def tied_mlp(seed: int) -> torch.nn.Sequential:
    model = mlp(seed)
    model[-1].register_parameter("second_name", model[0].weight)
    return model


def begin(algorithm: Algorithm, seed: int = 0, *, tied: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    model = tied_mlp(seed) if tied else mlp(seed)
    optimizer = adam(model.parameters())
    return with_bagua(model, [optimizer], algorithm, bucket_bytes=1000), optimizer


def train(folder: str, resumes: bool) -> dict[str, tuple[State, State, State]]:
    """By algorithm, the weights when they are saved or were loaded, those in the end, and the state shared at first."""
    found, rank = {}, bagua.comm.get_rank()
    for name, algorithm in ALGORITHMS.items():
        model, optimizer = begin(algorithm, seed=7 if resumes else 0)
        if resumes:
            load_training_state(model, Path(folder) / name)
        else:
            train_steps(model, optimizer, rank, BEFORE)
        halfway, shared = snapshot(model), model.bagua_state_dict()["parameters"]
        anchors = {f"{parameter} {key}": value for parameter, one in shared.items() for key, value in one.items()}
        if not resumes:
            dcp.save({"training": training_state(model), "epoch": 3}, checkpoint_id=Path(folder) / name)
        train_steps(model, optimizer, rank, AFTER)
        found[name] = halfway, snapshot(model), anchors
    return found


@pytest.fixture(scope="module")
def saved(process_pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return folder, process_pool.run(train, folder, False, size=2)


@SAVES
def test_the_same_number_of_ranks_goes_on_bit_by_bit(process_pool, saved):
    folder, ends = saved
    for whole, resumed in zip(ends, process_pool.run(train, folder, True, size=2), strict=True):
        for name in ALGORITHMS:
            for states in zip(whole[name], resumed[name], strict=True):
                assert_same_on_all_ranks(states)


@SAVES
def test_another_number_of_ranks_goes_on_from_what_all_had_in_common(process_pool, saved):
    folder, ends = saved
    resumed = process_pool.run(train, folder, True, size=3)
    for name in ALGORITHMS:
        first, _, anchors = ends[0][name]
        assert bool(anchors) == (name == "streaming")  # The anchor, and the outer momentum.
        for one in resumed:
            loaded, end, there = one[name]
            assert_same_on_all_ranks([first, loaded])
            assert_same_on_all_ranks([anchors, there])
            assert all(torch.isfinite(value).all() for value in end.values())


@SAVES
@pytest.mark.parametrize(("parts", "said"), [(2, "with 1 optimizer"), (1, "an optimizer of ")])
@on_ranks(1, pool="process_pool")
def test_other_optimizers_are_refused_before_anything_is_loaded(parts, said, saved):
    model = mlp(7)
    parameters = list(model.parameters())
    groups = [parameters[:2], parameters[2:]][:parts]
    with_bagua(model, [adam(group) for group in groups], "gradient_allreduce")
    before = snapshot(model)
    with pytest.raises(ConfigurationError, match=said):
        load_training_state(model, Path(saved[0]) / "allreduce")
    assert_same_on_all_ranks([before, snapshot(model)])


@SAVES
@on_ranks(1, pool="process_pool")
def test_another_algorithm_is_refused_before_anything_is_loaded(saved):
    model, optimizer = begin(ALGORITHMS["local_sgd"], seed=7)
    train_steps(model, optimizer, 0, range(1))
    before, steps = snapshot(model), model.bagua_step
    moments = [one["exp_avg"].clone() for one in optimizer.state.values()]
    with pytest.raises(ConfigurationError, match="this state belongs to another algorithm"):
        load_training_state(model, Path(saved[0]) / "allreduce")
    assert_same_on_all_ranks([before, snapshot(model)])
    assert all(map(torch.equal, moments, [one["exp_avg"] for one in optimizer.state.values()]))
    assert model.bagua_step == steps


def begin_sharded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(tied_mlp(seed), mesh=mesh["shards"])
    optimizer, group = adam(model.parameters()), mesh["replicas"].get_group()
    return model, optimizer, exchange_shards(model, optimizer, DiLoCoAlgorithm(4, overlap=3), group)


def sharded_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    train_steps(model, optimizer, bagua.comm.get_rank(), steps)
    return [one.to_local().detach().clone() for one in model.parameters()]


def save_and_resume_shards(folder: str) -> None:
    model, optimizer, exchange = begin_sharded(0)
    sharded_steps(model, optimizer, BEFORE)
    dcp.save({"training": training_state(exchange)}, checkpoint_id=folder)
    end = sharded_steps(model, optimizer, AFTER)
    exchange.bagua_close()
    model, optimizer, exchange = begin_sharded(7)
    load_training_state(exchange, folder)
    assert all(map(torch.equal, end, sharded_steps(model, optimizer, AFTER)))


def load_whole(folder: str) -> None:
    """Shards that two replicas of two ranks saved, on one replica that holds all."""
    model, _ = begin(DiLoCoAlgorithm(4, overlap=3), seed=3, tied=True)
    load_training_state(model, folder)
    anchors = {name: one["anchor"] for name, one in model.bagua_state_dict()["parameters"].items()}
    shapes, expected = ({name: one.shape for name, one in state.items()} for state in (anchors, mlp().state_dict()))
    assert shapes == expected
    assert all(torch.isfinite(one).all() and one.any() for one in anchors.values())


@SAVES
def test_shards_go_on_bit_by_bit_and_can_be_put_together(process_pool, tmp_path):
    process_pool.run(save_and_resume_shards, str(tmp_path), size=4)
    process_pool.run(load_whole, str(tmp_path), size=3)


def test_what_is_no_model_of_ours_is_refused():
    with pytest.raises(ConfigurationError, match="what with_bagua"):
        training_state(mlp())
