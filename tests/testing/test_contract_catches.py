"""The transport contract fails for transports that break a promise: each mutant breaks one."""

import time
from pathlib import Path

import pytest
import torch

from bagua.comm.transports.threads import ThreadsTransport
from bagua.testing import ThreadRanks
from tests.contract import asynchronous, failures
from tests.contract.transports import TransportContract
from tests.programs.mirror import MIRROR_MUTANTS
from tests.programs.mutants import MUTANTS, Spoiled, patched, skips, spoils, starts

pytestmark = pytest.mark.threads


class Contract(TransportContract):
    sizes = (3,)
    deadline_s = 0.3


def rounds_differently(transport, call, target):
    if call.dtype is torch.float64 and target.numel() > 1000:
        target[1000] = torch.nextafter(target[1000], torch.tensor(9e9, dtype=torch.float64))


def spoils_its_input(transport, call, source, target, true):
    handle = true(call, source, target)
    if call.kind == "allgather" and source is not None and source.dtype.is_floating_point:
        handle.wait()
        source.zero_()
    return handle


class NeverCompletes(Spoiled):
    def is_completed(self):
        return False


START, ABORT = ThreadsTransport.start, ThreadsTransport.abort


def abort_slowly(transport, reason, culprit=None):
    time.sleep(failures.SOON_S + 0.5)
    ABORT(transport, reason, culprit)


#: What breaks a promise, and the tests that find it.
BREACHES = {
    "does nothing": (
        skips(lambda transport, call: True),
        """test_every_reduction_of_every_dtype test_every_dtype_is_carried test_objects_arrive
        test_every_collective_can_be_waited_for test_communicators_of_some_ranks""",
    ),
    "averages without dividing": (MUTANTS["average is not divided"], "test_every_reduction_of_every_dtype"),
    "reduces everywhere": (MUTANTS["reduce writes everywhere"], "test_every_root"),
    "rounds differently on rank 1": (
        spoils("allreduce", rounds_differently, lambda transport: transport.rank == 1),
        "test_results_are_bitwise_identical",
    ),
    "spoils its input": (starts(spoils_its_input), "test_scalars test_every_layout"),
    "adds in bfloat16": (
        MUTANTS["16-bit floats are added in 16 bits"],
        "test_sums_of_16_bit_floats_accumulate_in_float32",
    ),
    "says that nothing completes": (
        starts(lambda _, call, source, target, true: NeverCompletes(true(call, source, target), lambda: None)),
        "test_everything_that_a_work_offers",
    ),
    "ignores deadlines": (
        patched(
            ThreadsTransport, "start", lambda t, call, own, target, _, later: START(t, call, own, target, 30.0, later)
        ),
        "test_the_facts_of_a_timeout",
    ),
    "keeps reasons to itself": (
        patched(ThreadsTransport, "abort", lambda t, _, culprit=None: ABORT(t, "no comment", culprit)),
        "test_abort_from_another_thread",
    ),
    "aborts slowly": (patched(ThreadsTransport, "abort", abort_slowly), "test_abort_from_another_thread"),
    "shares memory": (
        patched(ThreadsTransport, "empty", lambda t, numel, dtype, device: torch.zeros(1, dtype=dtype).expand(numel)),
        "test_memory_of_the_communicator_is_ordinary_memory",
    ),
}
CATCHES = [(breach, test) for breach, (_, tests) in BREACHES.items() for test in tests.split()]


def test_no_mutant_is_forgotten():
    """The list says what the programs and the contract kill: who changes their tests may not shorten it in passing."""
    kept = Path(__file__).with_name("kills.txt").read_text(encoding="utf-8").splitlines()
    names = [line.partition(", by program ")[0] for line in kept]
    assert [*MUTANTS, *MIRROR_MUTANTS, *(f"{breach}, by {test}" for breach, test in CATCHES)] == names


@pytest.mark.parametrize(("breach", "test"), CATCHES)
def test_a_mutant_is_caught(breach, test, monkeypatch):
    BREACHES[breach][0](monkeypatch)
    for module, name in ((failures, "SOON_S"), (failures, "UNTIL_S"), (asynchronous, "PATIENCE_S")):
        monkeypatch.setattr(module, name, 1.0)  # What takes longer is a failure, and wanted here.
    with pytest.raises(Exception, match=r".") as caught:
        getattr(Contract(), test)(ThreadRanks(3, deadline_s=20))
    assert type(caught.value) not in (TypeError, AttributeError, NameError), "the mutant itself is wrong"


def test_a_transport_that_does_not_compare_is_caught(monkeypatch):
    MUTANTS["broadcast is always from 0"](monkeypatch)
    with pytest.raises(AssertionError, match=r"no error was raised"):
        Contract().test_ranks_that_disagree(ThreadRanks(3), "root")
