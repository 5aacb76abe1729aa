"""What the commands answer to bad arguments, say of this machine, and say of a run that failed."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.elastic.multiprocessing.api import SignalException

from bagua import __version__
from bagua.algorithms import registry
from bagua.cli import baguarun, demo, doctor, explain, main, top
from bagua.cli.launch import RanksFailedError
from bagua.testing import Outcome, RankDiedError

#: What is said of an argument, without the argument.
POSITIVE = "expected 1 or more, got "
SECONDS = "--interval: expected seconds above 0, at most 31536000 (a year), got "
ADDRESS = "expected HOST:PORT, as 10.0.0.1:29500 or [::1]:29500, got "


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        (demo, ["--nproc", "0"], POSITIVE + "0"),
        (demo, ["--nproc", "two"], "invalid positive value: 'two'"),
        (demo, ["--nproc", "100000"], "--nproc 100000: at most"),
        (demo, ["--steps", "-1"], POSITIVE + "-1"),
        *((demo, ["--link", text], f"above 0, got {text}") for text in ("0", "nan", "inf", "-1", "x")),
        (demo, ["--nprocs=x", "--unknown"], "unrecognized arguments"),
        *((demo, ["--algorithm", "magic"], name) for name in registry),
        *((top, ["--once", "--interval", text], SECONDS + text) for text in ("0", "nan", "inf", "-1", "1e30", "x")),
        *((top, [text], ADDRESS + text) for text in ("localhost", "localhost:70000", ":29500", "localhost:x")),
        (doctor, ["--nproc", "0"], POSITIVE + "0"),
        (main, ["dance"], "demo"),
    ],
)
def test_commands_say_what_is_wrong_with_an_argument(command, arguments, said, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(arguments)
    assert said in capsys.readouterr().err


def test_bagua_alone_describes_itself(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bagua"])
    assert main.main() == 2
    assert "demo" in capsys.readouterr().err


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What stands for torchrun, which takes over the output where it records errors."""
    monkeypatch.setattr(errors, "record", lambda function: function)
    monkeypatch.setattr(torch.distributed.run, "run", stand := Mock())
    return stand


@pytest.mark.parametrize(
    ("given", "processes", "script"),
    [
        (["--nproc", "2", "t.py", "--nproc", "3"], "2", ["--nproc", "3"]), (["--nproc=2", "-m", "t"], "2", []),
        (["--nproc_per_node", "2", "t.py"], "2", []),
        (["--nnodes", "1", "t.py", "--", "--nproc=4"], "1", ["--nproc=4"]),
    ],
)  # fmt: skip
def test_baguarun_takes_nproc_and_leaves_the_script_its_own(given, processes, script, torchrun):
    assert baguarun.main(given) == 0
    ((job,), _) = torchrun.call_args
    assert torchrun.call_count == 1
    assert (job.nproc_per_node, job.training_script_args) == (processes, script)


@pytest.mark.parametrize("flags", [["--nnodes", "2"], ["--rdzv-backend", "c10d", "--rdzv-endpoint", "head:1"]])
def test_several_hosts_meet_as_torchrun_says(flags, torchrun):
    assert baguarun.main([*flags, "t.py"]) == 0
    assert torchrun.mock_calls == [call(torch.distributed.run.parse_args([*flags, "t.py"]))]


def test_versions(capsys):
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"bagua {__version__}\n"
    assert baguarun.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_baguarun_help_shows_how_to_start_a_script_and_torchruns_flags(capsys):
    assert baguarun.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(part in said for part in ("baguarun --nproc 2 train.py", "--rdzv-backend"))


def test_a_signal_becomes_the_exit_status_that_shells_use(torchrun):
    torchrun.side_effect = SignalException("ended", signal.SIGTERM)
    assert baguarun.main(["train.py"]) == 128 + signal.SIGTERM


def test_a_launcher_whose_port_is_taken_says_so_in_one_line(torchrun, capsys):
    torchrun.side_effect = torch.distributed.DistNetworkError("no listening, name: EADDRINUSE")
    assert baguarun.main(["--nnodes", "2", "--master-port", "1", "train.py"]) == 1
    meets, said = capsys.readouterr().err.splitlines()
    assert meets.endswith("when all machines (--nnodes 2) have met at 127.0.0.1:1")
    assert said.startswith("baguarun: the port is taken: pass another --master-port")


def test_what_else_a_launcher_raises_stays(torchrun):
    torchrun.side_effect = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        baguarun.main(["train.py"])


def test_a_look_without_measuring(capsys):
    assert main.main(["doctor", "--no-timing"]) == 0
    lines, advice = capsys.readouterr().out.splitlines(), doctor.advise(2)
    assert lines[: len(advice)] == advice
    assert "torch" in lines[len(advice) + 1]
    assert "processor cores" in lines[len(advice) + 2]
    for backend in ("shm", "gloo", "nccl"):
        assert any(line.startswith(backend) and "available" in line for line in lines), backend


