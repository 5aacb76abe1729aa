"""Mixing with neighbours is a product with the mixing matrix, on any graph, and nobody waits for ever."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bagua.comm
from bagua.comm import solo_group
from bagua.compression import Codec, Identity, MinMaxUInt8
from bagua.primitives import DifferenceExchange, ReducerMemory, hierarchical_neighbour_average, neighbour_average
from bagua.topology import Hierarchical, Ring, Round, Torus, available, create, weighted_by_size
from tests.harness import coded
from tests.topologies import ONE_WAY, STAR

NUMEL = 5


def values(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL, generator=generator, dtype=torch.float64).to(dtype)


def scratch(dtype: torch.dtype):
    made: dict[str, torch.Tensor] = {}
    return lambda name: made.setdefault(name, torch.full((NUMEL,), float("nan"), dtype=dtype))


def _mix(rounds: list[Round], dtype: torch.dtype) -> torch.Tensor:
    group = bagua.comm.get_default_group()
    tensor, buffers = values(group.rank, dtype), scratch(dtype)
    for mixing in rounds:
        assert neighbour_average(tensor, mixing, group.global_communicator, buffers) is None
    return tensor


def _expected(rounds: list[Round], dtype: torch.dtype) -> torch.Tensor:
    stacked = torch.stack([values(rank, dtype) for rank in range(rounds[0].size)])
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = stacked.to(wide)
    for mixing in rounds:
        stacked = mixing.matrix().to(wide) @ stacked
    return stacked


def assert_mixed(results: list[torch.Tensor], rounds: list[Round], dtype: torch.dtype = torch.float32) -> None:
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-6)
    for result, expected in zip(results, _expected(rounds, dtype), strict=True):
        assert result.dtype == dtype
        assert torch.allclose(result.to(expected.dtype), expected, atol=tolerance)


@pytest.mark.parametrize("name", list(available()))
def test_every_topology_mixes_as_its_matrices_say(thread_ranks, name):
    for size in (1, 2, 5):
        rounds = [create(name).round(size, step) for step in (1, 2, 3)]
        assert_mixed(thread_ranks(size, _mix, rounds, torch.float32), rounds)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_other_dtypes(thread_ranks, dtype):
    rounds = [one.round(4, 1) for one in (STAR, create("shift_one"), create("complete"))]
    assert_mixed(thread_ranks(4, _mix, rounds, dtype), rounds, dtype)


@given(st.data(), st.integers(2, 5))
def test_any_directed_graph_works_without_waiting_for_ever(thread_pool, data, size):
    """Every doubly stochastic matrix is a mean of permutations."""
    orders = data.draw(st.lists(st.permutations(range(size)), min_size=1, max_size=3))
    matrix = sum(torch.eye(size, dtype=torch.float64)[list(order)] for order in orders) / len(orders)
    rounds = [Round.from_matrix(matrix)]
    assert_mixed(thread_pool.run(_mix, rounds, torch.float32, size=size), rounds)


# By host.


def _mix_by_host(mixing: Round) -> torch.Tensor:
    group = bagua.comm.get_default_group()
    tensor = values(group.rank)
    hierarchical_neighbour_average(tensor, mixing, group, scratch(torch.float32))
    return tensor


@pytest.mark.parametrize("hosts", [[2, 1], [1, 3], [2, 1, 2], [1, 1, 2]], ids=str)
@pytest.mark.parametrize("between_hosts", [*map(create, ("complete", "ring", "shift_one")), STAR, ONE_WAY], ids=str)
def test_hosts_mix_as_the_matrix_over_ranks_says(thread_ranks, hosts, between_hosts):
    nodes = [host for host, size in enumerate(hosts) for _ in range(size)]
    over_ranks = Hierarchical(between_hosts).round(len(nodes), 1, nodes)
    between = weighted_by_size(between_hosts.round(len(hosts), 1), hosts)
    assert_mixed(thread_ranks(len(nodes), _mix_by_host, between, hosts=hosts), [over_ranks])


# Differences in low precision.


def _follow(mixing: Round, codec: Codec, steps: int, spoil: tuple[int, int] = (-1, -1)) -> dict[str, torch.Tensor]:
    """Steps with a random change of the own vector in between; ``spoil``: who has a NaN, and when."""
    communicator = bagua.comm.get_default_group().global_communicator
    rank = communicator.rank
    exchange = DifferenceExchange(mixing, codec)
    memory = ReducerMemory(communicator, NUMEL, torch.float64)
    memory.declare(exchange.state())
    state = memory.state
    tensor = values(rank, torch.float64)
    for step in range(steps):
        sound = tensor.clone()
        if (rank, step) == spoil:
            tensor[1] = float("nan")
        exchange.run(tensor, communicator, state)
        if (rank, step) == spoil:
            assert torch.isnan(tensor[1])
            tensor = sound
        if step < steps // 2:
            tensor.add_(values(100 * rank + step, torch.float64), alpha=0.1)
    return {"x": tensor, **state}


def simulated(matrix: torch.Tensor, codec: Codec, steps: int) -> list[torch.Tensor]:
    """All ranks in one process; each keeps a replica of every neighbour, and all replicas of one rank are one."""
    size = len(matrix)
    x = [values(rank, torch.float64) for rank in range(size)]
    replicas = [one.clone() for one in x]
    for step in range(steps):
        if step:
            mixed = [sum(matrix[i, j] * replicas[j] for j in range(size)) for i in range(size)]
            sent = [x[i] - replicas[i] + mixed[i] - replicas[i] for i in range(size)]
            for i in range(size):
                replicas[i] = replicas[i] + coded(codec, sent[i])
                x[i] = replicas[i].clone()
        if step < steps // 2:
            x = [x[i] + 0.1 * values(100 * i + step, torch.float64) for i in range(size)]
    return x


@pytest.mark.parametrize("codec", [Identity(), MinMaxUInt8(block_numel=2)], ids=repr)
@pytest.mark.parametrize(
    ("topology", "size"), [(Ring(), 1), (Ring(), 2), (Ring(), 3), (STAR, 4), (Torus(), 5)], ids=str
)
def test_differences_follow_the_textbook_with_replicas_of_all_neighbours(thread_ranks, codec, topology, size):
    mixing = topology.round(size, 1)
    results = thread_ranks(size, _follow, mixing, codec, 8)
    for result, expected in zip(results, simulated(mixing.matrix(), codec, 8), strict=True):
        assert torch.allclose(result["x"], expected, atol=1e-12)


@pytest.mark.parametrize("step", [0, 3], ids=["at the start", "later"])
def test_a_nan_on_one_rank_stays_there_and_nobody_loses_track(thread_ranks, step):
    mixing = Ring().round(3, 1)
    results = thread_ranks(3, _follow, mixing, MinMaxUInt8(), 40, (1, step))
    for rank, result in enumerate(results):
        assert torch.isfinite(result["x"]).all()
        known = sum(weight * results[source]["estimate"] for source, weight in mixing[rank].sources)
        assert torch.allclose(result["neighbours"], known, atol=1e-12)
        assert torch.allclose(result["x"], results[0]["x"], atol=1e-3)


def test_sixteen_bit_tensors_are_followed_in_single_precision():
    memory = ReducerMemory(solo_group().global_communicator, 3, torch.bfloat16)
    memory.declare(DifferenceExchange.state())
    state = memory.state
    assert state["estimate"].dtype == state["neighbours"].dtype == torch.float32


# On processes.


def _start_all(rounds: list[Round]) -> list[torch.Tensor]:
    group = bagua.comm.get_default_group()
    tensors = [values(group.rank) for _ in rounds]
    works = [
        neighbour_average(tensor, mixing, group.global_communicator, scratch(torch.float32), async_op=True)
        for tensor, mixing in zip(tensors, rounds, strict=True)
    ]
    for work in works:
        if work is not None:
            work.wait()
    return tensors


def test_several_exchanges_are_under_way_at_the_same_time(process_ranks):
    rounds = [create("shift_one").round(3, 1), create("shift_one").round(3, 2), STAR.round(3, 1)]
    results = process_ranks(3, _start_all, rounds)
    for number, mixing in enumerate(rounds):
        assert_mixed([tensors[number] for tensors in results], [mixing])
