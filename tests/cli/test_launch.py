"""The launcher and `baguarun` return what ranks return, say how they fail, and leave no process behind."""

import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

import pytest

from bagua.cli import launch
from bagua.cli.launch import Rank
from bagua.errors import CollectiveTimeoutError, PeerLostError
from tests.harness import until
from tests.interpreters import interpreter
from tests.launching import REPOSITORY, finished, free_port

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("forked_python")]


@pytest.fixture(autouse=True)
def short_grace(forked_ranks, monkeypatch):
    monkeypatch.setattr(launch.CommandRanks, "grace_s", 2.0)


def test_an_error_of_one_rank_arrives_with_its_type_and_facts():
    with pytest.raises(launch.RanksFailedError) as caught:
        launch.run_ranks(rank_one_raises, 2)
    (failure,) = caught.value.failures
    assert isinstance(failure.error, CollectiveTimeoutError)
    assert (failure.rank, failure.error.timeout_s) == (1, 2.5)
    assert "rank_one_raises" in failure.trace


def test_the_cause_comes_before_the_errors_that_follow_from_it():
    said = "rank 1 was killed by SIGKILL; rank 0 failed: PeerLost"
    with pytest.raises(launch.RanksFailedError, match=said) as caught:
        launch.run_ranks(rank_one_dies_and_the_other_notices, 2)
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
    assert isinstance(caught.value.failures[1].error, PeerLostError)


def test_a_rank_that_dies_in_the_middle_of_a_message_is_a_failure_as_any_other():
    with pytest.raises(launch.RanksFailedError, match="rank 0 was killed by SIGKILL"):
        launch.run_ranks(die_in_the_middle_of_a_message, 1)


def test_an_interrupt_ends_all_processes():
    process_ids = []

    def interrupt_at_second_report(report: object) -> None:
        process_ids.append(report)
        if len(process_ids) == 2:
            signal.raise_signal(signal.SIGINT)

    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch.run_ranks(sleep_long, 2, (), interrupt_at_second_report)
    assert time.monotonic() - start_s < 50  # they did not sleep to the end
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def rank_one_raises(rank: Rank) -> None:
    if rank.rank == 1:
        raise CollectiveTimeoutError("too slow", rank=1, timeout_s=2.5)
    time.sleep(60)


def rank_one_dies_and_the_other_notices(rank: Rank) -> None:
    if rank.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    raise PeerLostError("a rank is gone", rank=0, peers=(1,))


def die_in_the_middle_of_a_message(rank: Rank) -> None:
    report: Any = rank.report
    os.write(report.__self__._connection.fileno(), struct.pack("!i", 1000) + b"only this")
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long(rank: Rank) -> None:
    rank.report(os.getpid())
    time.sleep(60)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return finished(*interpreter(), "-m", "bagua.cli.baguarun", *arguments)


@pytest.fixture
def script(tmp_path):
    """Makes a script of a text. Returns its path."""
    path = tmp_path / "script.py"
    return lambda text: path.write_text(text) and str(path)


def test_the_tutorial_learns_on_two_processes_at_least_as_much_as_on_one(capsys):
    runpy.run_path(str(REPOSITORY / "examples/spiral_one_process.py"))
    done = run("--nproc", "2", "examples/spiral.py")
    assert done.returncode == 0, done.stderr
    one, two = (float(output.rpartition("accuracy ")[2]) for output in (capsys.readouterr().out, done.stdout))
    assert two >= one > 0.9  # rank 0 alone prints


def test_a_failed_script_is_an_exit_status_and_names_the_rank(script):
    fails = script("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    done = run("--nproc-per-node", "2", "--max-restarts", "0", fails)
    assert done.returncode == 1
    assert "baguarun: rank 1 ended too early, with exit status 3" in done.stderr
    assert "torch/distributed" not in done.stderr


def test_a_start_that_fails_is_told_in_the_summary(script):
    done = run("--nproc", "2", script("import bagua\nbagua.init_process_group(backend='carrier pigeon')\n"))
    assert done.returncode == 1
    assert "failed: TransportUnavailableError: there is no backend" in done.stderr, done.stderr


def test_an_error_names_its_rank_once_on_each_line(script):
    """The start of torch puts a hook of its own around ours."""
    fails = script("import bagua\nbagua.init_process_group()\nraise ValueError('no such file')\n")
    said = run("--nproc", "2", fails).stderr
    assert "[rank1]: ValueError: no such file" in said
    assert "[rank1]: [rank1]:" not in said


def test_who_waits_for_another_machine_says_so_and_hears_ctrl_c():
    port = free_port()
    words = f"-m bagua.cli.baguarun --nnodes 2 --node-rank 0 --master-port {port} train.py".split()
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True, cwd=REPOSITORY) as waiting:
        until(lambda: _listens(port))
        waiting.send_signal(signal.SIGINT)
        said = waiting.communicate(timeout=60)[1]
    assert waiting.returncode == -signal.SIGINT
    assert f"have met at 127.0.0.1:{port}" in said


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("flags", [(), ("--standalone",), ("--master-port", str(free_port()))])
def test_the_store_of_one_host_is_not_reached_from_others(flags, script):
    asks = script(
        "import os, socket\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], port)).close()\n"
        "try:\n"
        "    socket.create_connection(('127.0.0.2', port))\n"  # It reaches who listens on all interfaces.
        "except ConnectionRefusedError:\n"
        "    print(' refused ')\n"  # Between blanks: another rank may write before the end of the line.
    )
    done = run("--nproc", "2", *flags, asks, "--nproc", "7")
    assert (done.returncode, done.stdout.split()) == (0, ["refused", "refused"]), done.stderr
