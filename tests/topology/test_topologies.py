"""Every topology keeps the mean of all ranks and brings them together, as fast as published."""

import itertools
import math
import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bagua.topology as topologies
from bagua.errors import ConfigurationError
from bagua.topology import Edge, Hierarchical, OnePeerExponential, Ring, Round, ShiftOne, Torus, consensus_rate, create
from tests.topologies import DRAWN_PAIRS, ONE_WAY, STAR, Made, drawn_pairs, graph, one_way

NAMES = list(topologies.available())
BETWEEN_HOSTS = [*map(create, ("complete", "ring", "shift_one", "one_peer_exponential")), STAR, ONE_WAY, DRAWN_PAIRS]


def assert_doubly_stochastic(matrix: torch.Tensor) -> None:
    ones = torch.ones(len(matrix), dtype=matrix.dtype)
    assert matrix.min() >= -1e-12
    torch.testing.assert_close(matrix.sum(0), ones)
    torch.testing.assert_close(matrix.sum(1), ones)


@pytest.mark.parametrize("name", NAMES)
def test_every_round_is_doubly_stochastic_and_what_else_it_claims(name):
    topology = create(name)
    for size in range(1, 18):
        topology.check(size)
        for step in range(1, 5):
            assert_doubly_stochastic(topology.matrix(size, step))


@pytest.mark.parametrize("between_hosts", BETWEEN_HOSTS, ids=str)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_between_uneven_hosts_the_matrix_over_ranks_is_doubly_stochastic(between_hosts, sizes, seed):
    nodes = [host for host, size in enumerate(sizes) for _ in range(size)]
    random.Random(seed).shuffle(nodes)
    for topology, rounds in ((Hierarchical(between_hosts), 4), (create("alternating_exp_ring"), 6)):
        topology.check(len(nodes), nodes, rounds=rounds)
        for step in range(1, rounds + 1):
            assert_doubly_stochastic(topology.matrix(len(nodes), step, nodes))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_come_together(name):
    for size in (1, 2, 3, 5, 6, 8):
        assert consensus_rate(create(name), size) < 0.97, size


@pytest.mark.parametrize("between_hosts", BETWEEN_HOSTS, ids=str)
def test_ranks_on_uneven_hosts_come_together(between_hosts):
    assert consensus_rate(Hierarchical(between_hosts), 9, nodes=[0, 1, 1, 2, 2, 2, 3, 3, 4]) < 0.97


def test_a_period_is_what_it_says():
    for topology, size in itertools.product(map(create, NAMES), (1, 2, 3, 4, 6, 7)):
        period = topology.period(size)
        for step in (1, 2, 3) if period else ():
            assert topology.round(size, step) == topology.round(size, step + period), (topology, size)


@pytest.mark.parametrize(
    ("topology", "size", "gap"),
    [
        (Ring(), 3, 1.0), (Ring(), 8, 2 / 3 * (1 - math.cos(2 * math.pi / 8))),
        (Ring(), 15, 2 / 3 * (1 - math.cos(2 * math.pi / 15))), (STAR, 7, 1 / 7), (create("complete"), 9, 1.0),
        (Torus(), 25, (2 - 2 * math.cos(2 * math.pi / 5)) / 5), (Torus(), 12, (2 - 2 * math.cos(2 * math.pi / 4)) / 5),
    ],
    ids=repr,
)  # fmt: skip
def test_rates_follow_from_the_published_spectral_gaps(topology, size, gap):
    assert consensus_rate(topology, size) == pytest.approx(1 - gap, abs=1e-9)


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
    for k, rank in itertools.product(range(size), range(size)):
        peer = half + (k + rank) % half if rank < half else (rank - half - k) % half
        assert ShiftOne().round(size, k + 1)[rank].sources == ((peer, 0.5),)


@pytest.mark.parametrize("topology", [topologies.AlternatingRing(), ShiftOne(), OnePeerExponential()], ids=repr)
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


def test_what_a_rank_is_told_is_a_row_of_the_matrix():
    for name in [*NAMES, "hierarchical_ring"]:
        mixing = create(name).round(7, 2)
        matrix, takers = torch.zeros(7, 7, dtype=torch.float64), set()
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
    while any(waiting.values()):
        now = {rank: turns[0] for rank, turns in waiting.items() if turns}
        nothing = {(None, rank) for rank in now} | {(rank, None) for rank in now}
        sent = {(rank, turn.destination) for rank, turn in now.items()}
        passed = nothing | (sent & {(turn.source, rank) for rank, turn in now.items()})
        moving = [rank for rank, turn in now.items() if {(turn.source, rank), (rank, turn.destination)} <= passed]
        if not moving:
            return False
        for rank in moving:
            waiting[rank].pop(0)
    return True


