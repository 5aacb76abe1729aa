"""Whatever has a safe encoding comes back as it was; nothing else gets in or out."""

import pickle
import struct
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.comm.objects import decode, encode, encode_failure
from bagua.errors import ConfigurationError, InvalidTensorError

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.binary().map(bytearray),
)
KEYS = st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.tuples(st.text(), st.integers()))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.sets(KEYS),
        st.frozensets(KEYS),
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


@given(VALUES)
def test_values_come_back(value):
    assert same(decode(encode(value)), value)


@given(VALUES)
def test_values_come_back_through_pickle(value):
    assert same(decode(encode(value, allow_pickle=True), allow_pickle=True), value)


def test_a_dictionary_keeps_its_order():
    assert list(decode(encode({"b": 1, "a": 2, 3: 3}))) == ["b", "a", 3]


@pytest.mark.parametrize(
    "value",
    [object(), Point(1, 2), OrderedDict(a=1), range(3), torch.float32, torch.device("cpu"), {"deep": [{1: print}]}],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_safe_encoding_is_refused_by_name(value):
    with pytest.raises(ConfigurationError, match="allow_pickle") as caught:
        encode(value)
    assert caught.value.argument == "obj"


def test_subclasses_do_not_lose_their_type_silently():
    class Whole(int):
        pass

    with pytest.raises(ConfigurationError, match="Whole"):
        encode(Whole(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bool, torch.bfloat16])
def test_tensors_of_every_layout_come_back(dtype):
    base = torch.arange(24).view(2, 3, 4).to(dtype)
    views = [base, base.permute(2, 0, 1), base[..., :1], base[:1, :1, ::2], base[0, 0, 0], base[:0], base.conj()]
    for view, back in zip(views, decode(encode(views)), strict=True):
        assert back.dtype is dtype
        assert back.shape == view.shape
        assert torch.equal(back, view)
        assert back.is_contiguous()


def test_a_sparse_tensor_is_refused():
    with pytest.raises(InvalidTensorError, match="dense"):
        encode([torch.eye(2).to_sparse()])


def test_pickled_bytes_are_not_loaded_unless_asked_for():
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("it went off",)

    data = encode(0, allow_pickle=True)
    armed = torch.cat([data[: struct.calcsize("<BQ")], torch.tensor(list(pickle.dumps(Bomb())), dtype=torch.uint8)])
    with pytest.raises(ConfigurationError, match="pickle"):
        decode(armed)


def test_a_failure_arrives_as_one():
    with pytest.raises(ConfigurationError, match="no such thing"):
        decode(encode_failure("no such thing"))


def test_padding_behind_the_data_does_no_harm():
    data = encode(["x", b"y", torch.ones(3)])
    padded = torch.cat([data, torch.zeros(20, dtype=torch.uint8)])
    assert decode(padded)[:2] == ["x", b"y"]
