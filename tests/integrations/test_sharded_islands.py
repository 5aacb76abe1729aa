"""Islands that FSDP2 shards inside: each rank exchanges its shards with its counterparts, while islands go and come."""

import contextlib
import copy
import time
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bagua.comm
from bagua.algorithms import Algorithm, BetweenIslands, DiLoCoAlgorithm, How, LocalSGDAlgorithm, Sum
from bagua.comm import new_group, open_store
from bagua.errors import CollectiveMismatchError, ConfigurationError
from bagua.integrations.fsdp import _ForAllShards, exchange_shards
from bagua.membership import Islands
from bagua.membership.state import Deadlines
from tests.harness import State, assert_same_on_all_ranks, descend, loss_of, on_ranks, train_steps
from tests.integrations import test_fsdp as fsdp
from tests.integrations.test_fsdp import SHARDS, assert_near, mesh_of, optimizer_of, uneven, whole

PERIOD = 2
ALGORITHM = DiLoCoAlgorithm(PERIOD, outer_lr=0.7, outer_momentum=0.5)
#: Nobody is given up for being slow: this machine may be busy.
PATIENT = Deadlines(beat_s=0.02, silence_s=120.0, suspect_s=60.0, meet_s=60.0, poll_s=0.002)


def own_group(shards: int) -> bagua.comm.ProcessGroup:
    """The ranks of this island. Collective among all."""
    rank, everyone = bagua.comm.get_rank(), range(bagua.comm.get_world_size())
    groups = [new_group(list(everyone[first : first + shards])) for first in everyone[::shards]]
    return groups[rank // shards]


def joined(where: str, group: bagua.comm.ProcessGroup, name: str) -> Islands:
    """One of two islands that meet at ``where``, as each of its ranks has it."""
    ranks = group.duplicate("islands") if group.size > 1 else None
    options: dict[str, Any] = {"minimum": 1, "timeout_s": 240.0, "deadlines": PATIENT, "group": ranks}
    return Islands(open_store(where, 240.0), where, size=2, name=name, **options)


def begin(islands: Islands, mesh: Any, algorithm: Algorithm, seed: int = 0) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and what is exchanged for it."""
    model = uneven(seed)
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    optimizer = optimizer_of(model)
    return model, optimizer, exchange_shards(model, optimizer, algorithm, between=islands)


def train(islands: Islands, mesh: Any, seed: int, steps: int) -> dict[int, tuple[State, tuple[int, ...]]]:
    """By step after which islands exchanged, the weights of all shards, and who contributed."""
    model, optimizer, exchange = begin(islands, mesh, ALGORITHM, seed)
    found = {}
    for step in range(exchange.bagua_step + 1, steps + 1):
        if step == 4 * PERIOD:  # The exchange after this step has to see the one that came again.
            while not any(seat > 1 and one.waiting for seat, one in islands._state.roster.records.items()):
                time.sleep(0.002)
        train_steps(model, optimizer, bagua.comm.get_rank(), [step])
        if step % PERIOD == 0:
            found[step] = (whole(model), islands.members().contributed)
    exchange.bagua_close()
    return found


class BrokenDiskError(Exception):
    """What ends a job."""


def go_and_come_again(where: str) -> list[dict[int, tuple[State, tuple[int, ...]]]]:
    group, mesh = own_group(SHARDS), mesh_of(SHARDS)["shards"]
    rows, goes = [], bagua.comm.get_rank() >= SHARDS
    with contextlib.suppress(BrokenDiskError), joined(where, group, "a run") as islands:
        rows.append(train(islands, mesh, islands.seat, 2 * PERIOD if goes else 6 * PERIOD))
        if goes:
            raise BrokenDiskError
    if goes:
        with joined(where, group, "a run") as islands:
            rows.append(train(islands, mesh, 7, 6 * PERIOD))
    return rows


def in_one_piece(crowds: list[tuple[int, ...]], founder: dict[int, int]) -> list[State]:
    """The weights after each outer step, in plain torch: a whole model for each island, with the batches of its ranks.

    Args:
        crowds: seats that contributed to each outer step.
        founder: numbers of the islands, by seat.
    """
    anchor = dict(uneven(0).named_parameters())
    outer = torch.optim.SGD(anchor.values(), lr=0.7, momentum=0.5, nesterov=True)
    islands: dict[int, Any] = {}
    found = []
    for number, seats in enumerate(crowds):
        for seat in seats:
            if seat not in islands:
                model = uneven()
                optimizer = optimizer_of(model)
                if number:
                    optimizer.load_state_dict(copy.deepcopy(islands[seats[0]][1].state_dict()))
                islands[seat] = model, optimizer
        for seat in seats:
            model, optimizer = islands[seat]
            model.load_state_dict({name: one.detach() for name, one in anchor.items()})
            for step in range(number * PERIOD + 1, (number + 1) * PERIOD + 1):
                losses = [loss_of(model, SHARDS * founder[seat] + rank, step) for rank in range(SHARDS)]
                descend(optimizer, sum(losses) / fsdp.divisor_of(ALGORITHM))
        for name, one in anchor.items():
            ends = [islands[seat][0].get_parameter(name).detach() for seat in seats]
            one.grad = one.detach() - torch.stack(ends).mean(0)
        outer.step()
        found.append({name: one.detach().clone() for name, one in anchor.items()})
    return found


def test_an_island_of_shards_goes_and_comes_again(process_ranks, where):
    rows = process_ranks(4, go_and_come_again, where)
    stays, came = rows[0][0], rows[2][1]
    again = next(seat for seat in stays[6 * PERIOD][1] if seat > 1)
    first = stays[3 * PERIOD][1][0]
    crowds = [stays[step][1] for step in sorted(stays)]
    assert crowds == [(0, 1)] * 2 + [(first,)] * 2 + [(first, again)] * 2
    assert sorted(came) == [5 * PERIOD, 6 * PERIOD]
    wanted = in_one_piece(crowds, {first: 0, 1 - first: 1, again: 1})
    for row in (row for rank in rows for row in rank):
        for step, (weights, contributed) in row.items():
            assert_near(weights, wanted[step // PERIOD - 1])
            assert contributed == crowds[step // PERIOD - 1]


@on_ranks(4, assert_same_on_all_ranks, pool="process_pool")
def test_islands_of_shards_have_a_pace_of_their_own(where: str) -> State:
    """A step of the second island takes thrice as long. Returns the weights after each period of six steps."""
    period, now = 6, [0.0]
    mesh = mesh_of(SHARDS)["shards"]
    with joined(where, own_group(SHARDS), "a run") as islands:
        islands.pace._clock = lambda: now[0]
        model, optimizer, exchange = begin(islands, mesh, LocalSGDAlgorithm(period, pace="own"), islands.seat)
        found, steps = {}, 0
        while exchange.bagua_step < 3 * period:
            now[0] += 1.0 + 2.0 * islands.seat
            steps += 1
            train_steps(model, optimizer, bagua.comm.get_rank(), [steps])
            if exchange.bagua_step % period == 0:
                found |= {f"{name} after {exchange.bagua_step}": one for name, one in whole(model).items()}
        exchange.bagua_close()
        assert (islands.pace.numbers, steps) == ({0: 6, 1: 2}, (18, 10)[islands.seat])
        return found


def bytes_between(shards: int, where: str) -> int:
    with joined(where, own_group(shards), f"islands of {shards}") as islands:
        mesh = mesh_of(shards)["shards"]
        return fsdp.bytes_of_wide(mesh, lambda _: islands._state.link[1].global_communicator, between=islands)


def test_each_rank_sends_as_many_times_less_between_islands_as_there_are_shards(process_ranks, where):
    one, two = process_ranks(2, bytes_between, 1, where), process_ranks(4, bytes_between, 2, where)
    assert one[0] >= 4 * 63 * 64
    assert all(one[0] * 0.45 <= sent <= one[0] * 0.55 for sent in two)


@on_ranks(4, pool="process_pool")
def test_a_load_after_the_first_exchange_is_refused(where: str) -> None:
    with joined(where, own_group(SHARDS), "a run") as islands:
        model, optimizer, exchange = begin(islands, mesh_of(SHARDS)["shards"], LocalSGDAlgorithm(1))
        saved = exchange.bagua_state_dict()
        exchange.bagua_load_state_dict(saved)
        train_steps(model, optimizer, bagua.comm.get_rank(), [1])
        with pytest.raises(ConfigurationError, match=f"seat {islands.seat} loads weights or state"):
            exchange.bagua_load_state_dict(saved)
        exchange.bagua_close()


def test_an_exchange_for_all_shards_is_as_the_one_that_it_goes_around():
    """What is not handed on would be as of an exact sum among ranks."""
    own = {name for one in (Sum, BetweenIslands) for name in vars(one) if name in vars(How)}
    handed_on = set(vars(_ForAllShards)) | {"prepare", "blocking", "side_by_side"}  # It waits, for one at a time.
    assert {name for name in own if not name.startswith("__")} - {"_abc_impl"} <= handed_on


@on_ranks(2, pool="process_pool")
def test_what_is_no_island_of_shards_is_refused(where: str) -> None:
    rank = bagua.comm.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    model = uneven()
    fully_shard(model, mesh=mesh)
    for arguments in ({}, {"process_group": mesh.get_group(), "between": islands_alone(where)}):
        with pytest.raises(ConfigurationError, match="replicas are known in one way"):
            exchange_shards(model, [], "diloco", **arguments)
    with pytest.raises(ConfigurationError, match=rf"ranks \[{1 - rank}\], too"):
        exchange_shards(model, [], "diloco", between=islands_alone(where))
    differ = pytest.raises(CollectiveMismatchError, match="algorithms")
    with joined(where, bagua.comm.get_default_group(), "all") as islands, differ:
        exchange_shards(model, [], DiLoCoAlgorithm(2 + rank), between=islands)


def islands_alone(where: str) -> Islands:
    """A process that has joined by itself."""
    with joined(where, bagua.comm.solo_group(), f"rank {bagua.comm.get_rank()}") as islands:
        return islands
