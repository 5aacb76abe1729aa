"""How ranks find out who is lost when a connection breaks: mailboxes, and what follows from what is found in them."""

import os
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import FileStore, HashStore

from bagua import errors
from bagua.comm import Membership, addresses
from bagua.comm.transports import failure as c10d_notices
from bagua.comm.transports.failure import Cause, FailureFinder, Findings, Mailbox, ended_error, lost_error
from tests.harness import in_threads
from tests.launching import PATIENCE_S, launched

RANKS = (4, 5, 6, 7)
CAUSE = Cause(5, 7, "aborted", "it had enough")


def membership(store: Any, rank: int, size: int = 4, nodes: tuple[int, ...] | None = None) -> Membership:
    return Membership(store, rank, RANKS[:size], nodes or (0,) * size, 5.0, label="test")


@pytest.fixture
def connected() -> Iterator[Callable[..., list[Mailbox]]]:
    """Makes mailboxes that have met, and closes them at the end."""
    made: list[Mailbox] = []

    def connect(store: Any, nodes: tuple[int, ...] | None = None, size: int = 4) -> list[Mailbox]:
        made.extend(Mailbox(membership(store, rank, size, nodes)) for rank in range(size))
        in_threads(size, lambda rank: made[rank].meet())
        return made

    yield connect
    for box in made:
        box.close()


boxes = pytest.fixture(lambda connected: connected(HashStore()))


def test_the_first_cause_that_comes_is_kept(boxes: list[Mailbox]) -> None:
    boxes[1].tell(CAUSE)
    boxes[2].tell(Cause(6, 6, "aborted", "it came too late"))
    assert boxes[0].look() == Findings(CAUSE)
    assert boxes[0].find_out().cause == CAUSE
    assert boxes[3].cause() == CAUSE


def test_a_notice_outlives_the_rank_that_sent_it(boxes: list[Mailbox]) -> None:
    boxes[1].tell(CAUSE)
    boxes[1].close()
    boxes[3].close()
    assert boxes[0].look().cause == CAUSE


@pytest.mark.parametrize(
    ("tell", "close", "everyone", "found"),
    [
        ((), (2,), False, Findings(lost=(6,), silent=(5, 7))),
        ((1, 2, 3), (3,), True, Findings()),
        ((1,), (2,), True, Findings(lost=(6,), silent=(7,))),
    ],
)
def test_who_refuses_connections_is_lost_and_who_accepts_them_and_says_nothing_is_silent(
    boxes: list[Mailbox], monkeypatch: pytest.MonkeyPatch, tell, close, everyone, found
) -> None:
    monkeypatch.setattr(c10d_notices, "ATTENDANCE_S", 0.05)
    for place in tell:
        boxes[place].tell(None)
    for place in close:
        boxes[place].close()
    assert everyone or boxes[0].look() == found
    assert boxes[0].find_out(everyone=everyone) == found


