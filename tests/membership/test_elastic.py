"""Exchanges in each step, or beside training, while islands die, go and come; or why there are none."""

import threading

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from bagua.algorithms import Algorithm, DionAlgorithm, LocalUpdates, registry
from bagua.errors import ConfigurationError, TooFewMembersError
from bagua.membership import ElasticSampler
from bagua.optim import DionOptimizer
from bagua.parallel import with_bagua
from bagua.testing import ThreadRanks, this_rank
from tests.algorithms.test_toys import QuickOneBitAdam, QuickOneBitLamb, QuickQAdam
from tests.contract.algorithms import optimizer_maker, promised_by, spread
from tests.harness import descend, loss_of, mean_gradients, mlp, train_steps, until
from tests.membership import training
from tests.membership.training import among, ends_of_each_fault, joined, new_store, train, train_to_a_fault, wrapped

pytestmark = pytest.mark.threads

#: Warm-ups end before islands go and come.
QUICK = {"qadam": QuickQAdam, "one_bit_adam": QuickOneBitAdam, "one_bit_lamb": QuickOneBitLamb}
OPTIONS = {
    "loco": {"warmup_steps": 0}, "sign_sgd": {"warmup_steps": 0}, "top_k": {"warmup_steps": 1, "density_steps": 2},
    "power_sgd": {"warmup_steps": 1}, "dion": {"matrix_rank": 2},
}  # fmt: skip
OF_GRADIENTS = [
    name
    for name in registry
    if not issubclass(registry.get(name), LocalUpdates)
    and any("gradients" in one.needs for one in registry.get(name)().every_exchange())
]
GOES_AFTER, COMES_AFTER, STEPS = 3, 5, 8


def optimizer_of(algorithm, model):
    if isinstance(algorithm, DionAlgorithm):
        return DionOptimizer(model.parameters(), lr=0.01, matrix_rank=algorithm.matrix_rank)
    return optimizer_maker(algorithm)(model.parameters())


def train_elastic(algorithm):
    """The weights of each island after each step, and who contributed to it: one goes, and comes again."""
    store = new_store()

    def train(islands, last):
        model, found, roster = mlp(islands.seat), [], islands._state.roster
        optimizer = optimizer_of(algorithm, model)
        with_bagua(model, [optimizer], algorithm, between=islands, elastic=True)
        for step in range(model.bagua_step + 1, last + 1):
            if step == COMES_AFTER and islands.seat < 3 and last == STEPS:
                until(lambda: any(seat > 2 and one.waiting for seat, one in roster.records.items()))
            train_steps(model, optimizer, islands.seat, [step])
            weights = parameters_to_vector(model.parameters()).detach()
            found.append(training.Outer(step, weights, islands.members().contributed))
        return found

    def island(number):
        rows = []
        for last in (GOES_AFTER, STEPS) if number == 2 else (STEPS,):
            with joined(store, 3) as islands:
                rows.append(train(islands, last))
        return rows

    return [row for rows in training.run_numbered(3, island) for row in rows]


def trained_whole(algorithm, crowds):
    """One process with the batches of those who contributed to each step."""
    model = mlp(0)
    optimizer = optimizer_of(algorithm, model)
    for step, seats in enumerate(crowds, start=1):
        mean_gradients(model, len(seats), lambda one, place, t=step, crowd=seats: loss_of(one, crowd[place], t))
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_islands_go_and_come_between_steps(name):
    """All hold the same bit by bit after each step, and what one process would, as near as the algorithm promises."""
    algorithm = QUICK.get(name, registry.get(name))(**OPTIONS.get(name, {}))
    if name == "scatter_gather_allreduce":
        with joined(new_store(), 1) as islands, pytest.raises(ConfigurationError, match="only sums and means"):
            with_bagua(mlp(), [], algorithm, between=islands, elastic=True)
        return
    by_step = training.check_equal(train_elastic(algorithm))
    crowds = [by_step[step].contributed for step in sorted(by_step)]
    assert sorted({len(crowd) for crowd in crowds}) == [2, 3]
    assert sorted(set().union(*crowds)) == [0, 1, 2, 3]
    distance = spread([{"": by_step[STEPS].weights}, {"": trained_whole(algorithm, crowds)}])
    assert distance < (1e-6 if promised_by(algorithm) == "exact" else 0.1)
    if name != "dion":  # Its optimizer steps along other directions when nothing is exchanged.
        assert promised_by(algorithm) == "exact" or distance > 1e-6


def elastic(islands):
    return wrapped(islands, "gradient_allreduce", momentum=0.9, elastic=True)


def check(rows, ranks=1):
    """All agree bit by bit, and have what plain torch has; who contributed to each step."""
    by_step = training.check_equal(rows)
    crowds = [by_step[step].contributed for step in sorted(by_step)]
    model = training.new_model(0).to(by_step[1].weights.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.RATE, momentum=0.9)
    for step, seats in enumerate(crowds, start=1):
        optimizer.zero_grad()
        for seat in seats:
            for rank in range(ranks):
                data = training.batch(seat, rank).to(model.weight.dtype)
                (model(data).square().sum() / ranks / len(seats)).backward()
        optimizer.step()
        torch.testing.assert_close(by_step[step].weights, model.weight.detach())
    return crowds


def test_gradients_are_means_over_islands_of_two_ranks():
    ranks = training.among_ranks(2, lambda islands: train(islands, elastic(islands), 3, period=1))
    assert check([row for rows in ranks for row in rows], training.RANKS) == [(0, 1)] * 3


