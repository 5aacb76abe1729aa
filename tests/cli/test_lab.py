"""`bagua lab`: a user's script on hosts with slow links, and a switch that delays and drops as it is told."""

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from bagua.cli.lab import command, network
from bagua.cli.lab.switch import HEADER_BYTES, FrameSchedule, SwitchReport
from bagua.cli.main import main
from bagua.link import LinkSettings, parse_link
from tests.launching import finished
from tests.membership.servers import needs_moto, needs_obstore

needs_lab = pytest.mark.skipif(network.refusal() is not None, reason=str(network.refusal()))


def frame(receiver: int, nbytes: int = 100, name: bytes = b"") -> bytes:
    return bytes(HEADER_BYTES) + (bytes([2, 0, 0, 0, 0, receiver]) + name).ljust(nbytes, b".")


def due(schedule: FrameSchedule, now: float) -> list[tuple[int, bytes]]:
    return list(schedule.ready(now))


def lab(*words: str) -> subprocess.CompletedProcess[str]:
    return finished(sys.executable, "-m", "bagua", "lab", "--link", *words)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100mbit", LinkSettings(100.0, 100.0)), ("1gbit,250us", LinkSettings(1000.0, 1000.0, 0.25)),
        ("50mbit/512kbit,20ms,1%", LinkSettings(50.0, 0.512, 20.0, 0.01)),
        ("unlimited,0.1s", LinkSettings(None, None, 100.0)),
    ],
)  # fmt: skip
def test_links_are_read_and_written(text, link):
    assert parse_link(text) == parse_link(str(link)) == link


@pytest.mark.parametrize(
    "text", ["", "fast", "10", "10mb", "1bit", "10mbit,20", "10mbit,100%", "10mbit,-1%", "1.2.3mbit", "1mbit,61s"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"expected|has no number"):
        parse_link(text)


def test_frames_arrive_in_order_after_the_delay():
    schedule = FrameSchedule(3, delay_s=0.02)
    first, second, back = frame(1, name=b"a"), frame(1, name=b"b"), frame(0)
    for sender, sent, at in ((0, first, 1.0), (0, second, 1.0), (2, back, 1.01)):
        schedule.take(sender, sent, at)
    assert due(schedule, 1.019) == []
    assert schedule.wait_s(1.015) == pytest.approx(0.005)
    assert due(schedule, 1.025) == [(1, first), (1, second)]
    assert due(schedule, 1.03) == [(0, back)]
    assert (schedule.wait_s(2.0), schedule.report.frames) == (None, 3)
    assert schedule.report.latest_s == pytest.approx(0.005)


def test_a_broadcast_reaches_all_others_and_a_stranger_nobody():
    schedule = FrameSchedule(3)
    schedule.take(1, bytes(HEADER_BYTES) + b"\xff" * 6 + b"who?", 0.0)
    assert [receiver for receiver, _ in due(schedule, 0.0)] == [0, 2]
    for stray in (frame(7), frame(1), bytes(HEADER_BYTES) + b"\x33\x33\x00\x00\x00\x01"):
        schedule.take(1, stray, 0.0)
    assert due(schedule, 1.0) == []


def test_a_receiver_gets_its_rate_whoever_sends():
    schedule = FrameSchedule(3, receive_bytes_per_s=100_000.0)
    for sender, receiver in ((0, 2), (1, 2), (0, 1)):
        schedule.take(sender, frame(receiver, 1000), 0.0)
    # At first one for each receiver.
    assert [len(due(schedule, now)) for now in (0.0101, 0.0199, 0.0201)] == [2, 0, 1]


def test_a_packet_that_is_not_cut_yet_takes_the_time_of_its_frames():
    # 3,000 bytes in frames of at most 1,448, each with 66 bytes of headers.
    header = struct.pack("<BBHHHH", 1, 1, 66, 1448, 34, 16)
    packet = header + bytes([2, 0, 0, 0, 0, 1]) + bytes(60 + 3000)
    schedule = FrameSchedule(2, receive_bytes_per_s=1000.0)
    schedule.take(0, packet, 0.0)
    assert [due(schedule, now) for now in (3.197, 3.199)] == [[], [(1, packet)]]
    assert schedule.report.frames == 3


def test_frames_that_are_almost_due_may_leave_and_are_not_late():
    schedule = FrameSchedule(2, delay_s=0.05)
    schedule.take(0, frame(1, 1000), 0.0)
    assert [len(list(schedule.ready(now, 0.0005))) for now in (0.049, 0.0496)] == [0, 1]
    assert schedule.report.late_frames == 0


@pytest.mark.parametrize(("delay_s", "held"), [(0.0, 5), (0.05, 10)])
def test_a_queue_holds_50_ms_or_a_round_trip(delay_s, held):
    """What TCP has under way, so that a link stays busy while a window that was halved grows again."""
    schedule = FrameSchedule(2, delay_s=delay_s, receive_bytes_per_s=100_000.0)
    for _ in range(20):
        schedule.take(0, frame(1, 1000), 0.0)
    assert schedule.report.overflowed == 20 - (held + 1)  # of 10 ms each, and the one that is sent
    assert len(due(schedule, 1.0)) == held + 1


def test_losses_have_the_share_that_was_asked_for():
    schedule = FrameSchedule(2, loss=0.1)
    for _ in range(10_000):
        schedule.take(0, frame(1), 0.0)
    assert 900 < schedule.report.lost < 1100
    assert len(due(schedule, 0.0)) == 10_000 - schedule.report.lost


def test_a_switch_that_is_too_slow_says_so():
    assert SwitchReport(frames=1000, late_frames=5).warning is None
    assert "could not keep up" in str(SwitchReport(frames=1000, late_frames=50, latest_s=0.1).warning)


@pytest.mark.parametrize(
    ("given", "module"), [(["t.py", "-m"], False), (["--hosts", "2", "-m", "t"], True), (["--", "t.py", "-m"], False)]
)
def test_a_module_is_told_from_a_script(given, module):
    assert command.make_parser().parse_args(given).module is module


def test_bad_arguments_and_no_permission(capsys, monkeypatch):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["lab", "--link", "fast", "t.py"])
    assert "expected a number and one of kbit, mbit, gbit" in capsys.readouterr().err
    monkeypatch.setattr(network, "refusal", lambda: "no root")
    assert main(["lab", "t.py"]) == command.NOT_AVAILABLE
    assert capsys.readouterr().err == "no root\n"
    monkeypatch.undo()
    assert main(["lab", "--hosts", "251", "t.py"]) == command.NOT_AVAILABLE
    assert "at most 250 hosts" in capsys.readouterr().err


