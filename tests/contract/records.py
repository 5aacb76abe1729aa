"""Chapter 6: objects, counters and the ring buffer of calls."""

import math
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from bagua.comm import Communicator
from bagua.errors import ConfigurationError
from tests.contract.exercises import CallSetting, communicator, home, perform
from tests.contract.failures import caught


def value_of(rank: int) -> Any:
    """Everything that has a safe encoding, and different on each rank."""
    return {
        "rank": rank, "large": 2**80 + rank, "floats": [0.1 * rank, math.inf, -0.0, 1e-300],
        "text": "ä\u4e00\U0001f600\n\x00" * rank,
        "raw": bytes(range(rank, 256)), "buffer": bytearray(b"abc") * rank,
        3: {("a", rank): {1, 2, rank}, None: frozenset({b"x"})},
        "nothing": (None, True, False, (), [], {}, set()), "complex": complex(rank, -1.5),
        (1, (2, rank)): [[["deep"]]], "tag": ["tensor", "float32", [1]],
    }  # fmt: skip


def exchange_all(comm: Communicator, make: Any, **options: Any) -> None:
    """Every object collective, with an object of ``make(rank)`` from each rank."""
    size, rank = comm.size, comm.rank
    everything = [make(other) for other in range(size)]
    for root in range(size):
        assert comm.broadcast_object(make(rank) if rank == root else None, root, **options) == make(root)
        gathered = comm.gather_object(make(rank), root, **options)
        assert gathered == (everything if rank == root else None)
        assert comm.scatter_object(everything if rank == root else None, root, **options) == make(rank)
    assert comm.allgather_object(make(rank), **options) == everything


def send_objects() -> None:
    comm = communicator()
    for make in (value_of, lambda rank: rank, lambda rank: "x" * (10_000 * rank), lambda _: None):
        exchange_all(comm, make)
    assert math.isnan(comm.broadcast_object(math.nan))
    for got in comm.allgather_object(value_of(comm.rank)):
        assert {type(item) for item in got["nothing"]} == {type(None), bool, tuple, list, dict, set}
        assert type(got["buffer"]) is bytearray


def send_unsafe_objects() -> None:
    """The culprit's object has no encoding: everybody hears it, and the communicator goes on."""
    comm = communicator()
    size, rank = comm.size, comm.rank
    endless: list[object] = []
    endless.append(endless)
    surrogate = type("Odd", (), {"__module__": "\udcff"})
    broken = (endless, 10**5000, torch.empty(2, device="meta"), surrogate())
    for unsafe in (Fraction(1, 3), object, len, {"deep": [Fraction(1, 3)]}, *broken):
        mine = unsafe if rank == size - 1 else "harmless"
        for call in (
            partial(comm.broadcast_object, mine, size - 1), partial(comm.allgather_object, mine),
            partial(comm.scatter_object, [mine] * size if rank == size - 1 else None, size - 1),
        ):  # fmt: skip
            caught(call, ConfigurationError, "obj")
            assert comm.usable
    error = caught(lambda: comm.broadcast_object(10**5000, size - 1), ConfigurationError, "ValueError").error
    assert isinstance(error.__cause__, ValueError) == (rank == size - 1)
    mine = Fraction(1, 3) if rank == size - 1 else "harmless"
    if size == 1 or rank in (0, size - 1):
        caught(lambda: comm.gather_object(mine), ConfigurationError, "Fraction")
    else:
        assert comm.gather_object(mine) is None
    caught(lambda: comm.allgather_object(Fraction(rank + 1, 3)), ConfigurationError, "Fraction")
    perform("allreduce", comm, CallSetting())


def send_pickled_objects() -> None:
    exchange_all(communicator(), lambda rank: Fraction(rank, 7), allow_pickle=True)


def refuse_pickle() -> None:
    comm = communicator()
    if comm.rank == 0:
        assert comm.broadcast_object(Fraction(1, 3), allow_pickle=True) == Fraction(1, 3)
    else:
        caught(comm.broadcast_object, ConfigurationError, "pickle")
    assert comm.usable
    perform("allreduce", comm, CallSetting())


def misplace_objects() -> None:
    """A list that is too short, or on the wrong rank: an error, and no rank waits for another."""
    comm = communicator()
    short, uncounted, everything = ["one"] * (comm.size - 1), iter(["one"]), list(range(comm.size))
    caught(lambda: comm.scatter_object(short if comm.rank == 0 else None), ConfigurationError, "objs")
    caught(lambda: comm.scatter_object(uncounted if comm.rank == 0 else None), ConfigurationError)
    if comm.rank == 1:
        caught(lambda: comm.scatter_object(everything), ConfigurationError)
    else:
        assert comm.scatter_object(everything if comm.rank == 0 else None) == comm.rank
    assert comm.usable
    perform("allreduce", comm, CallSetting())


def coalesce_nothing() -> None:
    comm = communicator()
    assert comm.allreduce_coalesced([]) is comm.broadcast_coalesced([]) is None
    work = comm.allreduce_coalesced([], async_op=True)
    assert (work.is_completed(), work.result()) == (True, [])
    perform("allreduce", comm, CallSetting())


def count_calls() -> None:
    comm = communicator()
    assert comm.stats() == {}
    tensor = torch.ones(10, device=home(comm))
    for _ in range(3):
        comm.allreduce(tensor)
    work = comm.allreduce(tensor, async_op=True)
    assert comm.stats()["allreduce"].calls == 3, "a call counts when it is complete"
    work.wait()
    comm.broadcast(tensor[:5].double())
    comm.barrier()
    stats = comm.stats()
    assert {kind: one.bytes for kind, one in stats.items()} == {"allreduce": 4 * 40, "broadcast": 40, "barrier": 0}
    assert stats["allreduce"].calls == 4
    assert stats["allreduce"].sent_bytes == 2 * 4 * 40 * (comm.size - 1) // comm.size
    assert all(one.seconds > 0 for one in stats.values())


def fill_history() -> None:
    comm = communicator()
    assert comm.history() == ()
    for count in range(1, 40):
        comm.allreduce(torch.ones(count, device=home(comm)))
    history = comm.history()
    assert 8 <= len(history) <= 64
    assert all(part in history[-1] for part in ("#39", "39 x float32", "sum")), history[-1]
    numbers = [int(line.split()[0].lstrip("#")) for line in history]
    assert numbers == list(range(40 - len(history), 40))


def read_facts() -> None:
    comm = communicator()
    assert comm.ranks == tuple(range(comm.size))
    assert comm.usable
    assert comm.backend
    assert comm.executor in ("caller", "thread", "stream")
    assert comm.timeout_s == 20.0, "the pool's"
    assert f"rank {comm.rank} of {comm.size}" in repr(comm)
