"""`bagua chaos` with processes: they are killed, stopped, cut off and filled up, and none is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagua.cli.chaos import command
from bagua.cli.chaos.places import Home, links, open_places
from bagua.cli.chaos.processes import Processes, end_all, marked, ranks_of
from bagua.cli.chaos.progress import MemberProgress, ProgressReader
from bagua.cli.chaos.referee import Ended
from bagua.cli.chaos.schedule import Fault, FaultSchedule
from bagua.cli.chaos.service import ServiceError, open_service
from bagua.cli.lab import network
from bagua.cli.lab.network import INTERFACE, LabUnavailableError, inside, open_network
from bagua.cli.main import main
from bagua.comm import serve_store_at
from bagua.link import LinkSettings, parse_link
from tests.interpreters import interpreter

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 60.0
needs_lab = pytest.mark.skipif(network.refusal() is not None, reason=str(network.refusal()))

TRAINER = """
import sys, time
for step in range(1, 10**9):
    print("step", step, flush=True)
    time.sleep(0.01)
"""
#: As torchrun: two ranks in sessions of their own, one of which starts a helper. It ends when a rank does.
LAUNCHER = f"""
import os, subprocess, sys, time
rank = [sys.executable, "-S", "-c", '''{TRAINER}''']
helped = [sys.executable, "-S", "-c", '''import subprocess, sys; subprocess.run(sys.argv[1:])''', *rank]
ranks = [
    subprocess.Popen(words, env={{**os.environ, "LOCAL_RANK": str(number)}}, start_new_session=True)
    for number, words in enumerate([rank, helped])
]
while all(one.poll() is None for one in ranks):
    time.sleep(0.01)
