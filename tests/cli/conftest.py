"""What the tests of commands share."""

import multiprocessing

import pytest

from bagua.cli import launch
from bagua.testing import worker


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the launcher come from the fork server of the rank pools; the demo's tests start them as users do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    monkeypatch.setattr(launch.multiprocessing, "get_context", lambda _: context)