def test_an_island_that_dies_in_a_step_costs_the_others_nothing():
    """They all make the step with it, or all without it; wherever in the exchange it dies."""
    seen = set()
    for ends in ends_of_each_fault(lambda fault: train_to_a_fault(fault, elastic, (1, 2, 4), period=1), most=6):
        rows = training.survivors(ends)
        assert len(rows) == 2, ends
        crowds = check(rows)
        assert (crowds[0], crowds[2:]) == ((0, 1, 2), [(0, 2)] * 2)
        seen.add(crowds[1])
    assert (0, 2) in seen


@pytest.mark.parametrize(
    ("algorithm", "options", "why"),
    [
        ("gradient_allreduce", {"elastic": False}, "gradients would be exchanged in each step"),
        ("gradient_allreduce", {"between": None}, "only islands come and go"),
        ("gradient_allreduce", {"elastic": 1}, "argument elastic"),
    ],
)
def test_what_cannot_be_elastic_is_refused(algorithm, options, why):
    with joined(new_store(), 1) as islands, pytest.raises(ConfigurationError, match=why):
        with_bagua(training.new_model(0), [], algorithm, **{"between": islands, "elastic": True, **options})


#: The exchange of a period starts with step 2, and is taken in with step 4.
PERIOD = 4
BESIDE_TRAINING = Algorithm.init("diloco", sync_every=PERIOD, overlap=2, outer_lr=0.7)


def learn(seat: int, options: dict[str, object], **where: object) -> list[torch.Tensor]:
    """Weights after each step, with a mean lent in the middle, and after the end, which comes in the middle of one."""
    model = training.filled(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)), seat)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.RATE / 5)
    with_bagua(model, optimizer, Algorithm.init("diloco", sync_every=PERIOD, **options), **where)
    data, found = torch.randn(4, 3, generator=torch.Generator().manual_seed(seat)), []

    def look() -> None:
        found.append(parameters_to_vector(model.parameters()).detach())

    for step in range(3 * PERIOD + 3):
        descend(optimizer, model(data).square().mean())
        look()
        if step == PERIOD + 2:
            with model.bagua_global_average():
                look()
    model.bagua_finish()
    look()
    return found


@pytest.mark.parametrize(
    "options",
    [{"overlap": 2, "blend": 0.5}, {"overlap": 3, "mix": "add"}, {"outer_lr": 0.7, "overlap": 1, "fragments": 2}],
    ids=str,
)
def test_islands_train_as_ranks_of_one_group_do(options):
    ours = dict(among(2, lambda islands: (islands.seat, learn(islands.seat, options, between=islands))))
    theirs = ThreadRanks(2).run(lambda: learn(this_rank.get().rank, options))
    for seat, weights in enumerate(theirs):
        assert all(torch.equal(one, other) for one, other in zip(ours[seat], weights, strict=True))


def test_an_island_trains_on_while_its_exchange_waits_for_another():
    trained = threading.Event()

    def island(islands):
        def before(step):
            if step == 2 and islands.seat:
                assert trained.wait(60)
            elif step == PERIOD and not islands.seat:
                trained.set()

        return train(islands, wrapped(islands, BESIDE_TRAINING), 2 * PERIOD, before, PERIOD)

    assert [one.contributed for one in training.check_equal(among(2, island)).values()] == [(0, 1)] * 2


def test_a_newcomer_comes_in_while_a_member_waits_in_an_exchange():
    """The member gives the exchange up, and makes it again with the newcomer, who has made the same steps."""
    store, flying, came = new_store(), threading.Event(), threading.Event()

    def island(number):
        def before(step):
            if number == 0 and step == 3:
                flying.set()
            elif number == 1 and step == 2:
                assert flying.wait(60)
                assert came.wait(60)
                until(lambda: islands.rest() or 2 in islands.members().in_epoch)

        assert number < 2 or flying.wait(60)
        with joined(store, 2) as islands:
            came.set() if number == 2 else None
            return train(islands, wrapped(islands, BESIDE_TRAINING), 3 * PERIOD, before, PERIOD)

    found = training.check_equal(training.run_numbered(3, island))
    assert [one.contributed for one in found.values()] == [(0, 1, 2)] * 3


def test_nobody_comes_in_while_something_is_under_way():
    rests = []

    def island(islands):
        model = wrapped(islands, BESIDE_TRAINING)
        rest = islands.rest
        object.__setattr__(islands, "rest", lambda: (rests.append((islands.seat, model.bagua_step + 1)), rest()))
        train(islands, model, 2 * PERIOD + 1, period=PERIOD)

    among(2, island)
    assert sorted(rests) == [(seat, step) for seat in (0, 1) for step in (1, 2, 5, 6, 9)]


def test_an_error_in_an_exchange_is_raised_where_its_result_is_due():
    def island(islands):
        model = wrapped(islands, BESIDE_TRAINING)
        with pytest.raises(TooFewMembersError):
            train(islands, model, PERIOD, lambda step: (islands.seat, step) == (1, 2) and training.vanish(islands))
        return model.bagua_step

    assert training.survivors(among(2, island, minimum=2, timeout_s=1.0)) == [PERIOD]


@pytest.mark.parametrize(("pace", "why"), [("own", "the steps of each"), ("equal", "the samples of each")])
def test_what_members_agree_on_does_not_change_meanwhile(pace, why):
    with joined(new_store(), 1) as islands:
        if pace == "equal":
            ElasticSampler(range(8), islands)
        with pytest.raises(ConfigurationError, match=why):
            wrapped(islands, Algorithm.init("diloco", sync_every=PERIOD, overlap=1, pace=pace))
