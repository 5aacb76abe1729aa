"""Calls on objects: what is encoded safely, and what an error in the middle of a call leaves behind."""

import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from bagua import errors
from bagua.comm import Communicator, composed
from bagua.comm.objects import as_bytes, decode, encode, encode_failure
from bagua.testing import ThreadRanks
from tests.comm.memory_ranks import run_on_gloo, values
from tests.contract.exercises import communicator
from tests.harness import on_ranks


def on_threads(size: int, job: Callable[[Communicator], Any]) -> list[Any]:
    return ThreadRanks(size).run(lambda: job(communicator()))


def on_gloo(size: int, job: Callable[[Communicator], Any]) -> list[Any]:
    return values(run_on_gloo(size, job))


WAYS = [pytest.param(on_threads, marks=pytest.mark.threads), pytest.param(on_gloo, marks=pytest.mark.gloo)]


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_between_two_messages_breaks_the_communicator(run, error, asynchronous, monkeypatch) -> None:
    """Else the next message would be taken for the rest of the object."""
    real = composed._ObjectCalls.room

    def fails(calls: composed._ObjectCalls, length: int, sender: int) -> torch.Tensor:
        if calls.communicator.rank == 1:
            raise error("in the middle")
        return real(calls, length, sender)

    monkeypatch.setattr(composed._ObjectCalls, "room", fails)

    def job(comm: Communicator) -> tuple[bool, str]:
        if comm.rank == 1:
            with pytest.raises(error, match="in the middle"):
                comm.broadcast_object(None, 0, async_op=asynchronous).wait()
            with pytest.raises(errors.CommunicatorClosedError, match="in the middle"):
                comm.broadcast(torch.zeros(3), 0)
            return comm.usable, ""
        with pytest.raises(errors.PeerLostError) as lost:
            for _ in range(3):  # A sender may be done with the object before it hears of that.
                comm.broadcast_object(["secret"] * 3, 0)
                comm.barrier()
        return comm.usable, str(lost.value)

    (usable, said), (others_usable, _) = run(2, job)
    assert (usable, others_usable) == (False, False)
    assert f"{error.__name__}: in the middle" in said


@on_ranks(4)
def test_an_error_of_an_object_waits_for_those_who_ask() -> None:
    """A call that follows is made, whatever became of the one before it."""
    comm, tensor = communicator(), torch.ones(2)
    work = comm.gather_object((lambda: 0) if comm.rank == 2 else 1, 0, async_op=True)
    comm.allreduce(tensor)
    assert tensor.tolist() == [4.0, 4.0]
    assert type(work.exception()) is (type(None) if comm.rank % 2 else errors.ConfigurationError)
    assert comm.usable


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        *(([torch.tensor([length])], "rank 1 announces") for length in (-1, 2**62)),
        ([torch.tensor([3]), torch.ones(3, dtype=torch.uint8)], "bytes of rank 1 are no object"),
    ],
    ids=["negative length", "large length", "no object"],
)
@on_ranks(2)
def test_what_is_no_object_is_an_error_that_names_the_sender(messages: list[torch.Tensor], problem: str) -> None:
    comm = communicator()
    if comm.rank == 1:
        for message in messages:
            comm.send(message, 0)
    else:
        with pytest.raises(errors.CollectiveMismatchError, match=problem, check=lambda error: error.peers == (1,)):
            comm.recv_object(1)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False), st.binary().map(bytearray),
)  # fmt: skip
KEYS = st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.tuples(st.text(), st.integers()))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner), st.sets(KEYS), st.frozensets(KEYS)
    ),
    max_leaves=12,
)


class Point(NamedTuple):
    x: int
    y: int


