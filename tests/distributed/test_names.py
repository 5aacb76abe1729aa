"""Names, arguments and errors: torch's where they can be, typed refusals where they cannot."""

import inspect
import re
import textwrap
import threading
from dataclasses import dataclass
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed

import bagua.comm
import bagua.distributed as dist
from bagua import errors
from bagua.errors import ConfigurationError, InvalidRankError, InvalidTensorError
from tests.harness import on_ranks, until
from tests.launching import ends, launched
from tests.versions import TORCH

#: Names of torch 2.13 that older versions lack.
LATER = {"DistNetworkError", "all_gather_single", "default_pg_timeout", "reduce_scatter_single"}
#: Arguments that torch has had since 2.13.
SINCE = {"enable_reconfigure", "weights_only"}
FUNCTIONS = [
    name
    for name in dist.__all__
    if name != "reduce_op"  # It warns whatever is asked of it.
    and inspect.isfunction(getattr(dist, name))
    and inspect.isfunction(getattr(torch.distributed, name, None))
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_those_of_torch(name):
    def arguments(function):
        parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
        return [(one.name, one.default) for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    theirs, ours = arguments(getattr(torch.distributed, name)), arguments(getattr(dist, name))
    theirs = [argument for argument in theirs if not argument[0].startswith("_") and argument[0] not in SINCE]
    assert [one for one in ours if one in theirs] == theirs
    assert ours == theirs or TORCH < (2, 13)


def test_the_names_that_scripts_use_are_there():
    assert len(FUNCTIONS) >= 45
    assert {name for name in dist.__all__ if not hasattr(torch.distributed, name)} <= LATER
    assert issubclass(dist.Work, torch.distributed.Work)
    assert issubclass(dist.DistNetworkError, dist.DistError)
    assert issubclass(dist.DistBackendError, RuntimeError)
    assert dist.group.WORLD is None
    assert dist.P2POp(dist.isend, torch.ones(1), 0, dist.GroupMember.NON_GROUP_MEMBER).peer == -1


def test_the_deprecated_class_of_reductions_is_that_of_torch(thread_ranks):
    def add_up_as_old_scripts_do():
        dist.all_reduce(tensor := torch.ones(2), op=dist.reduce_op.SUM)
        return tensor.tolist()

    with pytest.warns(FutureWarning, match="please use `torch.distributed.ReduceOp`"):
        names = dist.reduce_op.__members__
    assert names == dist.ReduceOp.RedOpType.__members__
    with pytest.warns(FutureWarning, match="reduce_op` is deprecated"):  # Here: filters are those of all threads.
        assert thread_ranks(2, add_up_as_old_scripts_do) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("function", [dist.get_rank, dist.get_world_size])
def test_places_are_not_known_before_initialization(function, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.NotInitializedError):
        function()


@on_ranks(2)
def test_what_is_missing_is_refused_before_anything_is_sent():
    tensor, pair, store = torch.ones(2), dist.new_group([1, 0]), dist.HashStore()
    cases = [
        (lambda: dist.send(tensor, 1 - dist.get_rank(), tag=-3), ConfigurationError, "tag"),
        (lambda: dist.send(tensor, dist.get_rank(), tag=3), InvalidRankError, "dst"),
        (lambda: dist.send(tensor.to_sparse(), 1 - dist.get_rank(), tag=3), InvalidTensorError, "tensor"),
        (lambda: dist.broadcast(tensor), ConfigurationError, "src"),
        (lambda: dist.broadcast(tensor, 0, group_src=0), ConfigurationError, "src"),
        (lambda: dist.broadcast(tensor, 2), InvalidRankError, "src"),
        (lambda: dist.reduce(tensor, True), InvalidRankError, "dst"),
        (lambda: dist.barrier(device_ids=[0]), ConfigurationError, "device_ids"),
        (lambda: dist.new_group([0], pg_options=1), ConfigurationError, "pg_options"),
        (lambda: dist.new_group([0], use_local_synchronization=True), ConfigurationError, "use_local_synchronization"),
        (lambda: dist.new_group([1, 0], sort_ranks=False), ConfigurationError, "ranks"),
        (dist.new_subgroups, ConfigurationError, "group_size"),
        (lambda: dist.new_subgroups(2, pair.global_communicator, pg_options=1), ConfigurationError, "pg_options"),
        (lambda: dist.new_subgroups_by_enumeration([[0], [0, 1]]), ConfigurationError, "ranks_per_subgroup_list"),
        (lambda: dist.get_global_rank(pair, 2), InvalidRankError, "group_rank"),
        (lambda: dist.get_group_rank(pair, 2), InvalidRankError, "global_rank"),
        (lambda: dist.get_backend(dist.GroupMember.NON_GROUP_MEMBER), InvalidRankError, "group"),
        (lambda: dist.all_gather([tensor], tensor), InvalidTensorError, "tensor_list"),
        (lambda: dist.all_gather_into_tensor(tensor, tensor), InvalidTensorError, "output_tensor"),
        (lambda: dist.all_gather_into_tensor(tensor, "no"), InvalidTensorError, "input_tensor"),
        (lambda: dist.reduce_scatter_tensor(tensor, tensor), InvalidTensorError, "input"),
        (lambda: dist.all_to_all_single(tensor, tensor[:1]), InvalidTensorError, "input"),
        (lambda: dist.all_to_all_single(tensor, tensor, [3, 1], [1, 1]), ConfigurationError, "output_split_sizes"),
        (lambda: dist.all_to_all_single(tensor, tensor, [1, 1], [3, 1]), ConfigurationError, "input_split_sizes"),
        (lambda: dist.scatter("no", None, 1 - dist.get_rank()), InvalidTensorError, "tensor"),
        (lambda: dist.all_gather([tensor, tensor.int()], tensor), InvalidTensorError, "tensor_list"),
        (lambda: dist.gather(tensor, None, dist.get_rank()), InvalidTensorError, "gather_list"),
        (lambda: dist.scatter(tensor, [tensor], 1 - dist.get_rank()), InvalidTensorError, "scatter_list"),
        (lambda: dist.all_to_all([tensor], [tensor]), InvalidTensorError, "input_tensor_list"),
        (lambda: dist.all_gather_object([None], 1), ConfigurationError, "object_list"),
        (lambda: dist.P2POp(dist.send, tensor, 0), ConfigurationError, "op"),
        (lambda: dist.batch_isend_irecv([1]), errors.InvalidTypeError, "p2p_op_list"),
        (lambda: dist.init_process_group(init_method="env://", store=store), ConfigurationError, "init_method"),
        (lambda: dist.init_process_group(device_id="cuda"), errors.InvalidTypeError, "device_id"),
        (lambda: dist.destroy_process_group(pair.global_communicator), ConfigurationError, "group"),
    ]
    for call, kind, argument in cases:
        with pytest.raises(kind, check=lambda error, argument=argument: error.argument == argument):
            call()
    with pytest.raises(errors.RepeatedInitializationError):
        dist.init_process_group()
    assert dist.get_process_group_ranks(pair) == [0, 1]
    dist.all_reduce(tensor, group=pair)  # Nothing was sent for what was refused.
    dist.destroy_process_group(pair)
    assert tensor.tolist() == [2.0, 2.0]


@on_ranks(3, pool="rank_pool")
def test_ranks_are_global_and_outsiders_return_at_once():
    """Ranks 2 and 1 have a group, in which rank 2 is rank 1; rank 0 makes the same calls."""
    group = dist.new_group([1, 2])
    tensor, objects = torch.full((2,), float(dist.get_rank())), [dist.get_rank()]
    dist.broadcast(tensor, src=2, group=group)
    dist.broadcast_object_list(objects, group_src=1, group=group)
    work = dist.all_gather([torch.empty(2), torch.empty(2)], tensor, group=group, async_op=True)
    if work is not None:
        work.wait()
    source = dist.recv(tensor.zero_(), 1, group) if dist.get_rank() != 1 else dist.send(tensor + 5, 2, group)
    part = dist.split_group(split_ranks=[[2, 0]])
    expected = [([0], True, -1, 0.0, [0, 2]), ([2], False, None, 2.0, []), ([2], False, 1, 7.0, [0, 2])]
    found = objects, work is None, source, tensor[0].item(), dist.get_process_group_ranks(part)
    assert found == expected[dist.get_rank()]


@on_ranks(3, pool="rank_pool")
def test_groups_and_their_parts():
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(size))
    ends = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        assert (dist.get_group_rank(ends, size - 1), dist.get_global_rank(ends, 1)) == (1, size - 1)
        dist.reduce(torch.ones(1), group_dst=1, group=ends)
    else:
        assert ends == dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(ends) == dist.get_world_size(ends) == -1
    mine, everyone = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    alone, _ = dist.new_subgroups(group_size=1)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    found = [dist.get_process_group_ranks(group) for group in (mine, alone)]
    assert (len(everyone), found) == (2, [[2] if rank == 2 else [0, 1], [rank]])


@dataclass
class Note:
    text: str


@on_ranks(2)
def test_objects_are_pickled_only_if_asked_for():
    rank, found = dist.get_rank(), []
    send_or_receive = dist.recv_object_list if rank else dist.send_object_list
    for switch in ({}, {"allow_pickle": True}):
        for call in (
            lambda gathered, options: dist.all_gather_object(gathered, Note("a"), **options),
            lambda gathered, options: dist.broadcast_object_list(gathered, 0, **options),
            lambda gathered, options: dist.gather_object(Note("a"), gathered if rank == 0 else None, **options),
            lambda gathered, options: dist.scatter_object_list(gathered, None if rank else [Note("a")] * 2, **options),
            lambda gathered, options: send_or_receive(gathered, 1 - rank, **options),
        ):
            gathered = [Note("a"), Note("a")] if rank == 0 else [None, None]
            try:
                call(gathered, switch)
                found.append(gathered[0] == Note("a") if gathered[0] else None)
            except ConfigurationError as error:
                found.append("pickle" in str(error))
    # Of gather_object, rank 1 gets nothing.
    assert found == [True] * 7 + [None if rank else True] + [True] * 2


@on_ranks(2)
def test_a_barrier_names_who_is_late():
    alone = dist.new_group([0], timeout=timedelta(seconds=7))
    if dist.get_rank() == 0:
        with pytest.raises(errors.CollectiveTimeoutError, check=lambda error: error.peers == (1,)):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        assert alone.timeout_s == 7.0


@on_ranks(3, pool="process_pool")
def test_groups_of_torch_are_taken():
    theirs, tensor = torch.distributed.new_group([0, 2]), torch.ones(1)
    dist.all_reduce(tensor, group=theirs)
    dist.broadcast(tensor, src=2, group=theirs)
    dist.all_reduce(tensor, group=torch.distributed.group.WORLD)
    assert (dist.get_backend(torch.distributed.group.WORLD), tensor.item()) == ("gloo", 5.0)
    assert dist.get_rank(theirs) == (0, -1, 1)[dist.get_rank()]


def test_a_url_may_say_who_this_process_is(monkeypatch):
    meet = Mock(side_effect=InterruptedError)  # Nobody else comes.
    monkeypatch.setattr("bagua.distributed.groups.meet_at", meet)
    with pytest.raises(InterruptedError):
        dist.init_process_group(init_method="env://?rank=1&world_size=3")
    assert [asked.args[:3] for asked in meet.call_args_list] == [("env://?rank=1&world_size=3", -1, -1)]


@on_ranks(2)
def test_a_batch_is_refused_before_its_first_message_is_sent():
    """Ranks send, in a batch of which the last message is refused, and then something else."""
    other, received, shared = 1 - dist.get_rank(), torch.zeros(1), torch.zeros(1).expand(2)
    for wrong in (dist.P2POp(dist.irecv, shared, other), dist.P2POp(dist.isend, torch.ones(1), other, tag=-1)):
        with pytest.raises(ConfigurationError):
            dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((1,), 7.0), other), wrong])
    batch = [dist.P2POp(dist.isend, torch.full((1,), 5.0), other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert received.item() == 5.0


@pytest.mark.parametrize(
    "order", [["send 1 recv 1", "recv 0 send 0"], ["send 1 recv 2", "recv 0 send 2", "send 0 recv 1"]], ids=len
)
def test_a_batch_starts_pair_by_pair_and_of_a_pair_the_lower_rank_sends_first(thread_ranks, order):
    """NCCL makes one message of a pair after the other, and connects a pair in its first: any circle would hang."""

    def start_a_batch():
        """What a rank receives in a ring in which all ask first, and in which order its messages start."""
        rank, size, received = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % size)
        send = dist.P2POp(dist.isend, torch.full((1,), float(rank)), (rank + 1) % size)
        for work in dist.batch_isend_irecv([receive, send]):
            work.wait()
        started = bagua.comm.get_default_group().global_communicator.history()[-2:]
        assert received.item() == (rank - 1) % size
        return " ".join(re.sub(r"#\d+ (\w+)\(.* peer (\d)\)", r"\1 \2", text) for text in started)

    assert thread_ranks(len(order), start_a_batch) == order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make_factor", [float, torch.tensor], ids=["number", "tensor"])
@on_ranks(3)
def test_inputs_are_multiplied_before_they_are_added(make_factor, dtype):
    """PREMUL_SUM, which torch has on NCCL only: the exact results are 1 x 1 + 2 x 10 + 3 x 100 in each element."""
    rank, size = dist.get_rank(), dist.get_world_size()
    op = dist._make_nccl_premul_sum(make_factor(10.0**rank))
    own = torch.full((size, 2), rank + 1.0, dtype=dtype)
    shares = [torch.zeros(2, dtype=dtype) for _ in range(2)]
    dist.all_reduce(strided := own.t().contiguous().t(), op)
    dist.all_reduce(leaf := own.clone().requires_grad_(), op, async_op=True).wait()
    dist.all_reduce_coalesced(rows := [own[0].clone(), own[1].clone()], op)
    dist.reduce(at_one := own.clone(), 1, op)
    dist.reduce_scatter_single(shares[0], own, op)
    dist.reduce_scatter(shares[1], list(own), op)
    assert torch.equal(at_one, own) or rank == 1
    assert torch.equal(own, torch.full((size, 2), rank + 1.0, dtype=dtype)), "an input was written"
    found = [strided, leaf.detach(), *rows, *shares, *([at_one] if rank == 1 else [])]
    assert set(torch.cat([tensor.flatten() for tensor in found]).tolist()) == {321.0}


@on_ranks(2)
def test_what_has_no_factor_or_no_fraction_is_refused():
    double, kept, group = dist._make_nccl_premul_sum(2.0), torch.ones(2), dist.new_group([0])
    for call in (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), double),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.PREMUL_SUM),
        lambda: bagua.comm.allreduce(torch.ones(2), double),
    ):
        with pytest.raises(errors.InvalidReduceOpError, check=lambda error: "multiply" in error.advice.lower()):
            call()
    dist.all_reduce(kept, double, group)
    dist.reduce_scatter_single(torch.empty(2), kept, double, group)
    assert kept.tolist() == [2.0 - dist.get_rank()] * 2