def test_why_a_transport_is_not_there(monkeypatch):
    monkeypatch.setattr(doctor, "backend_refusal", lambda backend: OSError("not today") if backend == "shm" else None)
    assert doctor.describe_transports()[0].split(maxsplit=1) == ["shm", "not available: not today"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [("MemTotal: 8 kB\nMemFree: 1 kB\n", "an unknown amount"), ("MemAvailable: 3145728 kB\n", "3.0 GiB")],
)
def test_memory_that_the_system_does_not_tell_of(monkeypatch, lines, said):
    monkeypatch.setattr(doctor.Path, "read_text", lambda *_, **__: lines)
    assert f"{said} of memory available" in doctor.describe_machine()[1]


@pytest.mark.gloo
def test_measuring(forked_ranks, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "SIZES", ((4, "4 B"), (1000, "1 KB")))
    assert main.main(["doctor"]) == 0
    written, told = capsys.readouterr()
    assert (written.splitlines()[0], told[:5]) == ("2 ranks work together here", "1 of ")
    assert "ranks on each host: 2" in written
    head, *rows = written.splitlines()[-5:-2]
    assert head.split()[-1] == "gloo"
    assert [(row.partition("  ")[0], row[-3:]) for row in rows] == [("4 B", "B/s"), ("1 KB", "B/s")]


def test_ranks_that_fail_are_a_finding(monkeypatch, capsys):
    died = Outcome(1, error=RankDiedError("rank 1 was killed by SIGKILL"))
    monkeypatch.setattr(doctor, "run_ranks", Mock(side_effect=RanksFailedError([died])))
    assert main.main(["doctor"]) == 1
    written = capsys.readouterr().out
    assert written.startswith("2 ranks do not work together here: rank 1 was killed by SIGKILL\n")
    assert doctor.advise(2)[-1] in written.splitlines()


def test_advice_for_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 1000)
    assert doctor.advise(2)[0].startswith("OMP_NUM_THREADS=")


def failure(exitcode: int = 1, timestamp: int = 100, error: str = "", culprit: int | None = None) -> SimpleNamespace:
    facts = {"py_callstack": f"whole {error}", "own": f"own {error}", "culprit": culprit, "timestamp": timestamp}
    message = {"message": error, "extraInfo": facts} if error else "Signal 9"
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, message=message)


LOST = "PeerLostError: lost rank 2"
CAUSES = {
    "its own error, though seen last": ({0: failure(1, 100, LOST, 2), 2: failure(1, 109, "ValueError: no", 2)}, 2),
    "the first of two errors": ({0: failure(1, 3, "A", 0), 1: failure(1, 2, "B", 1)}, 1),
    "a death, not who lost a peer": ({0: failure(timestamp=1, error=LOST, culprit=2), 2: failure(-9, 5)}, 2),
    "a death, not whom the launcher ended": ({0: failure(-15, 1), 1: failure(-9, 2)}, 1),
    "who lost a peer of another host": ({0: failure(error=LOST, culprit=7), 1: failure(-15)}, 0),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_comes_first(case, tmp_path):
    failed, cause = CAUSES[case]
    lines = baguarun.summary(failed, str(tmp_path)).splitlines()
    assert lines[0].startswith(f"baguarun: rank {cause} ")
    others = tuple(f"rank {rank} " for rank in failed if rank != cause)
    assert all(line.startswith(others) for line in lines if line.startswith("rank "))


def test_the_summary_is_short_and_explain_says_it_again(tmp_path, capsys):
    failed = {rank: failure(error=f"PeerLostError: lost rank 30, says {rank}", culprit=30) for rank in range(30)}
    said = baguarun.summary({**failed, 30: failure(-signal.SIGKILL)}, str(tmp_path))
    assert said.splitlines()[0] == "baguarun: rank 30 was killed by SIGKILL"
    assert "and 14 other ranks" in said
    assert len(said.splitlines()) == 19
    assert (tmp_path / "traceback_7.txt").read_text() == "whole PeerLostError: lost rank 30, says 7"
    assert explain.main([str(tmp_path)]) == 0
    assert said in capsys.readouterr().out


def test_folders_of_runs_go_when_empty_or_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setattr(baguarun.tempfile, "tempdir", str(tmp_path))
    old, young = tmp_path / "bagua-run-old", tmp_path / "bagua-run-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "summary.txt").write_text("x")
    os.utime(old, (1, 1))
    with baguarun.flight_folder() as empty:
        assert Path(empty).stat().st_mode & 0o777 == 0o700
    with baguarun.flight_folder() as full:
        (Path(full) / "summary.txt").write_text("x")
    assert sorted(tmp_path.iterdir()) == sorted([young, Path(full)])
