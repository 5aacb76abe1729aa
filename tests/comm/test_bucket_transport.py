"""Collectives over a bucket: the values of threads, bit by bit, what members do wrong, and what stays behind."""

import contextlib
import functools
import threading

import pytest
import torch

from bagua import errors
from bagua.comm import ObjectBucket, ReduceOp, group_of_seats, thread_store
from bagua.comm.transports import bucket as transport_module
from tests.contract.exercises import EXERCISES, CallSetting, perform
from tests.contract.results import REDUCING
from tests.harness import in_threads
from tests.membership.servers import names, needs_obstore, opened

pytestmark = needs_obstore


def on_seats(size, open_store, job, backend="bucket", name="epoch1"):
    """What ``job(group)`` returned, or raised, on each of ``size`` members, which are threads."""

    def member(seat):
        try:
            group = group_of_seats(open_store(), range(size), seat, name, backend=backend, timeout_s=20.0, meet_s=20.0)
            with contextlib.closing(group):
                return job(group)
        except Exception as error:
            return error

    return in_threads(size, member)


in_folder = pytest.fixture(lambda tmp_path: functools.partial(opened, f"file://{tmp_path}/run"))


def everything(group):
    """All tensors of all collectives, after a check of their values."""
    comm, found = group.global_communicator, []
    kinds = [kind for kind in EXERCISES if kind not in ("sendrecv", "send_and_recv")]
    for numel in (1, 7, 1000):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            for op in (ReduceOp.SUM, ReduceOp.MAX):
                for kind in kinds if op == ReduceOp.SUM else REDUCING:
                    found += perform(kind, comm, CallSetting((numel,), dtype, op, root=1)).touched
    for setting in (CallSetting(op=ReduceOp.AVG), CallSetting(dtype=torch.float64, options={"async_op": True})):
        found += perform("allreduce", comm, setting).touched
    return [*found, comm.allgather_object({"rank": comm.rank})]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("slices", [False, True])
def test_all_collectives_give_the_bits_of_threads(in_folder, monkeypatch, size, slices):
    if slices:
        monkeypatch.setattr(transport_module, "_SMALL_BYTES", 0)
        monkeypatch.setattr(transport_module, "PIECE_BYTES", 256)
    store = thread_store()
    found, of_threads = on_seats(size, in_folder, everything), on_seats(size, lambda: store, everything, "threads")
    for ours, theirs in zip(found, of_threads, strict=True):
        assert not isinstance(ours, Exception), ours
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_who_calls_something_else_is_named(in_folder):
    def differ(group):
        group.global_communicator.allreduce(torch.ones(3 + group.rank))

    found = on_seats(2, in_folder, differ)
    assert any(isinstance(error, errors.CollectiveMismatchError) for error in found), found
    assert all(isinstance(error, errors.CollectiveMismatchError | errors.PeerLostError) for error in found), found


def test_an_object_that_was_cut_off_is_an_error_and_fills_nothing(in_folder, monkeypatch):
    true = ObjectBucket.get_part
    monkeypatch.setattr(ObjectBucket, "get_part", lambda *given: (found := true(*given)) and found[:-1])
    tensors = [torch.ones(3), torch.ones(3)]
    found = on_seats(2, in_folder, lambda group: group.global_communicator.allreduce(tensors[group.rank]))
    cut_off = [error for error in found if "is cut off" in str(error)]
    assert any(isinstance(error, errors.CollectiveMismatchError) for error in cut_off), found
    assert all(isinstance(error, errors.CollectiveMismatchError | errors.PeerLostError) for error in found), found
    assert all(tensor.equal(torch.ones(3)) for tensor in tensors)


def test_an_abort_reaches_those_who_wait(in_folder):
    def leave(group):
        if group.rank == 1:
            group.abort("it has had enough")
        group.global_communicator.allreduce(torch.ones(3))

    first, second = on_seats(2, in_folder, leave)
    assert (type(first), first.peers) == (errors.PeerLostError, (1,))
    assert "it has had enough" in str(first)
    assert isinstance(second, errors.CommunicatorClosedError)


def test_who_does_not_come_in_time_is_named(in_folder):
    come = threading.Event()

    def wait(group):
        if group.rank == 1:
            come.wait(30)
            return
        try:
            group.global_communicator.allreduce(torch.ones(3), timeout=0.2)
        finally:
            come.set()

    late, _ = on_seats(2, in_folder, wait)
    assert (type(late), late.peers) == (errors.CollectiveTimeoutError, (1,))


def test_messages_and_stores_of_another_kind_are_refused(in_folder):
    store = thread_store()
    found = on_seats(2, in_folder, lambda group: group.global_communicator.send(torch.ones(1), 1 - group.rank))
    found += on_seats(2, lambda: store, lambda group: None)
    assert all(isinstance(one, errors.TransportUnavailableError) for one in found), found


def test_what_is_read_by_all_is_deleted_by_its_owner(in_folder, monkeypatch):
    monkeypatch.setattr(transport_module, "_MOST_NAMES", 1)
    store = in_folder()

    def exchange(group):
        for number in range(6):
            group.global_communicator.allreduce(torch.ones(3) * number)

    assert on_seats(2, lambda: store, exchange) == [None, None]
    left = names(store.bucket)
    assert len(left) == len(store.bucket.leftovers) == 2  # Of each its last object, which the other may still read.
    assert on_seats(2, lambda: store, exchange, name="epoch2") == [None, None]
    assert not {*left} & {*names(store.bucket)}