@on_ranks(3, pool="rank_pool")
def test_a_callback_may_communicate():
    """The callback of each of two calls reduces again, in the order of the calls, with the main thread in no call."""
    threads = []

    def again(done):
        threads.append(threading.current_thread().name)
        tensor = done.value()[0].clone()
        dist.all_reduce(tensor)
        return tensor.item()

    numbers = torch.tensor([[1.0], [10.0]])
    works = [dist.all_reduce(number, async_op=True) for number in numbers]
    totals = [future.wait() for future in [work.get_future().then(again) for work in works]]
    dist.barrier()
    assert threading.current_thread().name not in threads
    assert (totals, len(set(threads))) == ([9.0, 90.0], 1)


def test_a_callback_is_refused_inside_another_call(thread_ranks):
    refused = threading.Event()

    def communicate_while_the_main_thread_does():
        """The main thread of rank 0 waits for a message, which rank 1 sends when the callback has been refused."""
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))
            assert refused.wait(60)
            dist.send(torch.ones(1), 0)
            return None
        in_use = dist.group.WORLD.global_communicator.pipeline.in_use

        def again(done):
            until(in_use.locked)
            try:
                with pytest.raises(errors.ConcurrentUseError):
                    dist.all_reduce(done.value()[0])
            finally:
                refused.set()

        future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again)
        dist.recv(tensor := torch.zeros(1), 1)
        future.wait()
        return tensor.item()

    assert thread_ranks(2, communicate_while_the_main_thread_does) == [1.0, None]