sys.exit(1)
"""


@contextlib.contextmanager
def members(script: str, count: int = 1, *, ranks: bool = False, **options) -> Iterator[Processes]:
    started = Processes(
        command=[sys.executable, "-S", "-c", script, "{member}", "{first}", "{service}"],
        places=options.pop("places", [Home()] * count),
        run=f"test-{os.getpid()}-{time.monotonic_ns()}",
        words={"first": "1.2.3.4", "service": "5.6.7.8"},
        variables={},
        reader=ProgressReader(),
        files=None,
        faults=options.pop("faults", {}),
        hits_ranks=ranks,
        clock=time.monotonic,
        **options,
    )
    try:
        yield started
    finally:
        started.close()
        assert marked(f"{started.run}/0") == []


def wait_for(crew: Processes, wanted: Callable[[Ended | MemberProgress], bool]) -> Ended | MemberProgress:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        for event in crew.poll():
            if wanted(event):
                return event
        time.sleep(0.005)
    raise AssertionError("it does not happen")


def state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_states(processes: list[int], wanted: bool) -> None:
    """Until all of them are stopped, or none."""
    until = time.monotonic() + DEADLINE_S
    while any((state(one) == "T") is not wanted for one in processes):
        assert time.monotonic() < until
        time.sleep(0.005)


def said(event: Ended | MemberProgress) -> bool:
    return isinstance(event, MemberProgress)


def ended(event: Ended | MemberProgress) -> bool:
    return isinstance(event, Ended)


KILL, STOP = Fault(0.0, "kill", (0,), 0.0, 0.0), Fault(0.0, "stop", (0,), 5.0, 0.6)


def test_a_member_is_killed_and_starts_again() -> None:
    with members(TRAINER) as crew:
        crew.start(0)
        wait_for(crew, said)
        assert crew.hit(KILL, 0) == "1 process killed"
        assert wait_for(crew, ended).status == -signal.SIGKILL
        crew.start(0)
        assert wait_for(crew, said).step == 1


def test_a_member_stops_and_goes_on() -> None:
    with members(TRAINER) as crew:
        crew.start(0)
        wait_for(crew, said)
        processes = marked(f"{crew.run}/0")
        assert crew.hit(STOP, 0) == "1 process stopped for 5.0 s"
        wait_for_states(processes, True)
        last = max((event.step for event in crew.poll()), default=0)
        crew.lift(STOP, 0)
        wait_for(crew, lambda event: said(event) and event.step > last + 2)


def test_a_launcher_is_killed_with_all_that_it_started_in_whatever_session() -> None:
    with members(LAUNCHER) as crew:
        crew.start(0)
        wait_for(crew, said)
        processes = marked(f"{crew.run}/0")
        while len(ranks_of(processes)) < 2 or len(processes) < 4:
            wait_for(crew, said)
            processes = marked(f"{crew.run}/0")
        assert crew.hit(KILL, 0) == "4 processes killed"
        assert wait_for(crew, ended).status == -signal.SIGKILL


def test_one_rank_of_a_launcher_is_killed_and_its_helpers_are_no_ranks() -> None:
    with members(LAUNCHER, ranks=True) as crew:
        crew.start(0)
        wait_for(crew, said)
        while len(ranks_of(marked(f"{crew.run}/0"))) < 2:
            wait_for(crew, said)
        assert crew.hit(KILL, 0).startswith("one rank of 2, process ")
        # The launcher ends, and what it leaves behind does, too.
        assert wait_for(crew, ended).status == 1
        assert marked(f"{crew.run}/0") == []


def test_words_of_the_command_are_replaced() -> None:
    lines: list[str] = []
    script = "import sys; print(*sys.argv[1:], 'step', 1)"
    with members(script, 2, echo=lambda member, line: lines.append(f"{member}: {line.strip()}")) as crew:
        crew.start(1)
        assert wait_for(crew, ended).status == 0
    assert lines == ["1: 1 1.2.3.4 5.6.7.8 step 1"]


def test_members_are_ended_that_do_not_want_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua.cli.chaos.processes.STOP_S", 0.1)
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN){TRAINER}"
    with members(stubborn) as crew:
        crew.start(0)
        wait_for(crew, said)
        crew.hit(STOP, 0)
        member = crew._running[0].process
        crew.close()
        assert member.returncode == -signal.SIGKILL
        assert marked(f"{crew.run}/0") == []


def test_a_signal_waits_until_the_member_that_starts_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.Popen

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def start_and_signal(*arguments, **options):
        process = started(*arguments, **options)
        signal.raise_signal(signal.SIGTERM)
        return process

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with members(TRAINER) as crew:
            monkeypatch.setattr(subprocess, "Popen", start_and_signal)
            with pytest.raises(KeyboardInterrupt):
                crew.start(0)
            monkeypatch.undo()
            assert wait_for(crew, said).member == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_store_that_ends_at_once_is_an_error() -> None:
    failing = [sys.executable, "-S", "-c", "print('no port'); raise SystemExit(4)"]
    lines: list[str] = []
    with (
        pytest.raises(ServiceError, match="status 4"),
        open_service(failing, Home(), "m", lines.append, is_store=True),
    ):
        pass
    assert lines == ["no port\n"]


def test_another_service_runs_until_the_end_and_the_store_says_where_it_is() -> None:
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    script = "import time; print('Islands meet at tcp://there:1.', flush=True); time.sleep(600)"
    store = [sys.executable, "-S", "-c", script]
    with open_service(store, Home(), mark, lambda _: None, is_store=True) as where:
        assert where == "tcp://there:1"
        assert len(marked(mark)) == 1
    assert marked(mark) == []
    end_all(mark)


@needs_lab
def test_a_link_is_cut_and_mended() -> None:
    with open_network(2) as lab:
        ends = []
        for host in lab.hosts:
            with inside(host.namespace):
                ends.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                ends[-1].bind((host.address, 0))
        faults = links(lab, LinkSettings(), parse_link("1mbit"))
        fault = Fault(0.0, "partition", (1,), 5.0, 0.0)
        try:
            _pass(ends, b"before")
            assert faults["partition"][0](fault, 1) == "its link is cut for 5.0 s"
            ends[0].sendto(b"lost", ends[1].getsockname())
            faults["partition"][1](fault, 1)
            _pass(ends, b"after")
        finally:
            for end in ends:
                end.close()


def _pass(ends: list[socket.socket], message: bytes) -> None:
    """Send ``message`` until it arrives, and nothing else does."""
    ends[1].settimeout(0.05)
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        ends[0].sendto(message, ends[1].getsockname())
        with contextlib.suppress(TimeoutError):
            assert ends[1].recv(100) in {b"before", message}
            return
    raise AssertionError("nothing arrives")


@needs_lab
def test_a_link_is_slow_for_a_while() -> None:
    with open_places(1, parse_link("100mbit")) as (places, lab):
        faults = links(lab, parse_link("100mbit"), parse_link("1mbit"))
        fault = Fault(0.0, "slow", (0,), 5.0, 0.0)
        assert places[0].variables["GLOO_SOCKET_IFNAME"] == INTERFACE
        rates = [_rate(lab)]
        assert faults["slow"][0](fault, 0) == "its link is 1mbit for 5.0 s"
        rates.append(_rate(lab))
        faults["slow"][1](fault, 0)
        assert [*rates, _rate(lab)] == ["100Mbit", "1Mbit", "100Mbit"]


def _rate(lab: network.Network) -> str:
    with inside(lab.hosts[0].namespace):
        shown = subprocess.run(["tc", "qdisc", "show", "dev", INTERFACE], capture_output=True, text=True, check=True)
    words = shown.stdout.split()
    return words[words.index("rate") + 1]


def test_a_link_with_delay_cannot_be_cut() -> None:
    with pytest.raises(LabUnavailableError, match="leave delay and loss out"), open_places(2, parse_link("1mbit,5ms")):
        pass


FILLS_A_DISK = """
import errno, sys
from pathlib import Path
from bagua.cli.chaos.places import disks
from bagua.cli.chaos.schedule import Fault
fault = Fault(0.0, "disk", (0,), 5.0, 0.0)
begin, end = disks([sys.argv[1]], 1)["disk"]
checkpoint = Path(sys.argv[1]) / "checkpoint"
print(begin(fault, 0))
try:
    checkpoint.write_bytes(bytes(100_000))