def same(one, other):
    """Equality that also tells 1 from True and 1.0, at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, b) and same(c, d) for (a, c), (b, d) in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(VALUES, st.booleans())
def test_values_come_back_also_through_pickle(value, allowed):
    assert same(decode(encode(value, allow_pickle=allowed), allow_pickle=allowed), value)


@pytest.mark.parametrize(
    "value",
    [object(), Point(1, 2), OrderedDict(a=1), range(3), torch.float32, torch.device("cpu"), {"deep": [{1: print}]}],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_safe_encoding_is_refused_by_name(value):
    with pytest.raises(errors.ConfigurationError, match="allow_pickle", check=lambda error: error.argument == "obj"):
        encode(value)


def test_subclasses_do_not_lose_their_type_silently():
    class Whole(int):
        pass

    with pytest.raises(errors.ConfigurationError, match="Whole"):
        encode(Whole(3))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.complex128, torch.bool, torch.bfloat16, torch.uint16, torch.uint32, torch.uint64]
)
def test_tensors_of_every_layout_come_back(dtype):
    base = torch.arange(24).view(2, 3, 4).to(dtype)
    views = [base, base.permute(2, 0, 1), base[..., :1], base[:1, :1, ::2], base[0, 0, 0], base[:0], base.conj()]
    for view, back in zip(views, decode(encode(views)), strict=True):
        assert (back.dtype, back.shape, back.is_contiguous()) == (dtype, view.shape, True)
        assert torch.equal(back, view)


def test_tensors_come_back_without_their_history_and_sparse_ones_are_refused():
    assert not decode(encode(torch.ones(2).requires_grad_() * 2)).requires_grad
    with pytest.raises(errors.InvalidTensorError, match="dense"):
        encode([torch.eye(2).to_sparse()])


def test_pickled_bytes_are_not_loaded_unless_asked_for():
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("it went off",)

    data = encode(0, allow_pickle=True)
    armed = torch.cat([data[: HEADER.size], torch.tensor(list(pickle.dumps(Bomb())), dtype=torch.uint8)])
    with pytest.raises(errors.ConfigurationError, match="pickle"):
        decode(armed)


HEADER = struct.Struct("<BQ")


def message(document, blobs=b"", flag=0):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return HEADER.pack(flag, len(text)) + text + blobs


def arrived(raw):
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def read(raw):
    """What ``raw`` holds; None if it is refused, as from its sender. Memory grows by what came, and little else."""
    try:
        found = decode(arrived(raw), sender=7)
    except errors.CollectiveMismatchError as error:
        assert error.peers == (7,)
        assert "rank 7" in str(error)
        return None
    except errors.ConfigurationError as error:  # It is a failure of the sender, or pickle.
        assert error.argument in ("obj", "allow_pickle")
        return None
    assert sum(one.nbytes for one in tree_leaves(found) if isinstance(one, torch.Tensor)) <= len(raw)
    return found


@pytest.mark.parametrize(
    "raw",
    [
        message(["tensor", "uint8", [1500 << 20]], b"\x01"), message(["tensor", "float32", [8]]),
        message(["tensor", "int64", [2**40, 2**40]], b"12345678"), message(["tensor", "uint8", [0, 2**70]]),
        message(["tensor", "uint8", [-1, -2]], b"ab"), message(["tensor", "uint8", [True]], b"a"),
        message(["tensor", "uint8", 2], b"ab"), message(["tensor", "uint8"], b"ab"),
        message(["tensor", "quint8", [2]], b"ab"),
        message(["bytes", 10], b"abc"), message(["bytes", 2.0], b"ab"), message(["bytes", 2], b"abc"),
        message(["list", ["bytes", 3], ["bytes", -3], ["bytes", 3]], b"abcdef"),
        message(["evil", 2], b"ab"), message(["complex", 1, "j"]), message(["set", ["list"]]),
        message(["dict", [["list"], 1]]), message(["dict", 3]), message([["list"], 1]), message({"a": 1}), message([]),
        message(b"[" * 100_000 + b"]" * 100_000), message(b"9" * 10_000), message(b"\xff\xfe"), message(1, flag=9),
        HEADER.pack(0, 1 << 62) + b"1", HEADER.pack(0, 3)[:5], b"",
    ],
    ids=lambda raw: repr(raw[9:45]),
)  # fmt: skip
def test_bytes_that_are_no_object_are_one_error_that_names_their_sender(raw):
    with pytest.raises(errors.CollectiveMismatchError, match="bytes of rank 7 are no object"):
        decode(arrived(raw), sender=7)


def test_a_failure_arrives_as_one_and_is_shown_if_it_is_no_text():
    with pytest.raises(errors.ConfigurationError, match="no such thing"):
        decode(encode_failure("no such thing"))
    assert read(message(b"", b"\xff\xfe", flag=2)) is None
    with pytest.raises(errors.ConfigurationError, match=r"\\xff"):
        decode(arrived(message(b"", b"\xff", flag=2)))


@given(st.binary(max_size=200))
def test_no_bytes_are_another_error(raw):
    read(raw)


@given(st.binary(max_size=80), st.binary(max_size=30))
def test_no_document_is_another_error(document, blobs):
    read(message(document, blobs))


TENSORS = st.sampled_from([torch.arange(5), torch.ones(2, 3), torch.zeros(0), torch.tensor(1, dtype=torch.uint16)])
DOCUMENTS = st.recursive(
    st.one_of(LEAVES, TENSORS), lambda inner: st.one_of(st.lists(inner), st.dictionaries(KEYS, inner)), max_leaves=6
)


@given(DOCUMENTS, st.data())
def test_a_message_that_was_changed_is_refused_or_has_nothing_that_was_not_sent(value, data):
    raw = bytearray(as_bytes(encode(value)))
    cut = data.draw(st.integers(0, len(raw)))
    way = data.draw(st.sampled_from(["cut", "more", "flip", "delete"]))
    if way == "cut":
        del raw[cut:]
    elif way == "more":
        raw += data.draw(st.binary(min_size=1, max_size=9))
        assert read(raw) is None
    elif way == "delete":
        del raw[cut : cut + data.draw(st.integers(1, 9))]
    elif cut < len(raw):
        raw[cut] ^= 1 << data.draw(st.integers(0, 7))
    read(raw)


def nested(levels, *tag):
    value = 1
    for _ in range(levels):
        value = [*tag, value]
    return value


def test_objects_end_at_a_depth_that_both_sides_know():
    assert decode(encode(nested(100))) == nested(100)
    with pytest.raises(errors.ConfigurationError, match="too deeply"):
        encode(nested(101))
    assert read(message(nested(101, "list"))) is None