@pytest.fixture
def two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine twice, in the place of two hosts."""
    hosts = SimpleNamespace(hosts=[network.Host(number, "127.0.0.1", "") for number in range(2)], shortcoming="")
    monkeypatch.setattr(command, "open_network", lambda *_: contextlib.nullcontext(hosts))
    monkeypatch.setattr(command, "inside", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(command, "_sent_by", lambda _: 0)


@pytest.mark.usefixtures("two_places")
def test_what_a_rank_leaves_behind_holds_nobody_up(tmp_path, monkeypatch, capsys):
    """It has the output of the rank open, as a worker of a data loader has whose rank was killed."""
    script = tmp_path / "leaves.py"
    sleeper = "[sys.executable, '-S', '-c', 'import time; time.sleep(600)']"
    script.write_text(f"import subprocess, sys; print('left', subprocess.Popen({sleeper}).pid)")
    monkeypatch.setattr(command, "STOP_S", 0.5)
    before = set(threading.enumerate())
    assert main(["lab", str(script)]) == 0
    waiting = set(threading.enumerate()) - before
    for line in capsys.readouterr().out.splitlines():
        os.kill(int(line.split()[-1]), signal.SIGKILL)
    for thread in waiting:
        thread.join(60)
    assert all(thread.daemon for thread in waiting)


@pytest.mark.usefixtures("two_places")
@pytest.mark.parametrize("starting", [False, True], ids=["waiting", "starting"])
def test_who_is_terminated_ends_all_ranks(starting, tmp_path, monkeypatch, capsys):
    """While it waits for them, and while it starts the first."""
    script, started, popen = tmp_path / "sleeps.py", [], subprocess.Popen
    script.write_text("import time; time.sleep(600)")

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        if starting:
            signal.raise_signal(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(command.subprocess, "Popen", start)
    monkeypatch.setattr(command.Ranks, "_wait", lambda _: signal.raise_signal(signal.SIGTERM) or 0)
    assert main(["lab", str(script)]) == 130
    ended = [process.poll() is not None for process in started]
    for process in started:
        process.kill()
        process.wait()
    assert ended == [True] * (1 if starting else 2)
    assert "interrupted" in capsys.readouterr().err


@needs_lab
def test_sixteen_hosts_receive_and_send_at_rates_of_their_own_until_they_are_not_limited():
    with network.open_network(16, parse_link("100mbit")) as opened:
        assert len({host.address for host in opened.hosts}) == 16
        opened.set_rates(parse_link("50mbit/10mbit"))
        host = opened.hosts[15]
        sends, receives = (host.namespace, network.INTERFACE), (opened.switch, network.port_of(host))
        assert "rate 10Mbit " in _queueing(*sends)
        assert "rate 50Mbit " in _queueing(*receives)
        opened.set_rates(parse_link("unlimited"))
        assert not any("tbf" in _queueing(*end) for end in (sends, receives))


def _queueing(namespace: str, interface: str) -> str:
    with network.inside(namespace):
        return subprocess.check_output(["tc", "qdisc", "show", "dev", interface], text=True)


@needs_lab
def test_a_link_is_cut_and_mended():
    with network.open_network(2) as lab, contextlib.ExitStack() as stack:
        ends = []
        for host in lab.hosts:
            with network.inside(host.namespace):
                ends.append(stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
                ends[-1].bind((host.address, 0))
        _pass(ends, b"before")
        lab.cut(1)
        ends[0].sendto(b"lost", ends[1].getsockname())
        lab.mend(1)
        _pass(ends, b"after")


def _pass(ends: list[socket.socket], message: bytes) -> None:
    """Send ``message`` until it arrives, and nothing else does."""
    ends[1].settimeout(0.05)
    for _ in range(1000):
        ends[0].sendto(message, ends[1].getsockname())
        with contextlib.suppress(TimeoutError):
            assert ends[1].recv(100) in {b"before", message}
            return
    raise AssertionError("nothing arrives")


SCRIPT = """\
import sys, time, torch, bagua.comm as comm
comm.init_process_group(timeout=60)
tensor = torch.ones(1)
comm.allreduce(tensor)
started = time.perf_counter()
comm.allreduce(tensor)
if comm.get_rank() == 1:
    print("took", time.perf_counter() - started, comm.get_local_size(), tensor.item())
    sys.exit(7 if "fail" in sys.argv else 0)
