"""Every topology keeps the mean of all ranks and brings them together, as fast as published."""

from __future__ import annotations

import math
import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bagua.topology as topologies
from bagua.errors import ConfigurationError
from bagua.topology import (
    AlternatingRing,
    Complete,
    Cycle,
    Edge,
    ErdosRenyi,
    Exponential,
    FunctionTopology,
    Hierarchical,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Round,
    ShiftOne,
    Star,
    Topology,
    Torus,
    WeightedGraph,
    check_round,
    consensus_rate,
    create,
    metropolis,
    spectral_gap,
)

NAMES = list(topologies.available())
BETWEEN_HOSTS = ["complete", "ring", "star", "exponential", "shift_one", "one_peer_exponential", "random_matching"]
SIZES = range(1, 18)


def assert_doubly_stochastic(matrix: torch.Tensor) -> None:
    ones = torch.ones(len(matrix), dtype=matrix.dtype)
    assert matrix.min() >= -1e-12
    torch.testing.assert_close(matrix.sum(0), ones)
    torch.testing.assert_close(matrix.sum(1), ones)


@pytest.mark.parametrize("name", NAMES)
def test_every_round_is_doubly_stochastic_and_what_else_it_claims(name):
    for size in SIZES:
        topology = create(name)
        topology.check(size)
        for step in range(1, 5):
            assert_doubly_stochastic(topology.matrix(size, step))


@pytest.mark.parametrize("name", BETWEEN_HOSTS)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_between_uneven_hosts_the_matrix_over_ranks_is_doubly_stochastic(name, sizes, seed):
    nodes = [host for host, size in enumerate(sizes) for _ in range(size)]
    random.Random(seed).shuffle(nodes)
    for topology, rounds in ((Hierarchical(create(name)), 4), (create("alternating_exp_ring"), 6)):
        topology.check(len(nodes), nodes, rounds=rounds)
        for step in range(1, rounds + 1):
            assert_doubly_stochastic(topology.matrix(len(nodes), step, nodes))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_come_together(name):
    for size in (1, 2, 3, 5, 6, 8):
        assert consensus_rate(create(name), size) < 0.97, size


@pytest.mark.parametrize("name", BETWEEN_HOSTS)
def test_ranks_on_uneven_hosts_come_together(name):
    assert consensus_rate(create(f"hierarchical_{name}"), 9, nodes=[0, 1, 1, 2, 2, 2, 3, 3, 4]) < 0.97


@pytest.mark.parametrize("name", NAMES)
def test_the_vectors_of_ranks_reach_their_mean(name):
    values = torch.tensor([4.0, -1.0, 7.0, 2.0, 5.0, 1.0], dtype=torch.float64)
    for step in range(1, 200):
        values = create(name).matrix(6, step) @ values
    assert torch.allclose(values, torch.full_like(values, 3.0))


def test_a_period_is_what_it_says():
    for name in NAMES:
        for size in (1, 2, 3, 4, 6, 7):
            topology = create(name)
            period = topology.period(size)
            for step in (1, 2, 3) if period else ():
                assert topology.round(size, step) == topology.round(size, step + period), (name, size)


@pytest.mark.parametrize(
    ("topology", "size", "published"),
    [
        (Ring(), 3, 1.0),
        (Ring(), 8, 2 / 3 * (1 - math.cos(2 * math.pi / 8))),
        (Ring(), 15, 2 / 3 * (1 - math.cos(2 * math.pi / 15))),
        (Star(), 7, 1 / 7),
        (Complete(), 9, 1.0),
        (Hypercube(), 16, 2 / 5),
        (Hypercube(), 32, 2 / 6),
        (Torus(), 25, (2 - 2 * math.cos(2 * math.pi / 5)) / 5),
        (Torus(rows=3), 12, (2 - 2 * math.cos(2 * math.pi / 4)) / 5),
        (Exponential(), 8, 2 / 4),
        (Exponential(), 14, 2 / 5),
    ],
    ids=repr,
)
def test_spectral_gaps_are_as_published(topology, size, published):
    assert spectral_gap(topology.matrix(size)) == pytest.approx(published, abs=1e-9)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_peer_exponential_reaches_the_mean_in_log2_rounds_from_any_round_on(size):
    bits = size.bit_length() - 1
    for first in (1, 2, 5):
        product = torch.eye(size, dtype=torch.float64)
        for step in range(first, first + bits):
            product = OnePeerExponential().matrix(size, step) @ product
        assert torch.allclose(product, torch.full((size, size), 1 / size, dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 4, 6, 10])
def test_shift_one_pairs_by_the_published_formula(size):
    half = size // 2
    for k in range(2 * half):
        for rank in range(size):
            peer = half + (k + rank) % half if rank < half else (rank - half - k) % half
            assert ShiftOne().round(size, k + 1)[rank].sources == ((peer, 0.5),)