WHOLE_PROGRAM = """
    import sys
    import torch
    import bagua.distributed as dist

    rank, meeting = sys.argv[1].split()
    place = {} if meeting == "env" else {"init_method": meeting, "rank": int(rank), "world_size": 2}
    dist.init_process_group("gloo", **place)
    dist.all_reduce(tensor := torch.ones(2) * dist.get_rank())
    pair = dist.new_group([1])
    dist.all_reduce(tensor, group=pair)
    print(dist.get_backend(), dist.get_rank(pair), tensor.tolist(), dist.get_node_local_rank())
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()
"""


@pytest.mark.gloo
@pytest.mark.parametrize("meeting", ["env", "file", "tcp"])
def test_a_whole_program_meets_where_torch_would(meeting, tmp_path, port):
    place = {"env": "env", "file": f"file://{tmp_path}/meeting", "tcp": f"tcp://127.0.0.1:{port}"}[meeting]
    each = [f"{rank} {place}" for rank in range(2)]
    there = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # The store is there already.
    with launched(2, "-c", textwrap.dedent(WHOLE_PROGRAM), each=each, port=port, **there) as ranks:
        assert ends(ranks) == [(0, "gloo -1 [1.0, 1.0] 0\n"), (0, "gloo 0 [1.0, 1.0] 1\n")]
