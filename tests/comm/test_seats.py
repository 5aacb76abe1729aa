"""Groups of processes that come and go: either all connect, or nobody does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import PrefixStore

from bagua.comm import PhaseDeadline, group_of_seats
from bagua.comm.startup import seats
from bagua.comm.store.serving import thread_store
from bagua.errors import CommunicatorClosedError, PeerLostError

LONG_S = 60.0


def meet(store, own, look=None):
    return group_of_seats(store, [3, 5], own, "epoch1", backend="threads", timeout_s=LONG_S, meet_s=LONG_S, look=look)


def leave():
    raise CommunicatorClosedError("it left")


def test_who_comes_after_another_has_gone_does_not_wait_for_it():
    store, looks = thread_store(), iter([None, leave])

    def look():
        action = next(looks)
        if action is not None:
            action()

    with pytest.raises(CommunicatorClosedError, match="it left"):
        meet(store, 3, look)
    with pytest.raises(PeerLostError, match="has gone before all were there"):
        meet(store, 5)


def test_who_has_left_does_not_come():
    store = thread_store()
    with pytest.raises(CommunicatorClosedError, match="it left"):
        meet(store, 3, leave)
    assert not PrefixStore("epoch1", store).check(["here/0"])


def test_who_wants_to_go_when_all_have_met_connects_with_them():
    store = thread_store()
    members = PrefixStore("epoch1", store)
    looks = 0

    def look():
        nonlocal looks
        looks += 1
        if looks > 1:  # The other one comes, and sees this one, before this one looks again.
            members.compare_set("meeting", "", "on")
            leave()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, store, 3, look)
        while not members.check(["meeting"]):
            assert not first.done()
        groups = [pool.submit(meet, store, 5).result(LONG_S), first.result(LONG_S)]
    assert [group.rank for group in groups] == [1, 0]
    for group in groups:
        group.close()


def test_to_connect_may_take_as_long_as_usual_and_longer_after_a_failure(monkeypatch):
    limits, deadline = [], PhaseDeadline(10.0, 3.0)
    made = seats.ProcessGroup

    def note(*arguments):
        limits.append(arguments[5])
        if len(limits) == 3:
            raise PeerLostError("it has gone", peers=[5])
        return made(*arguments)

    monkeypatch.setattr(seats, "ProcessGroup", note)

    def connect(name):
        arguments = {"backend": "threads", "timeout_s": LONG_S, "meet_s": LONG_S, "connecting": deadline}
        group_of_seats(thread_store(), [3], 3, name, **arguments).close()

    connect("epoch1")
    connect("epoch2")
    with pytest.raises(PeerLostError, match="it has gone"):
        connect("epoch3")
    connect("epoch4")
    assert limits == [10.0, 3.0, 3.0, 10.0]
