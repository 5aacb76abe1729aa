"""Replicas of a model that FSDP2 shards: each rank exchanges its own shards with those who hold the same ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bagua.comm
from bagua.algorithms import Algorithm, DiLoCoAlgorithm, LocalSGDAlgorithm, LowPrecisionDecentralizedAlgorithm
from bagua.compression import Identity
from bagua.errors import ConfigurationError
from bagua.integrations.fsdp import ShardExchange, exchange_shards
from bagua.parallel import with_bagua
from tests.harness import State, assert_same_on_all_ranks, batch, descend, loss_of, on_ranks, seeded, train_steps
from tests.versions import TORCH

STEPS = 9
SHARDS = 2


def uneven(seed: int = 0) -> nn.Module:
    """Two ranks cannot share any of its tensors evenly; of the last bias one of them holds nothing.

    It says its one number four times, as there are four targets.
    """
    with seeded(seed):
        layers = nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)
        return nn.Sequential(*layers, nn.ReplicationPad1d((0, 3)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def whole(model: nn.Module) -> State:
    """The weights, put together again."""
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
            for name, one in model.named_parameters()}  # fmt: skip


def sharded(
    algorithm: Algorithm, seed: int = 0, *, copied: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, ShardExchange]:
    """Replicas of two ranks, each with a shard; or ``copied``: each with all, whose gradients torch sums (HSDP)."""
    replicas = bagua.comm.get_world_size() // SHARDS
    shape = (replicas, SHARDS, 1) if copied else (replicas, 1, SHARDS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "copies", "shards"))
    model = uneven(seed)
    for part in (model[0], model):
        fully_shard(part, mesh=mesh["copies", "shards"] if copied else mesh["shards"])
    optimizer = optimizer_of(model)
    return model, optimizer, exchange_shards(model, optimizer, algorithm, mesh["replicas"].get_group())


def output(model: nn.Module) -> torch.Tensor:
    """Leaves the root of a sharded model gathered, as its weights are now."""
    with torch.no_grad():
        return model(batch(0, 0)[0])


def train_sharded(algorithm: Algorithm) -> dict[str, Any]:
    rank = bagua.comm.get_rank()
    copied = isinstance(algorithm, LocalSGDAlgorithm)
    model, optimizer, exchange = sharded(algorithm, rank // SHARDS, copied=copied)
    return watch(model, optimizer, exchange, lambda number: loss_of(model, rank, number))


def watch(model: nn.Module, optimizer: Any, exchange: Any, loss: Callable[[int], Any]) -> dict[str, Any]:
    """The weights after each step and in the end, and outputs of the mean of all replicas and of the own one."""
    watched = []
    for number in range(STEPS):
        descend(optimizer, loss(number))
        watched.append(whole(model))
    output(model)
    with exchange.bagua_global_average():
        of_mean = output(model)
    of_own = output(model)
    exchange.bagua_finish()
    return {"watched": watched, "mean": of_mean, "own": of_own, "end": whole(model)}


def divisor_of(algorithm: Algorithm) -> int:
    """On Gloo, FSDP2 of torch 2.8 sums the gradients of shards; it averages those of copies, and all in torch 2.13."""
    return SHARDS if TORCH >= (2, 13) or isinstance(algorithm, LocalSGDAlgorithm) else 1


def train_whole(algorithm: Algorithm) -> dict[str, Any]:
    """The same on one rank for each replica."""
    rank, by = bagua.comm.get_rank(), divisor_of(algorithm)
    model = uneven(rank)
    optimizer = optimizer_of(model)
    wrapped = with_bagua(model, [optimizer], algorithm)
    ranks = 2 * rank, 2 * rank + 1
    return watch(model, optimizer, wrapped, lambda number: sum(loss_of(wrapped, one, number) for one in ranks) / by)


def of_each(train: Callable[[Algorithm], dict[str, Any]], algorithms: list[Algorithm]) -> list[dict[str, Any]]:
    return [train(algorithm) for algorithm in algorithms]


def assert_near(state: State, expected: State) -> None:
    for name, value in state.items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), name


def test_shards_are_exchanged_as_whole_models_would_be(process_ranks):
    # All is sent: what is chosen of a shard is not what would be chosen of the whole.
    everything = {"kept": 4096, "value_bits": None, "error_feedback": "weights", "average": "all"}
    algorithms = [
        DiLoCoAlgorithm(4, fragments=2, overlap=1, outer_momentum=0.5),
        Algorithm.init("slowmo", sync_every=4),
        LocalSGDAlgorithm(4),
        LowPrecisionDecentralizedAlgorithm(codec=Identity()),
        Algorithm.init("sparse_loco", sync_every=4, start_after=0, hierarchical=False, **everything),
    ]
    of_whole = process_ranks(2, of_each, train_whole, algorithms)
    of_shards = process_ranks(4, of_each, train_sharded, algorithms)
    for rank, by_algorithm in enumerate(of_shards):
        for found, expected in zip(by_algorithm, of_whole[rank // SHARDS], strict=True):
            for state, one in zip(found.pop("watched"), expected["watched"], strict=True):
                assert_near(state, one)
            assert_near(found.pop("end"), expected["end"])
            assert_near(found, expected)


def mesh_of(shards: int) -> Any:
    """All ranks, as replicas of so many shards. Collective."""
    replicas = bagua.comm.get_world_size() // shards
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicas", "shards"))


def bytes_of_wide(mesh: Any, communicator_of: Callable[[Any], Any], **others: Any) -> int:
    """What this rank sends to ``others`` in an outer step of a model whose parts are much larger than their padding."""
    with seeded():
        model = nn.Linear(64, 63)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    exchange = exchange_shards(model, optimizer, LocalSGDAlgorithm(1), **others)
    sent = 0
    for _ in range(2):
        communicator = communicator_of(exchange)
        before = communicator.statistics.sent_bytes()
        descend(optimizer, model(torch.ones(2, 64)).sum())
        sent = communicator.statistics.sent_bytes() - before
    exchange.bagua_close()
    optimizer.step()  # Which exchanges nothing any more.
    assert exchange._bagua_engine.reducer.group.closed
    return sent


def bytes_between_replicas(shards: int) -> int:
    def communicator_of(exchange: ShardExchange) -> Any:
        return exchange._bagua_engine.reducer.group.global_communicator

    mesh = mesh_of(shards)
    return bytes_of_wide(mesh["shards"], communicator_of, process_group=mesh["replicas"].get_group())


def test_each_rank_sends_as_many_times_less_as_there_are_shards(process_ranks):
    one, two = process_ranks(2, bytes_between_replicas, 1), process_ranks(4, bytes_between_replicas, 2)
    assert all(one[0] * 0.45 <= sent <= one[0] * 0.55 for sent in two)


@pytest.mark.parametrize("algorithm", [DiLoCoAlgorithm(4, overlap=3), LowPrecisionDecentralizedAlgorithm()], ids=repr)
@on_ranks(4, pool="process_pool")
def test_training_of_shards_resumes_bit_by_bit(algorithm: Algorithm) -> None:
    rank = bagua.comm.get_rank()
    model, optimizer, exchange = sharded(algorithm)
    train_steps(model, optimizer, rank, range(6))
    weights, saved = whole(model), exchange.bagua_state_dict()
    momenta = [{key: value.clone() for key, value in optimizer.state[one].items()} for one in model.parameters()]
    train_steps(model, optimizer, rank, range(6, STEPS))
    end = whole(model)
    exchange.bagua_close()
    model, optimizer, exchange = sharded(algorithm, seed=7)
    with torch.no_grad():
        for (name, one), state in zip(model.named_parameters(), momenta, strict=True):
            shard = torch.distributed.tensor.distribute_tensor(weights[name], one.device_mesh, one.placements)
            one.to_local().copy_(shard.to_local())
            optimizer.state[one] = state
    exchange.bagua_load_state_dict(saved)
    train_steps(model, optimizer, rank, range(6, STEPS))
    assert_same_on_all_ranks([whole(model), end])


@on_ranks(4, pool="process_pool")
def test_a_mean_that_is_not_finite_counts_for_no_shard() -> None:
    """One rank brings a weight that is no number to an outer step."""
    rank, before = bagua.comm.get_rank(), {}
    model, optimizer, _ = sharded(DiLoCoAlgorithm(2))
    train_steps(model, optimizer, rank, [0])
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()

    def spoil(*_: Any) -> None:  # Before the outer step, which is a later hook of the same optimizer.
        before.update(whole(model))
        if rank == 2:
            with torch.no_grad():
                model[2].weight.to_local()[0, 0] = float("nan")

    first = optimizer._optimizer_step_post_hooks
    optimizer.register_step_post_hook(spoil)
    first.move_to_end(next(reversed(first)), last=False)
    optimizer.step()
    assert_same_on_all_ranks([whole(model), before if rank < 2 else whole(uneven())])


@on_ranks(2, pool="process_pool")
def test_what_cannot_be_exchanged_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ConfigurationError, match="nothing in this module is sharded"):
        exchange_shards(uneven(), [], "diloco", mesh.get_group())
    model = uneven()
    fully_shard(model, mesh=mesh)
    for algorithm in ("gradient_allreduce", "async", DiLoCoAlgorithm(4, start_after=2)):
        with pytest.raises(ConfigurationError, match="only weights can be exchanged"):
            exchange_shards(model, [], algorithm, mesh.get_group())
    with pytest.raises(ConfigurationError, match=r"ranks \[\d\], which are in the mesh"):
        exchange_shards(model, [], "diloco", mesh.get_group())