"""


@needs_lab
@pytest.mark.gloo
def test_a_script_runs_on_hosts_with_a_delay_and_its_failure_is_passed_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = lab("100mbit,20ms", "--", str(script), "fail")
    assert done.returncode == 7, done.stderr
    name, _, said = done.stdout.strip().rpartition("] took ")
    assert name == "[host 1, rank 1"
    seconds, *others = map(float, said.split())
    assert seconds > 0.039  # there and back; how much more, the machine decides
    assert others == [1, 4], "ranks on a host, and the sum"
    assert all(part in done.stderr for part in ("links of 100mbit,20ms", "packets: "))


@needs_lab
@needs_obstore
@needs_moto
@pytest.mark.skipif(shutil.which("nft") is None, reason="the example closes its hosts with nft")
def test_hosts_that_let_no_connection_in_train_through_a_bucket():
    done = lab("100mbit", "--hosts", "3", "--", "examples/bucket_in_the_lab.py", "--steps", "40")
    assert done.returncode == 0, done.stderr
    for host, other in ((0, 1), (0, 2), (1, 2), (2, 1)):
        assert f"[host {host}, rank {host}] from host {host} to host {other}: timed out" in done.stdout
    one, other = (line.partition("] ")[2] for line in done.stdout.splitlines() if "norm of the weights" in line)
    assert one == other
    assert all(part in done.stdout for part in ("step 40: ", "2 islands"))