@pytest.mark.parametrize("topology", [AlternatingRing(), ShiftOne(), OnePeerExponential(), RandomMatching()], ids=repr)
@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_of_an_odd_number_exactly_one_rests_and_most_get_their_turn(topology, size):
    resting = []
    for step in range(1, 40):
        edges = topology.round(size, step).edges
        alone = [edge for edge in edges if len(edge.ranks) == 1]
        resting += [rank for edge in alone for rank in edge.ranks]
        assert all(edge.weight == 1.0 and edge.other_weight == 0.0 for edge in alone)
        assert len(edges) - len(alone) == size // 2 or size == 1 or isinstance(topology, OnePeerExponential)
    assert len(set(resting)) >= (size + 1) // 2


def test_random_matchings_and_graphs_are_the_same_everywhere_and_differ_by_seed():
    assert [edge.ranks for edge in RandomMatching(seed=2).round(6, 3).edges] == [(0, 1), (2, 4), (3, 5)]
    drawn = {RandomMatching(seed).round(8, step).edges for seed in range(3) for step in range(1, 4)}
    assert len(drawn) > 6
    assert len({ErdosRenyi(seed=seed).round(8, 1) for seed in range(5)}) > 2
    assert ErdosRenyi(seed=1).round(8, 1) == ErdosRenyi(seed=1).round(8, 99)


@given(st.data(), st.integers(1, 9))
def test_metropolis_weights_fit_any_graph(data, size):
    around = [set() for _ in range(size)]
    pairs = [(i, j) for i in range(size) for j in range(i)]
    for i, j in data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else ():
        around[i].add(j)
        around[j].add(i)
    mixing = metropolis(around)
    check_round(mixing, size=size, symmetric=True)
    matrix = mixing.matrix()
    assert_doubly_stochastic(matrix)
    for i, j in pairs:
        weight = 1 / (1 + max(len(around[i]), len(around[j]))) if j in around[i] else 0.0
        assert matrix[i, j] == matrix[j, i] == weight


def test_what_a_rank_is_told_is_a_row_of_the_matrix():
    for name in [*NAMES, "hierarchical_ring"]:
        mixing = create(name).round(7, 2)
        matrix = torch.zeros(7, 7, dtype=torch.float64)
        takers = set()
        for rank in range(7):
            told = mixing[rank]
            matrix[rank, rank] = told.own_weight
            for source, weight in told.sources:
                matrix[rank, source] = weight
            takers |= {(rank, other) for other in told.destinations}
            assert (told.edge is None) == (mixing.edges is None)
        assert torch.allclose(matrix, mixing.matrix(), atol=1e-15)
        assert takers == {(source, rank) for rank in range(7) for source, _ in mixing[rank].sources}


@pytest.mark.parametrize("name", [*NAMES, "hierarchical_ring"])
def test_turns_carry_every_message_once_and_both_ends_agree_on_their_order(name):
    for size in (1, 2, 5, 6):
        mixing = create(name).round(size, 3)
        carried = [{}, {}]
        for rank in range(size):
            for turn in mixing.turns(rank):
                if turn.source is not None:
                    carried[0].setdefault((turn.source, rank), []).append(turn.weight)
                if turn.destination is not None:
                    carried[1].setdefault((rank, turn.destination), []).append(turn.weight)
        assert carried[0] == {(source, rank): [w] for rank in range(size) for source, w in mixing[rank].sources}
        assert carried[0].keys() == carried[1].keys()
        assert _all_turns_can_be_taken(mixing)


def _all_turns_can_be_taken(mixing: Round) -> bool:
    """Whether ranks that take their turns in order, each waiting for both ends, all come to an end."""
    waiting = {rank: list(mixing.turns(rank)) for rank in range(mixing.size)}

    def meets(rank: int) -> bool:
        turn = waiting[rank][0]
        partners = [turn.source, turn.destination]
        others = [waiting[other][0] if other is not None and waiting[other] else None for other in partners]
        incoming = turn.source is None or (others[0] is not None and others[0].destination == rank)
        return incoming and (turn.destination is None or (others[1] is not None and others[1].source == rank))

    while any(waiting.values()):
        moving = [rank for rank, turns in waiting.items() if turns and meets(rank)]
        if not moving:
            return False
        for rank in moving:
            waiting[rank].pop(0)
    return True


@pytest.mark.parametrize(("topology", "turns"), [(Ring(), 2), (Exponential(), 3), (Complete(), 7), (ShiftOne(), 1)])
def test_regular_graphs_need_as_many_turns_as_neighbours(topology, turns):
    assert {len(topology.round(8, 1).turns(rank)) for rank in range(8)} == {turns}


def test_hosts_of_equal_size_mix_as_ranks_would():
    nodes = [0, 1, 2, 0, 1, 2]
    matrix = Hierarchical(Star()).matrix(6, 1, nodes)
    expected = torch.kron(torch.full((2, 2), 0.5, dtype=torch.float64), Star().matrix(3))
    assert torch.allclose(matrix, expected)


