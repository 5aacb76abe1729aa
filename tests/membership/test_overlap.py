"""Exchanges between islands that go on beside training: what they give, and who comes and goes meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch

from bagua.algorithms import Algorithm
from bagua.algorithms.local.diloco import DiLoCoAlgorithm
from bagua.errors import ConfigurationError, TooFewMembersError
from bagua.membership import ElasticSampler
from bagua.parallel import with_bagua
from bagua.testing import ThreadRanks, this_rank
from tests.harness import until
from tests.membership.training import (
    RATE,
    among,
    check_equal,
    joined,
    new_store,
    run_numbered,
    survivors,
    train,
    vanish,
    wrapped,
)

pytestmark = pytest.mark.threads
#: The exchange of a period starts with step 2, and is taken in with step 4.
PERIOD = 4
STREAMING = {"outer_lr": 0.7, "overlap": 1, "fragments": 2}


def beside_training() -> Algorithm:
    return Algorithm.init("diloco", sync_every=PERIOD, overlap=2, outer_lr=0.7)


class Layers(torch.nn.Sequential):
    def __init__(self, seat: int) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seat)))


def learn(seat: int, options: dict[str, object], **where: object) -> list[torch.Tensor]:
    """Weights after each step, with a mean lent in the middle, and after the end, which comes in the middle of one."""
    model = Layers(seat)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE / 5)
    with_bagua(model, optimizer, DiLoCoAlgorithm(PERIOD, **options), **where)  # type: ignore[arg-type]
    data, found = torch.randn(4, 3, generator=torch.Generator().manual_seed(seat)), []

    def look() -> None:
        found.append(torch.cat([one.detach().reshape(-1) for one in model.parameters()]))

    for step in range(3 * PERIOD + 3):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        look()
        if step == PERIOD + 2:
            with model.bagua_global_average():
                look()
    model.bagua_finish()
    look()
    return found


@pytest.mark.parametrize("options", [{"overlap": 2, "blend": 0.5}, {"overlap": 3, "mix": "add"}, STREAMING], ids=str)
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

        return train(islands, wrapped(islands, beside_training()), 2 * PERIOD, before, PERIOD)

    assert [one.contributed for one in check_equal(among(2, island)).values()] == [(0, 1)] * 2


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

        if number == 2:
            assert flying.wait(60)
        with joined(store, 2) as islands:
            came.set() if number == 2 else None
            model = wrapped(islands, beside_training())
            return train(islands, model, 3 * PERIOD, before, PERIOD)

    rows = run_numbered(3, island)
    assert [one.contributed for one in check_equal(rows).values()] == [(0, 1, 2)] * 3


def test_nobody_comes_in_while_something_is_under_way():
    rests = []

    def island(islands):
        model = wrapped(islands, beside_training())
        rest = islands.rest
        object.__setattr__(islands, "rest", lambda: (rests.append((islands.seat, model.bagua_step + 1)), rest()))
        train(islands, model, 2 * PERIOD + 1, period=PERIOD)

    among(2, island)
    assert sorted(rests) == [(seat, step) for seat in (0, 1) for step in (1, 2, 5, 6, 9)]


def test_an_error_in_an_exchange_is_raised_where_its_result_is_due():
    def island(islands):
        model = wrapped(islands, beside_training())
        with pytest.raises(TooFewMembersError):
            train(islands, model, PERIOD, lambda step: (islands.seat, step) == (1, 2) and vanish(islands))
        return model.bagua_step

    assert survivors(among(2, island, minimum=2, timeout_s=1.0)) == [PERIOD]


@pytest.mark.parametrize(("pace", "why"), [("own", "the steps of each"), ("equal", "the samples of each")])
def test_what_members_agree_on_does_not_change_meanwhile(pace, why):
    with joined(new_store(), 1) as islands:
        if pace == "equal":
            ElasticSampler(range(8), islands)
        with pytest.raises(ConfigurationError, match=why):
            wrapped(islands, Algorithm.init("diloco", sync_every=PERIOD, overlap=1, pace=pace))
