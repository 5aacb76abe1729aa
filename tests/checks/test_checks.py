"""Checks of arguments: what passes, and what the errors say."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from bagua.checks import check_choice, check_flags, check_kind, check_numbers, check_whole
from bagua.errors import ConfigurationError, InvalidTypeError


def _positive(number: float) -> bool:
    return number > 0


def test_what_is_right_passes():
    check_flags(one=True, other=False)
    check_whole(0, steps=0)
    check_whole(-3, steps=-3)
    check_numbers(_positive, "> 0", whole=1, real=0.5, single=np.float32(2), endless=math.inf)
    check_choice(("a", None), first="a", second=None)
    check_kind((str, bytes), "text", name="name", data=b"")


@pytest.mark.parametrize("wrong", ["no", "", 1, 0, None, np.True_, [True]])
def test_a_flag_is_true_or_false(wrong):
    with pytest.raises(InvalidTypeError) as caught:
        check_flags(right=True, wrong=wrong)
    assert (caught.value.argument, caught.value.expected) == ("wrong", "True or False")
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("wrong", ["3", 3.0, True, None, np.int64(3)])
def test_a_whole_number_is_an_int(wrong):
    with pytest.raises(InvalidTypeError) as caught:
        check_whole(1, steps=wrong)
    assert (caught.value.argument, caught.value.expected) == ("steps", "a whole number >= 1")


@pytest.mark.parametrize("wrong", ["3", True, None, 1j, [1]])
def test_a_number_is_real(wrong):
    with pytest.raises(InvalidTypeError, match=r"argument lr, expected > 0"):
        check_numbers(_positive, "> 0", lr=wrong)


def test_a_value_out_of_its_range_has_the_right_type():
    for check in (
        lambda: check_whole(1, size=0),
        lambda: check_numbers(_positive, "> 0", size=0),
        lambda: check_numbers(lambda _: True, "a number", size=math.nan),
        lambda: check_choice((1, 2), size=3),
        lambda: check_choice((1, 2), size=True),
    ):
        with pytest.raises(ConfigurationError, match=r"^size must be .*, not \w+$") as caught:
            check()
        assert not isinstance(caught.value, TypeError)


def test_choices_are_named():
    with pytest.raises(ConfigurationError, match=r"^side must be 'left' or 'right', not 'up'$"):
        check_choice(("left", "right"), side="up")


def test_the_error_of_a_wrong_type_is_what_anybody_would_catch_and_survives_pickling():
    with pytest.raises(TypeError) as caught:
        check_flags(average="no")
    assert isinstance(caught.value, ValueError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (InvalidTypeError, str(caught.value))


def test_a_large_value_is_shown_in_short():
    with pytest.raises(InvalidTypeError) as caught:
        check_flags(average=list(range(10_000)))
    assert len(str(caught.value)) < 200