def test_without_hosts_the_hierarchical_form_is_the_flat_one():
    assert torch.allclose(Hierarchical(Torus()).matrix(9), Torus().matrix(9))


def test_alternating_exp_ring_gives_each_pair_of_hosts_a_round_together_and_one_apart():
    nodes = [0, 0, 1, 1, 2, 2, 3, 3]
    seen = [[edge.ranks for edge in create("alternating_exp_ring").round(8, step, nodes).edges] for step in (1, 2)]
    assert seen == [[(0, 1), (2, 3), (4, 5, 6, 7)], [(0, 1, 2, 3), (4, 5), (6, 7)]]
    assert consensus_rate(create("alternating_exp_ring"), 8, nodes) == 0.0


def test_topologies_take_turns():
    turns = Cycle((Ring(), OnePeerExponential()))
    assert turns.round(4, 3) == Ring().round(4, 2)
    assert turns.round(4, 4) == OnePeerExponential().round(4, 2)
    assert turns.period(4) == 4
    assert Cycle((Ring(), RandomMatching())).period(4) is None
    assert turns.symmetric
    assert not Cycle((Exponential(),)).symmetric


# What is refused.


def refused(build, *words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build()
    for word in words:
        assert word in str(caught.value)


def test_a_matrix_that_is_not_doubly_stochastic_is_refused_and_the_place_is_named():
    refused(lambda: WeightedGraph([[0.5, 0.5], [0.25, 0.75]]), "given to rank 0", "0.75")
    refused(lambda: WeightedGraph([[0.5, 0.4], [0.5, 0.6]]), "rank 0", "0.9")
    refused(lambda: WeightedGraph([[1.5, -0.5], [-0.5, 1.5]]), "0 to 1")
    refused(lambda: WeightedGraph([[0.5, 0.5]]), "square")
    refused(lambda: WeightedGraph([[float("nan"), 1.0], [1.0, 0.0]]), "0 to 1")
    refused(lambda: WeightedGraph([[1.0]]).round(2, 1), "another number of ranks")


def test_edges_must_cover_all_ranks_once():
    refused(lambda: Round.from_edges(3, [Edge((0, 1), 0.5)]), "exactly one edge", "edge of its own")
    refused(lambda: Round.from_edges(2, [Edge((0, 1), 0.5), Edge((1,), 1.0)]), "exactly one edge")
    refused(lambda: Round.from_edges(2, [Edge((0, 1), 1.5)]), "0 to 1")
    refused(lambda: Round.from_edges(1, [Edge((0,), 0.5)]), "alone")


def test_a_false_claim_is_found_when_a_topology_is_registered():
    def leans(size, step, nodes):
        matrix = torch.eye(size).roll(1, dims=1)
        return (matrix + torch.eye(size)) / 2

    refused(lambda: topologies.register("leans", FunctionTopology(leans, symmetric=True)), "not symmetric")
    refused(lambda: topologies.register("moves", FunctionTopology(_by_step, static=True)), "claims to be static")
    refused(lambda: topologies.register("ring", Star), "another topology")
    refused(lambda: topologies.register("hierarchical_x", Star), "cannot be used")
    refused(lambda: create("leans"), "no topology of this name", "shift_one", "register")


def _by_step(size, step, nodes):
    return RandomMatching().round(size, step)


def test_a_topology_may_refuse_sizes_and_still_be_registered():
    topologies.register("only_for_two", WeightedGraph([[0.5, 0.5], [0.5, 0.5]]))
    assert create("only-for-two").round(2, 1)[0].sources == ((1, 0.5),)
    refused(lambda: create("only_for_two").round(3, 1), "another number of ranks")


@pytest.mark.parametrize(
    "bad", [{"size": 0}, {"size": 2.0}, {"step": 0}, {"nodes": [0]}, {"nodes": [0, 1, 2]}], ids=repr
)
def test_arguments_are_checked(bad):
    refused(lambda: Ring().round(**{"size": 2, "step": 1, **bad}), next(iter(bad)))


def test_options_are_checked():
    refused(lambda: Torus(rows=2).round(5, 1), "multiple of 2")
    refused(lambda: ErdosRenyi(probability=1.5).round(5, 1), "0 to 1")
    refused(lambda: ErdosRenyi(probability=0.0).round(5, 1), "larger probability")
    refused(lambda: Cycle(()), "at least one")
    with pytest.raises(TypeError):
        create("ring", seed=1)


@pytest.mark.parametrize("name", [*NAMES, "hierarchical_erdos_renyi"])
def test_topologies_print_as_their_constructor_call_and_survive_pickle(name):
    topology = create(name)
    assert eval(repr(topology), vars(topologies)) == topology
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert isinstance(topology, Topology)
    assert create(topology) is topology
