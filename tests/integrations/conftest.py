"""Forked interpreters that have imported what the examples of other frameworks begin with: that takes seconds."""

import importlib.util

import pytest

_FRAMEWORKS = ("accelerate", "lightning.pytorch", "transformers.trainer")


@pytest.fixture(scope="session")
def imported_before() -> tuple[str, ...]:
    return tuple(name for name in _FRAMEWORKS if importlib.util.find_spec(name.partition(".")[0]))
