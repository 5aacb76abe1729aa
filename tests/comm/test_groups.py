"""Groups: hosts, sub-groups, duplicates, groups of torch; who is in them and who need not be."""

import pickle
from copy import deepcopy
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import bagua.comm
import bagua.parallel as bagua_parallel
import bagua.torch_api
from bagua import errors
from bagua.algorithms import AsyncModelAverageAlgorithmImpl
from bagua.comm import NON_MEMBER, BackgroundThread, NonMember, ProcessGroup, Recorder, as_group, functional
from tests.harness import on_ranks


def total(communicator):
    """The sum of (global rank + 1) over a communicator."""
    tensor = torch.tensor([communicator.ranks[communicator.rank] + 1.0])
    communicator.allreduce(tensor)
    return tensor.item()


def look_at_hosts():
    group = bagua.comm.get_default_group()
    world, intra, inter = group.global_communicator, group.intra_node_communicator, group.inter_node_communicator
    getters = group.get_global_communicator, group.get_intra_node_communicator, group.get_inter_node_communicator
    return {
        "node_sizes": group.node_sizes, "place": (group.node_rank, group.local_rank, group.local_size),
        "module": (bagua.comm.get_node_rank(), bagua.comm.get_local_rank(), bagua.comm.get_local_size()),
        "world": total(world), "intra": (intra.ranks, total(intra)),
        "inter": (inter.ranks, total(inter)) if inter else None,
        "getters": [getter() is one for getter, one in zip(getters, (world, intra, inter), strict=True)],
        "are global": (intra is world, inter is world),
    }  # fmt: skip


@pytest.mark.parametrize("hosts", [[3], [2, 1], [1, 1, 1], [1, 3, 2], [2, 2]], ids=str)
def test_hosts_and_their_communicators(ranks, hosts):
    size = sum(hosts)
    firsts = [sum(hosts[:node]) for node in range(len(hosts))]
    for rank, seen in enumerate(ranks(size, look_at_hosts, hosts=hosts)):
        node = max(node for node, first in enumerate(firsts) if first <= rank)
        local, place = range(firsts[node], firsts[node] + hosts[node]), (node, rank - firsts[node], hosts[node])
        assert seen == {
            "node_sizes": tuple(hosts), "place": place, "module": place, "world": size * (size + 1) / 2,
            "intra": (tuple(local), sum(other + 1.0 for other in local)),
            "inter": (tuple(firsts), sum(first + 1.0 for first in firsts)) if rank in firsts else None,
            "getters": [True] * 3, "are global": (len(hosts) == 1, len(hosts) == size),
        }, f"rank {rank}"  # fmt: skip


@on_ranks(4, pool="rank_pool", hosts=[2, 2])
def test_a_group_in_a_group_needs_nobody_from_outside():
    outer = bagua.comm.new_group([1, 2, 3])
    if outer:  # The other rank takes no part in what follows.
        inner = outer.subgroup([0, 2])
        assert bool(inner) == (bagua.comm.get_rank() != 2)
        assert not inner or (inner.ranks, inner.nodes, total(inner.global_communicator)) == ((1, 3), (0, 1), 6.0)
    assert bool(outer) == (bagua.comm.get_rank() != 0)


