"""Islands that train each at its own pace, and come to each outer step together. No clock here is a real one."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.algorithms import Algorithm, Every, Parts
from bagua.comm import get_rank, solo_group
from bagua.engine.options import EngineOptions
from bagua.engine.state.equality import EqualityCheck
from bagua.errors import ConfigurationError
from bagua.membership import Announced, Pace, contributions, participant
from bagua.membership.islands import write_state
from bagua.membership.pace import numbers_of
from bagua.parallel import with_bagua
from bagua.testing.ranks import RankDiedError
from tests.harness import descend
from tests.membership import training
from tests.membership.training import RATE, among, batch, joined, new_store, vanish

pytestmark = pytest.mark.threads

H = 6
#: Seconds of a step, by seat: the second island is three times slower than the first.
STEP_S = (1.0, 3.0, 2.0)
OWN = Algorithm.init("local_sgd", sync_every=H, pace="own")

paces = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)
periods = st.integers(1, 40)


@given(step_s=paces, period=periods)
def test_numbers_are_those_of_the_formula_and_the_fastest_makes_a_whole_period(step_s, period):
    found = numbers_of({seat: Announced(one) for seat, one in enumerate(step_s)}, period)
    fastest = min(step_s)
    assert found == {seat: max(1, round(period * fastest / one)) for seat, one in enumerate(step_s)}
    assert found[step_s.index(fastest)] == period


def test_who_has_measured_nothing_counts_as_equal():
    assert numbers_of({0: Announced(1.0), 3: Announced(), 4: Announced(2.0)}, 8) == {0: 8, 3: 8, 4: 4}
    assert numbers_of({0: Announced(), 1: Announced()}, 8) == {0: 8, 1: 8}


def events_of(seat: int, step_s: list[float], period: int, parts: Parts, count: int):
    """What a member exchanges in so many periods, and how many steps it makes in each but the first."""
    pace, when = Pace(seat), Every(period)
    found, steps, done = [], [0] * count, 0
    while done < count * period:
        stride = pace.stride(done, period)
        steps[done // period] += 1
        done += stride
        for part in range(parts.n):
            if when.due(done, parts.shift(part, period), stride):
                found.append((when.round(done, parts.shift(part, period)), part))
                pace.agree({other: Announced(one) for other, one in enumerate(step_s)}, part, period)
    return found, steps[1:], pace.numbers


@given(step_s=paces, period=periods, parts=st.integers(1, 8))
def test_all_exchange_the_same_in_the_same_order_whatever_their_paces(step_s, period, parts):
    cut = Parts(min(parts, period), "bytes")
    told = [events_of(seat, step_s, period, cut, 4) for seat in range(len(step_s))]
    for seat, (events, steps, numbers) in enumerate(told):
        assert events == told[0][0]
        assert numbers == told[0][2]
        assert steps == [numbers[seat]] * 3
    assert [part for _, part in told[0][0]] == list(range(cut.n)) * 4


@given(numbers=st.lists(st.integers(1, 40), min_size=1, max_size=6), period=periods)
def test_a_period_ends_with_a_step_whatever_its_number_was_before(numbers, period):
    """Numbers change in the middle of a period, too, where parts of a model are exchanged one after the other."""
    pace, done = Pace(0), 0
    for number in [*numbers, *numbers]:
        pace.numbers = {0: number}
        stride = pace.stride(done, period)
        assert 1 <= stride <= period - done % period
        done += stride


def test_a_mean_counts_by_tokens_where_all_count_them_and_else_by_steps():
    told = {0: Announced(1.0, 6, 60.0), 1: Announced(3.0, 2, 40.0)}
    assert [contributions(told, seat) for seat in told] == [100 / 60, 100 / 40]
    told[1] = told[1]._replace(tokens=0.0)
    assert [contributions(told, seat) for seat in told] == [8 / 6, 8 / 2]
    told[1] = Announced()
    assert [contributions(told, seat) for seat in told] == [1.0, float("inf")]
    assert contributions({0: Announced(), 1: Announced()}, 0) == 2


def test_the_median_of_the_last_period_is_announced_without_what_was_waited():
    now = [0.0]
    pace = Pace(0, lambda: now[0])
    for took in (9.0, 9.0, 9.0, 1.0, 50.0, 3.0):
        now[0] += took
        with pace.waiting():
            now[0] += 100.0
        pace.step()
    assert pace.announce("part", 3).step_s == 3.0
    assert pace.announce("part", 1).step_s == 3.0
    assert pace.announce("part", 5).step_s == 9.0
    assert pace.announce("part", 5).steps == 6


class Member:
    """An island that trains two layers by a clock of its own, whose steps take ``step_s`` seconds."""

    def __init__(self, islands, algorithm, step_s, tokens=0):
        self.islands, self.step_s, self.tokens = islands, step_s, tokens
        self.now = 0.0
        islands.pace._clock = lambda: self.now
        self.model, self.steps = new_model(islands.seat), 0
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        with_bagua(self.model, optimizer, algorithm, between=islands)

    def train(self, end, before=lambda: None):
        """Train up to a step of the fastest one; after each period: its end, own steps so far, and the weights."""
        found = []
        while self.model.bagua_step < end:
            before()
            self.now += self.step_s
            if self.tokens:
                self.islands.count_tokens(self.tokens)
            training.learn(self.model, batch(self.islands.seat).double())
            self.steps += 1
            if self.model.bagua_step % H == 0:
                found.append((self.model.bagua_step, self.steps, weights_of(self.model)))
        return found


def of_members(count, algorithm, job, tokens=(0, 0, 0), **options):
    """What ``job(member)`` returns on each of so many islands, by seat."""

    def island(islands):
        return islands.seat, job(Member(islands, algorithm, STEP_S[islands.seat], tokens[islands.seat]))

    return [found for _, found in sorted(among(count, island, **options), key=lambda end: end[0])]


def new_model(seat):
    layers = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    return training.filled(layers.double(), seat)


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_equal(found, parts=1):
    """All have the same weights, bit by bit, after each period; of two parts the last one."""
    for rows in zip(*found, strict=True):
        for end, _, weights in rows[1:]:
            assert end == rows[0][0]
            for here, there in list(zip(weights, rows[0][2], strict=True))[parts - 1 :]:
                assert torch.equal(here, there)


def expected(algorithm, parts, tokens, periods):
    """The weights after each period, and the steps of each member up to there, in plain torch."""
    models = [new_model(0) for _ in STEP_S]
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in models]
    anchor = [torch.nn.Parameter(one) for one in weights_of(models[0])]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.6, nesterov=True)
    slow = [torch.zeros_like(one) for one in anchor]
    numbers = [H] * len(STEP_S)
    at, made = [0] * len(STEP_S), [0] * len(STEP_S)
    since = [[0] * len(STEP_S) for _ in range(parts)]
    found = []
    for period in range(periods):
        for part in range(parts):
            due = period * H + (part + 1) * H // parts
            for seat, model in enumerate(models):
                while at[seat] < due:
                    grid = [period * H + u * H // numbers[seat] for u in range(1, numbers[seat] + 1)]
                    at[seat] = next(end for end in grid if end > at[seat])
                    descend(optimizers[seat], model(batch(seat).double()).square().sum())
                    made[seat] += 1
            counts = [(now - before) * (one or 1) for now, before, one in zip(made, since[part], tokens, strict=True)]
            since[part] = list(made)
            for layer in range(2) if parts == 1 else [part]:
                ends = [weights_of(model)[layer] for model in models]
                mean = sum(count * end for count, end in zip(counts, ends, strict=True)) / sum(counts)
                with torch.no_grad():
                    if algorithm == "slowmo":
                        slow[layer].mul_(0.6).add_((anchor[layer] - mean) / RATE)
                        mean = anchor[layer] - RATE * slow[layer]
                    elif algorithm == "diloco":
                        outer.zero_grad()
                        anchor[layer].grad = anchor[layer] - mean
                        outer.step()
                        mean = anchor[layer].detach().clone()
                    anchor[layer].copy_(mean)
                    for model in models:
                        list(model.parameters())[layer].copy_(mean)
            numbers = [max(1, round(H * min(STEP_S) / one)) for one in STEP_S]
        found.append((list(made), weights_of(models[0])))
    return found


@pytest.mark.parametrize("tokens", [(0, 0, 0), (10, 30, 20)], ids=["steps", "tokens"])
@pytest.mark.parametrize(
    ("algorithm", "options", "parts"),
    [
        ("local_sgd", {}, 1),
        ("slowmo", {}, 1),
        ("diloco", {"outer_lr": 0.7, "outer_momentum": 0.6}, 1),
        ("diloco", {"outer_lr": 0.7, "outer_momentum": 0.6, "fragments": 2}, 2),
        ("sparse_loco", {"start_after": 0, "block_numel": 8, "kept": 8, "value_bits": None, "average": "all"}, 1),
    ],
    ids=["local_sgd", "slowmo", "diloco", "streaming", "sparse_loco"],
)
def test_members_of_unequal_pace_train_as_plain_torch_does(algorithm, options, parts, tokens):
    """Each makes its number of steps, and counts by what it has trained on."""
    chosen = Algorithm.init(algorithm, sync_every=H, pace="own", **options)
    found = of_members(3, chosen, lambda member: member.train(4 * H), tokens)
    check_equal(found, parts)
    for number, (made, weights) in enumerate(expected(algorithm, parts, tokens, 4)):
        assert [rows[number][1] for rows in found] == made
        torch.testing.assert_close(found[0][number][2], weights, rtol=0, atol=1e-12)


def test_a_member_that_changes_its_pace_makes_another_number_of_steps():
    def train(member):
        def change():
            if member.islands.seat == 1 and member.model.bagua_step == 2 * H + 3:  # In the middle of a period.
                member.step_s = 1.0
            if member.islands.seat == 0 and member.model.bagua_step == 3 * H:
                member.step_s = 2.0

        return member.train(6 * H, change), member.islands.pace.numbers

    (fast, numbers), (slow, others) = of_members(2, OWN, train)
    check_equal([fast, slow])
    assert [row[1] for row in fast] == [6, 12, 18, 24, 27, 30]
    # Of two steps one took 3 s and one 1 s, which is a median of 2 s: 3 steps, and then as the other one.
    assert [row[1] for row in slow] == [6, 8, 10, 13, 19, 25]
    assert numbers == others == {0: 3, 1: 6}


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("place", ["a step", "an exchange"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_that_dies_leaves_the_others_a_pace_of_their_own(fragments, place, victim):
    algorithm = Algorithm.init("diloco", sync_every=H, pace="own", fragments=fragments)

    def island(islands):
        member = Member(islands, algorithm, STEP_S[islands.seat])

        def die():
            if islands.seat == victim and member.model.bagua_step == 2 * H:
                if place == "a step":
                    vanish(islands)
                islands._participant.exchange = lambda *_: vanish(islands)

        return member.train(5 * H, die), islands.pace.numbers, islands.members().contributed

    ends = among(3, island)
    assert sum(isinstance(end, RankDiedError) for end in ends) == 1, ends
    found = training.survivors(ends)
    check_equal([rows for rows, *_ in found], fragments)
    left = {seat: step_s for seat, step_s in enumerate(STEP_S) if seat != victim}
    for _, numbers, contributed in found:
        assert contributed == tuple(left)
        assert numbers == {seat: round(H * min(left.values()) / step_s) for seat, step_s in left.items()}


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_a_newcomer_begins_with_a_whole_period_and_then_has_a_pace_of_its_own(fragments, early, monkeypatch):
    monkeypatch.setattr(participant, "_ROUNDS", participant._ROUNDS if early else 0)
    algorithm = Algorithm.init("diloco", sync_every=H, pace="own", fragments=fragments)
    settled = threading.Event()

    def island(store, number):
        late = number == 2
        assert not late or settled.wait(60)
        with joined(store, 2, minimum=1) as islands:
            member = Member(islands, algorithm, STEP_S[islands.seat])
            assert not late or set(islands.pace.numbers) == {0, 1}
            begun = member.model.bagua_step
            found, ends = [], 0
            while ends < 3:  # Outer steps with all three.
                end = member.model.bagua_step
                found += member.train(end + H - end % H)
                ends += islands.members().contributed == (0, 1, 2)
                if len(found) == 2:
                    settled.set()
            return islands.seat, begun, found, islands.pace.numbers

    ends = sorted(training.run_numbered(3, island, new_store()), key=lambda one: one[0])
    shared = min(len(rows) for _, _, rows, _ in ends)
    check_equal([rows[-shared:] for _, _, rows, _ in ends], fragments)
    for *_, numbers in ends:
        assert numbers == {0: 6, 1: 2, 2: 3}
    _, begun, rows, _ = ends[2]
    made = [row[1] for row in rows]
    # The rest of the period in which it came, step by step, at least until its first contribution.
    assert made[0] == rows[0][0] - begun or (fragments > 1 and made[0] >= min(H // 2, rows[0][0] - begun))
    assert made[-1] - made[-2] == 3


def test_a_run_that_is_resumed_goes_on_with_the_numbers_of_its_seats(tmp_path):
    file = tmp_path / "state.pt"

    def save(member):
        found, islands = member.train(2 * H), member.islands
        if islands.seat == 0:
            write_state(file, islands._facts, islands._state.give())
        return found

    def go_on(member):
        assert member.islands.pace.numbers == {0: 6, 1: 2}
        return member.train(3 * H)

    check_equal(of_members(2, OWN, save))
    ends = of_members(2, OWN, go_on, resume=file)
    check_equal(ends)
    assert [rows[-1][1] for rows in ends] == [6, 2]


def test_means_at_an_end_count_by_what_was_trained_since_the_last_outer_step():
    def finish(member):
        member.train(H)
        member.train(H + 3)
        own = weights_of(member.model)
        for _ in range(2):  # The first one changes nothing for the second.
            with member.model.bagua_global_average():
                mean = weights_of(member.model)
        member.model.bagua_finish()
        finished = weights_of(member.model)
        member.model.bagua_finish()  # Nobody has learned anything since.
        return own, mean, finished, weights_of(member.model)

    (first, *means), (second, *others) = of_members(2, OWN, finish)
    for found in (*means, *others):
        for one, other, mean in zip(first, second, found, strict=True):
            torch.testing.assert_close(mean, (3 * one + other) / 4, rtol=0, atol=1e-12)


def test_the_ranks_of_an_island_have_one_pace_and_count_their_tokens_together():
    def rank(islands):
        slower = 1.0 + get_rank() / 10  # Each rank measures for itself.
        member = Member(islands, OWN, STEP_S[islands.seat] * slower, 10 * (1 + get_rank()))
        found = member.train(3 * H)
        return islands.seat, member.steps, islands.pace.numbers, found, islands.announce("another part", H)

    islands = training.among_ranks(2, rank)
    check_equal([rows for ranks in islands for *_, rows, _ in ranks])
    for ranks in islands:
        for seat, steps, numbers, _, announced in ranks:
            assert numbers == {0: 6, 1: 2}
            assert steps == (18, 10)[seat]
            assert announced == Announced(pytest.approx((2.1, 6.3)[seat]), 2 * steps, 30 * steps)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [("diloco", "eager", True), ("diloco", "start_after", 3), ("local_sgd", "pace", "fast")],
)
def test_what_has_no_meaning_with_a_pace_of_its_own_is_refused(name, argument, value):
    with pytest.raises(ConfigurationError, check=lambda error: error.argument == argument):
        Algorithm.init(name, **{"sync_every": H, "pace": "own", argument: value})


@pytest.mark.parametrize("name", ["local_sgd", "slowmo", "diloco"])
def test_ranks_of_one_group_are_refused(name):
    with pytest.raises(ConfigurationError, match="only islands agree on a pace for each") as caught:
        with_bagua(new_model(0), [], Algorithm.init(name, pace="own"), solo_group())
    assert caught.value.argument == "pace"


def test_negative_tokens_are_refused():
    with joined(new_store(), 1) as islands, pytest.raises(ConfigurationError, match="tokens"):
        islands.count_tokens(-1)


def test_a_step_that_stands_for_several_is_compared_once():
    """The ranks of an island look at their weights when the step to look in is among those that one stands for."""
    check, looked = EqualityCheck(Algorithm.init("diloco"), EngineOptions(check_every=4)), []
    for step in range(0, 30, 3):
        if check.due <= step:
            looked.append(step)
            check.due = check._after(step)
    assert looked == [0, 6, 9, 12, 18, 21, 24]