except OSError as error:
    print(error.errno == errno.ENOSPC)
end(fault, 0)
print(checkpoint.write_bytes(bytes(100_000)))
"""


@needs_lab
def test_a_disk_is_full_for_a_while_and_nobody_else_sees_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run = subprocess.run(
        [sys.executable, "-c", FILLS_A_DISK, str(folder)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert run.stdout.splitlines() == ["its disk is full for 5.0 s", "True", "100000"], run.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.gloo
def test_islands_survive_a_kill_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, where = serve_store_at("127.0.0.1", 0)
    monkeypatch.setenv("BAGUA_ISLANDS", where)
    schedule = FaultSchedule(0, 2, 0.5, (Fault(0.1, "kill", (1, 0), 0.0, 0.0),))
    plan, report = tmp_path / "schedule.json", tmp_path / "report.json"
    plan.write_text(json.dumps(schedule.to_json()))
    words = ["--members", "2", "--schedule", str(plan), "--restart-after", "0", "--report", str(report), "--quiet"]
    words += ["--hang", "600"]
    assert main(["chaos", *words, "--", *interpreter(), "-m", "tests.membership.chaos_island"]) == 0
    del store
    found = json.loads(report.read_text())
    assert found["schedule"] == json.loads(plan.read_text())
    assert [one["kind"] for one in found["faults"]] == ["kill"]
    assert found["restarts"] >= 1
    assert found["faults"][0]["back_s"] > 0
    assert found["digests"] > 2
    assert found["different_digests"] == {}
    assert found["hangs"] == []
    assert found["goodput"] > 0


def test_who_is_terminated_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(command.uuid, "uuid4", lambda: SimpleNamespace(hex=f"{os.getpid()}"))
    mark = f"chaos-{os.getpid()}/0"

    def terminate() -> None:
        until = time.monotonic() + DEADLINE_S
        while not marked(mark) and time.monotonic() < until:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    words = ["chaos", "--mix", "kill", "--quiet", "--", sys.executable, "-S", "-c", TRAINER]
    assert main(words) == command.INTERRUPTED
    thread.join()
    assert marked(mark) == []
    assert "interrupted" in capsys.readouterr().err