@on_ranks(4, pool="rank_pool")
def test_a_group_is_taken_in_each_form():
    """The same ranks named in each way, and each way in which a rank is none of them."""
    odd = bagua.comm.new_group(range(3, 0, -2))
    forms, seen = [odd, odd.global_communicator], []
    if dist.is_initialized():
        forms.append(dist.new_group([1, 3]))
    for form in forms:
        own = torch.tensor([bagua.comm.get_rank() + 1.0])
        bagua.comm.allreduce(everywhere := own.clone(), comm=form)
        bagua.comm.reduce(at_one := own.clone(), 1, comm=form)
        bagua.comm.broadcast(sent := own.clone(), 1, comm=form)
        answer = bagua.comm.broadcast_object("odd", comm=form)
        place = bagua.comm.get_rank(form), bagua.comm.get_world_size(form)
        seen.append((*place, everywhere.item(), at_one.item(), sent.item(), answer))
    rank = bagua.comm.get_rank()
    own, reduced = rank + 1.0, 6.0 if rank == 3 else rank + 1.0
    assert set(seen) == {(rank // 2, 2, 6.0, reduced, 4.0, "odd") if rank % 2 else (-1, -1, own, own, own, None)}


def test_what_is_no_group_is_refused():
    for call in (bagua.comm.barrier, bagua.comm.get_rank, bagua.comm.get_world_size):
        for wrong in ("gloo", 0, [0, 1]):
            with pytest.raises(errors.InvalidTypeError, match="not a process group"):
                call(wrong)


def test_the_sentinel_has_each_call_of_a_communicator():
    calls = {
        name for name, value in vars(functional).items() if getattr(value, "__module__", "") == functional.__name__
    } - {"_make"}
    assert len(calls) > 15
    assert calls <= {*vars(NonMember)}
    tensor = torch.ones(2)
    for name in calls:
        assert getattr(NON_MEMBER, name)(tensor, 1, async_op=True) is None
    assert tensor.tolist() == [1, 1]
    assert not NON_MEMBER
    assert pickle.loads(pickle.dumps(NON_MEMBER)) is deepcopy(NON_MEMBER) is NON_MEMBER
    assert NON_MEMBER.subgroup([0]) is NON_MEMBER.inter_node_communicator is NON_MEMBER
    NON_MEMBER.close()


@on_ranks(2)
def test_models_are_not_wrapped_for_a_group_of_others():
    group = bagua.comm.new_group([0])
    for argument, wrap in (
        ("process_group", lambda: torch.nn.Linear(1, 1).with_bagua([], "allreduce", process_group=group)),
        ("process_group", lambda: bagua_parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)),
        ("process_group", lambda: AsyncModelAverageAlgorithmImpl(group)),
        ("group", lambda: as_group(dist.GroupMember.NON_GROUP_MEMBER)),
    ):
        if not group:
            with pytest.raises(errors.InvalidRankError, match="not a member") as caught:
                wrap()
            assert caught.value.argument == argument


@pytest.mark.parametrize("wrong", [[], [0, 0], [3], [-1], ["0"], [True, 0]], ids=str)
@on_ranks(3)
def test_what_is_no_set_of_ranks(wrong):
    with pytest.raises(errors.InvalidRankError, match="different whole numbers from 0 to 2"):
        bagua.comm.new_group(wrong)
    assert total(bagua.comm.get_default_group().global_communicator) == 6.0


@on_ranks(3, pool="rank_pool")
def test_ranks_that_ask_for_different_groups_all_hear_of_it_and_go_on():
    with pytest.raises(errors.CollectiveMismatchError, match="different groups") as caught:
        bagua.comm.new_group([0, 1] if bagua.comm.get_rank() == 0 else [0, 2])
    assert "[0, 1]" in str(caught.value)
    assert "[0, 2]" in str(caught.value)
    assert total(bagua.comm.new_group([0, 1, 2]).global_communicator) == 6.0


@on_ranks(3, pool="rank_pool", hosts=[2, 1])
def test_duplicates_live_and_end_apart():
    group = bagua.comm.get_default_group()
    copies = [group.duplicate(), group.duplicate("mine")]
    assert "mine" in copies[1].global_communicator.label
    for copy in copies:
        assert (copy.ranks, copy.nodes, copy.rank) == (group.ranks, group.nodes, group.rank)
        assert copy.global_communicator is not group.global_communicator
        assert copy.intra_node_communicator is not group.intra_node_communicator
    sums = [total(one.global_communicator) for one in (copies[1], group, copies[0])]
    assert group.global_communicator.stats()["allreduce"].calls == 1
    copies[0].close()
    copies[0].close()
    with pytest.raises(errors.CommunicatorClosedError):
        total(copies[0].global_communicator)
    assert [*sums, total(group.global_communicator), total(copies[1].global_communicator)] == [6.0] * 5


@on_ranks(2)
def test_destroying_ends_every_group_and_goes_on_after_an_error():
    group = bagua.comm.get_default_group()
    extra = bagua.comm.new_group([0, 1])
    communicator, called = extra.global_communicator, []
    close = communicator._transport.close
    communicator._transport.close = lambda: (close(), 1 / 0)
    extra.when_closing(lambda: called.append("first"))
    extra.when_closing([].pop)
    with pytest.raises(IndexError):  # the first of two errors
        bagua.comm.destroy_process_group()
    bagua.comm.destroy_process_group()
    with pytest.raises(errors.NotInitializedError, match="init_process_group"):
        bagua.comm.allreduce(torch.ones(1))
    assert (called, communicator.usable, group.global_communicator.usable) == (["first"], False, False)
    assert not bagua.comm.is_initialized()


@on_ranks(2, pool="rank_pool")
def test_statistics_count_all_communicators_closed_ones_too():
    group = bagua.comm.get_default_group()
    for one in (group, group.duplicate(), bagua.comm.new_group([0, 1])):
        one.global_communicator.allreduce(torch.ones(5))
        one.close() if one is not group else None
    seen = bagua.comm.stats()["allreduce"]
    assert (seen.calls, seen.bytes, seen.sent_bytes) == (3, 60, 60)
    assert seen.seconds > 0


def test_each_thread_rank_has_its_own_default_group(thread_ranks):
    def see():
        background = BackgroundThread("test")
        in_background = background.submit(bagua.comm.get_rank).result(5)
        background.stop()
        assert not dist.is_initialized()
        return bagua.comm.get_rank(), bagua.comm.get_world_size(), in_background

    assert thread_ranks(3, see) == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert not bagua.comm.is_initialized()


@pytest.mark.gloo
@on_ranks(3, pool="process_pool", hosts=[1, 2])
def test_groups_of_torch_can_be_joined_by_their_members():
    rank = dist.get_rank()
    torch_group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(errors.InvalidRankError, match="not a member"):
            bagua.comm.from_torch_group(torch_group)
    for _ in range(2 if rank != 1 else 0):
        group = bagua.comm.from_torch_group(torch_group)
        assert (group.ranks, group.rank, group.node_sizes) == ((0, 2), rank // 2, (1, 1))
        assert total(group.global_communicator) == 4.0
    world = bagua.comm.from_torch_group()
    assert (world.ranks, total(world.global_communicator)) == ((0, 1, 2), 6.0)
    bagua.comm.destroy_process_group()
    assert not world.global_communicator.usable


def test_a_store_that_is_lost_while_a_group_connects_is_an_error_with_a_name(monkeypatch):
    lost = Mock(side_effect=dist.DistNetworkError("Connection reset by peer"))
    monkeypatch.setattr("bagua.comm.group.create_transport", lost)
    for ranks, peers in (([0, 1], (0,)), ([4, 5], ())):
        said = f"rank {ranks[1]} lost the store .*the set-up of pair"
        with pytest.raises(errors.PeerLostError, match=said, check=lambda error, peers=peers: error.peers == peers):
            ProcessGroup(dist.HashStore(), 1, ranks, [0, 0], "gloo", 5.0, "pair", Recorder())