def test_a_refusal_of_a_host_that_was_never_reached_proves_nothing(
    connected: Callable[..., list[Mailbox]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unreachable:
        unreachable.setattr(Mailbox, "_reach", lambda box, ranks, notice: dict.fromkeys(ranks, False))
        boxes = connected(HashStore(), (0, 0, 1, 1))
        assert boxes[0].look() == Findings(silent=(5, 6, 7))
    assert isinstance(boxes[0]._addresses[2], c10d_notices._Address)


@pytest.mark.parametrize("device", ["lo", "no-such-device", "lo, eth7"])
def test_other_hosts_are_reached_by_the_address_that_gloo_takes(
    connected: Callable[..., list[Mailbox]], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Gloo says what is wrong with a device; the mailboxes of this host work until then."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", device)
    boxes = connected(HashStore(), (0, 0, 1, 1))
    assert {address.host for address in boxes[0]._addresses.values()} == {"127.0.0.1"}
    boxes[3].close()
    assert boxes[0].look().lost == (7,)
    boxes[1].tell(CAUSE)
    assert boxes[0].cause() == CAUSE


SPOILT = [b"", b"[]", b"{}", b'{"rank": 1, "cause": [1]}', b'{"rank": "x", "cause": null}']
STRANGE = [b"", b"x", b"\xff\n{}", b'wrong\n{"rank": 1, "cause": null}', b"x" * 20_000]


@pytest.mark.parametrize(("knows", "text"), [*product([True], SPOILT), *product([False], STRANGE)])
def test_what_is_spoilt_or_comes_from_strangers_is_no_cause(boxes: list[Mailbox], knows: bool, text: bytes) -> None:
    with socket.create_connection(boxes[0]._listener.getsockname()) as sender:
        sender.sendall(boxes[0]._token.encode() + b"\n" + text if knows else text)
    assert boxes[0].cause() is None
    assert knows or boxes[0]._unheard() == [1, 2, 3]


def test_a_notice_that_comes_in_pieces_is_read_when_it_is_whole(boxes: list[Mailbox]) -> None:
    with socket.create_connection(boxes[0]._listener.getsockname()) as sender:
        sender.sendall(boxes[0]._token.encode())
        assert boxes[0].cause() is None
        sender.sendall(b'\n{"rank": 1, "cause": [5, 7, "aborted", "it had enough"]}')
    assert boxes[0].cause() == CAUSE


@pytest.mark.parametrize("reason", ["it read data-\udcff.bin", "it failed: " + "ä" * 10_000])
def test_any_reason_can_be_told(boxes: list[Mailbox], reason: str) -> None:
    boxes[1].tell(CAUSE._replace(reason=reason))
    assert boxes[0].cause().reason.startswith(reason[:9])


def test_closing_twice_and_telling_after_the_end(boxes: list[Mailbox]) -> None:
    boxes[0].close()
    boxes[0].close()
    boxes[0].tell(CAUSE)
    assert [box.cause() for box in boxes[:2]] == [None, CAUSE]


def test_ranks_find_each_other_through_a_file(connected: Callable[..., list[Mailbox]], tmp_path: Path) -> None:
    assert connected(FileStore(str(tmp_path / "store"), 2), size=2)[0].look() == Findings(silent=(5,))


def test_no_socket_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d_notices, "listen", Mock(side_effect=OSError(24, "Too many open files")))
    with pytest.raises(errors.TransportUnavailableError, match="Too many open files"):
        Mailbox(membership(HashStore(), 0))


def test_meeting_names_who_is_missing() -> None:
    box = Mailbox(replace(membership(HashStore(), 1, 3), timeout_s=0.05))
    with pytest.raises(errors.CollectiveTimeoutError, match="2 of 3 ranks did not come") as caught:
        box.meet()
    assert (caught.value.peers, caught.value.rank) == ((4, 6), 5)
    assert caught.value.call == "the set-up of communicator test"
    assert caught.value.advice == "Every member must make the same groups in the same order."
    box.close()


@pytest.mark.parametrize(
    ("found", "lost_and_silent", "words"),
    [
        (Findings(CAUSE, silent=(6,)), ((7,), ()), "lost rank 7: it had enough"),
        (Findings(CAUSE._replace(culprit=4)), ((5,), ()), "lost rank 5: it gave up rank 4: it had enough"),
        (Findings(lost=(6,), silent=(5,)), ((6,), ()), "lost rank 6: it ended, or closed its communicator"),
        (Findings(lost=(6, 7)), ((6, 7), ()), "lost ranks 6, 7: they ended"),
        (Findings(silent=(5, 6)), ((), (5, 6)), "no rank is known to be lost: Connection closed by peer"),
    ],
)
def test_what_a_lost_connection_meant(found: Findings, lost_and_silent: tuple[Any, Any], words: str) -> None:
    error = lost_error(RuntimeError("Connection closed by peer\nException raised from ..."), found, 4, 1.0, 10.0)
    assert type(error) is errors.PeerLostError
    assert (error.peers, error.silent) == lost_and_silent
    assert words in str(error)
    assert str(error).count("lost rank") <= 1


@pytest.mark.parametrize("late", [(5,), (0, 4, 12)])
def test_who_came_late_is_told_alike_on_all_ranks(late: tuple[int, ...]) -> None:
    culprit, reason = errors.blame(errors.CollectiveTimeoutError.of(late, 2.5, 7), 7, "a call")
    for rank in (7, *late):
        told = errors.relayed(culprit, reason, rank, teller=7)
        assert type(told) is errors.CollectiveTimeoutError
        assert (told.peers, told.timeout_s) == (late, 2.5)
        assert ("this rank came late" in str(told)) == (rank in late)


def test_a_call_after_the_end_names_who_ended_it() -> None:
    assert type(ended_error(CAUSE, 5)) is errors.PeerLostError
    assert type(ended_error(CAUSE, 7)) is errors.CommunicatorClosedError


def test_too_many_open_files_end_no_rank_with_another_error(boxes: list[Mailbox]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        boxes[0].tell(CAUSE)
        assert boxes[0].look().lost == ()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_close_though_no_notice_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mailbox, "tell", Mock(side_effect=MemoryError))
    disconnect = Mock()
    finder = FailureFinder(membership(HashStore(), 0, 1), disconnect, bool)
    with pytest.raises(MemoryError):
        finder.abort("it had enough")
    assert disconnect.call_count == 1
    finder.close()


@pytest.mark.parametrize("listens", ["fd00::8", None])
def test_a_host_without_ipv4_has_an_address_of_ipv6(listens: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(host: str) -> socket.socket:
        if host != listens:
            raise OSError
        return socket.socket()

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", Mock(side_effect=socket.gaierror))
    found = ["::1", "fe80::1%eth0", "fd00::8"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(10, 1, 6, "", (host, 0, 0, 0)) for host in found])
    monkeypatch.setattr(addresses, "listen", listen)
    assert addresses.own_address() == (listens or "127.0.0.1")


def test_the_addresses_of_a_device_are_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "if_inet6"
    file.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "fd000000000000000000000000000008 02 40 00 80     eth0\n"
        "fd000000000000000000000000000009 03 40 00 80     eth1\n"
    )
    monkeypatch.setattr(addresses, "Path", lambda _: file)
    assert [addresses._addresses_of_ipv6(device) for device in ("eth0", "lo")] == [["fd00::8"], []]


#: What C++ says when it kills the process at exit.
LAST_WORDS = ("terminate called", "Fatal Python error", "Segmentation fault")
#: For each scenario of ``c10d_scenarios.py`` what ranks say.
SCENARIOS = {
    "interrupted": {1: ("KeyboardInterrupt", "soon=True"),
                    0: ("PeerLostError soon=True lost rank 1: it left", "KeyboardInterrupt")},
    "late_writes": {0: ("untouched True", "CollectiveTimeoutError")},
    "leaves_with_calls_under_way": dict.fromkeys((0, 1), ("ready",)),
}  # fmt: skip


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_end_by_themselves_in_time_and_say_why(scenario: str) -> None:
    with launched(2, "-m", "tests.comm.c10d_scenarios", scenario) as ranks:
        for rank, words in SCENARIOS[scenario].items():
            output, _ = ranks[rank].communicate(timeout=PATIENCE_S)
            assert not any(last in output for last in LAST_WORDS), output
            assert all(word in output for word in words), output
            assert ranks[rank].returncode == (0 if scenario == "leaves_with_calls_under_way" else 3), output
