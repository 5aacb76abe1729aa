"""The transport contract fails for transports that break a promise: each mutant breaks one."""

import time

import pytest
import torch

from bagua.comm.transports import registry as backends
from bagua.comm.transports.base import DONE, Handle
from bagua.comm.transports.threads import ThreadsTransport
from bagua.testing import ThreadRanks
from tests.contract import asynchronous, failures
from tests.contract.transports import TransportContract

pytestmark = pytest.mark.threads


class Contract(TransportContract):
    sizes = (3,)
    deadline_s = 0.3


class DoesNothing(ThreadsTransport):
    def start(self, call, source, target, timeout_s, asynchronous):
        return DONE


class AveragesWithoutDividing(ThreadsTransport):
    def start(self, call, source, target, timeout_s, asynchronous):
        call = call._replace(reduction="sum") if call.reduction == "avg" else call
        return super().start(call, source, target, timeout_s, asynchronous)


class ReducesEverywhere(ThreadsTransport):
    def start(self, call, source, target, timeout_s, asynchronous):
        call = call._replace(kind="allreduce", root=-1) if call.kind == "reduce" else call
        return super().start(call, source, target, timeout_s, asynchronous)


class RoundsDifferentlyOnRankOne(ThreadsTransport):
    def start(self, call, source, target, timeout_s, asynchronous):
        handle = super().start(call, source, target, timeout_s, asynchronous)
        if self.rank == 1 and call.kind == "allreduce" and call.dtype is torch.float64 and target.numel() > 1000:
            target.view(-1)[1000] = torch.nextafter(target.view(-1)[1000], torch.tensor(9e9, dtype=torch.float64))
        return handle


class SpoilsItsInput(ThreadsTransport):
    def start(self, call, source, target, timeout_s, asynchronous):
        handle = super().start(call, source, target, timeout_s, asynchronous)
        if call.kind == "allgather" and source is not None and source.dtype.is_floating_point:
            handle.wait()
            source.zero_()
        return handle


class AddsInBfloat16(ThreadsTransport):
    def start(self, call, source, target, timeout_s, asynchronous):
        if call.kind != "allreduce" or call.dtype is not torch.bfloat16:
            return super().start(call, source, target, timeout_s, asynchronous)
        rows = torch.empty(self.size * target.numel(), dtype=target.dtype)
        gather = call._replace(kind="allgather", reduction="")
        super().start(gather, source, rows, timeout_s, False).wait()
        total = torch.zeros_like(target.view(-1))
        for row in rows.view(self.size, -1):
            total += row
        target.view(-1).copy_(total)
        return DONE


class NeverCompletes(Handle):
    def __init__(self, handle):
        self.handle = handle

    def wait(self, timeout_s=None):
        self.handle.wait(timeout_s)

    def is_completed(self):
        return False


class SaysThatNothingCompletes(ThreadsTransport):
    def start(self, call, source, target, timeout_s, asynchronous):
        return NeverCompletes(super().start(call, source, target, timeout_s, asynchronous))


class IgnoresDeadlines(ThreadsTransport):
    def start(self, call, source, target, timeout_s, asynchronous):
        return super().start(call, source, target, 30.0, asynchronous)


class ComparesNoRoots(ThreadsTransport):
    def start(self, call, source, target, timeout_s, asynchronous):
        if call.kind == "broadcast":
            call = call._replace(root=0)
            source = target if self.rank == 0 else None
        return super().start(call, source, target, timeout_s, asynchronous)


class KeepsReasonsToItself(ThreadsTransport):
    def abort(self, reason, culprit=None):
        super().abort("no comment", culprit)


class AbortsSlowly(ThreadsTransport):
    def abort(self, reason, culprit=None):
        time.sleep(failures.SOON_S + 0.5)
        super().abort(reason, culprit)


class SharesMemory(ThreadsTransport):
    def empty(self, numel, dtype, device):
        return torch.zeros(1, dtype=dtype).expand(numel)


MUTANTS = [
    (DoesNothing, "test_every_reduction_of_every_dtype"),
    (DoesNothing, "test_every_dtype_is_carried"),
    (DoesNothing, "test_objects_arrive"),
    (DoesNothing, "test_every_collective_can_be_waited_for"),
    (DoesNothing, "test_communicators_of_some_ranks"),
    (AveragesWithoutDividing, "test_every_reduction_of_every_dtype"),
    (ReducesEverywhere, "test_every_root"),
    (RoundsDifferentlyOnRankOne, "test_results_are_bitwise_identical"),
    (SpoilsItsInput, "test_scalars"),
    (SpoilsItsInput, "test_every_layout"),
    (AddsInBfloat16, "test_sums_of_16_bit_floats_accumulate_in_float32"),
    (SaysThatNothingCompletes, "test_everything_that_a_work_offers"),
    (IgnoresDeadlines, "test_the_facts_of_a_timeout"),
    (KeepsReasonsToItself, "test_abort_from_another_thread"),
    (AbortsSlowly, "test_abort_from_another_thread"),
    (SharesMemory, "test_memory_of_the_communicator_is_ordinary_memory"),
]


@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=[f"{m.__name__}-{t[5:30]}" for m, t in MUTANTS])
def test_a_mutant_is_caught(mutant, test, monkeypatch):
    monkeypatch.setattr(backends, "ThreadsTransport", mutant)
    for module, name in ((failures, "SOON_S"), (failures, "UNTIL_S"), (asynchronous, "PATIENCE_S")):
        monkeypatch.setattr(module, name, 1.0)  # What takes longer is a failure, and wanted here.
    with pytest.raises(Exception, match=r".") as caught:
        getattr(Contract(), test)(ThreadRanks(3, deadline_s=20))
    assert type(caught.value) not in (TypeError, AttributeError, NameError), "the mutant itself is wrong"


def test_a_transport_that_does_not_compare_is_caught(monkeypatch):
    monkeypatch.setattr(backends, "ThreadsTransport", ComparesNoRoots)
    with pytest.raises(AssertionError, match=r"no error was raised"):
        Contract().test_ranks_that_disagree(ThreadRanks(3), "root")