#: Each of eight ranks takes values of those 1, 2 and 4 before it.
THREE_BEFORE = graph(sum(torch.eye(8).roll(distance, 0) for distance in (0, 1, 2, 4)) / 4)


@pytest.mark.parametrize(
    ("topology", "turns"), [(Ring(), 2), (THREE_BEFORE, 3), (create("complete"), 7), (ShiftOne(), 1)]
)
def test_regular_graphs_need_as_many_turns_as_neighbours(topology, turns):
    assert {len(topology.round(8, 1).turns(rank)) for rank in range(8)} == {turns}


def test_hosts_of_equal_size_mix_as_ranks_would_and_no_hosts_as_the_flat_form():
    nodes = [0, 1, 2, 0, 1, 2]
    expected = torch.kron(torch.full((2, 2), 0.5, dtype=torch.float64), STAR.matrix(3))
    assert torch.allclose(Hierarchical(STAR).matrix(6, 1, nodes), expected)
    assert torch.allclose(Hierarchical(Torus()).matrix(9), Torus().matrix(9))


def test_alternating_exp_ring_gives_each_pair_of_hosts_a_round_together_and_one_apart():
    nodes = [0, 0, 1, 1, 2, 2, 3, 3]
    seen = [[edge.ranks for edge in create("alternating_exp_ring").round(8, step, nodes).edges] for step in (1, 2)]
    assert seen == [[(0, 1), (2, 3), (4, 5, 6, 7)], [(0, 1, 2, 3), (4, 5), (6, 7)]]
    assert consensus_rate(create("alternating_exp_ring"), 8, nodes) == 0.0


def refused(build, *words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build()
    for word in words:
        assert word in str(caught.value)


def test_a_matrix_that_is_not_doubly_stochastic_is_refused_and_the_place_is_named():
    for matrix, *words in (
        ([[0.5, 0.5], [0.25, 0.75]], "given to rank 0", "0.75"),
        ([[0.5, 0.4], [0.5, 0.6]], "rank 0", "0.9"),
        ([[1.5, -0.5], [-0.5, 1.5]], "0 to 1"),
        ([[0.5, 0.5]], "square"),
        ([[float("nan"), 1.0], [1.0, 0.0]], "0 to 1"),
        ([[1.0]], "another number of ranks"),
    ):
        refused(lambda matrix=matrix: graph(matrix).check(2), *words)


def test_edges_that_do_not_cover_all_ranks_once_false_claims_and_unknown_names_are_refused():
    refused(lambda: Round.from_edges(3, [Edge((0, 1), 0.5)]), "exactly one edge", "edge of its own")
    refused(lambda: Round.from_edges(2, [Edge((0, 1), 0.5), Edge((1,), 1.0)]), "exactly one edge")
    refused(lambda: Round.from_edges(2, [Edge((0, 1), 1.5)]), "0 to 1")
    refused(lambda: Round.from_edges(1, [Edge((0,), 0.5)]), "alone")
    refused(lambda: Made(one_way, symmetric=True).check(3), "not symmetric")
    refused(lambda: Made(drawn_pairs, static=True).check(8), "claims to be static")
    refused(lambda: create("leans"), "no topology of this name", "shift_one", "of your own")


@pytest.mark.parametrize(
    "bad", [{"size": 0}, {"size": 2.0}, {"step": 0}, {"nodes": [0]}, {"nodes": [0, 1, 2]}], ids=repr
)
def test_arguments_are_checked(bad):
    refused(lambda: Ring().round(**{"size": 2, "step": 1, **bad}), next(iter(bad)))


@pytest.mark.parametrize("name", [*NAMES, "hierarchical_torus"])
def test_topologies_print_as_their_constructor_call_and_survive_pickle(name):
    topology = create(name)
    assert eval(repr(topology), {one: getattr(topologies, one) for one in topologies.__all__}) == topology
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert isinstance(topology, topologies.Topology)
    assert create(topology) is topology
