"""What the commands answer to bad arguments, and what they print without starting anything."""

import signal
from argparse import Namespace
from collections.abc import Callable

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.elastic.multiprocessing.api import SignalException

from bagua import __version__
from bagua.algorithms import registry
from bagua.cli import baguarun, demo, doctor, main, top


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        demo.main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc", "0"], "expected 1 or more, got 0"),
        (["--nproc", "two"], "invalid positive value: 'two'"),
        (["--nproc", "100000"], "--nproc 100000: at most"),
        (["--steps", "-1"], "expected 1 or more, got -1"),
        *((["--link", text], f"above 0, got {text}") for text in ("0", "nan", "inf", "-1", "x")),
        (["--nprocs=x", "--unknown"], "unrecognized arguments"),
    ],
)
def test_the_demo_says_what_is_wrong_with_an_argument(arguments, said, capsys):
    assert said in refused(arguments, capsys)


@pytest.mark.parametrize("text", ["0", "nan", "inf", "-1", "1e30", "x"])
def test_top_waits_for_a_time_that_can_be_waited_for(text, capsys):
    with pytest.raises(SystemExit) as caught:
        top.main(["--once", "--interval", text])
    assert caught.value.code == 2
    assert f"--interval: expected seconds above 0, at most 31536000 (a year), got {text}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["localhost", "localhost:70000", ":29500", "localhost:x"])
def test_top_says_what_an_address_is(text, capsys):
    with pytest.raises(SystemExit) as caught:
        top.main([text])
    assert caught.value.code == 2
    assert f"expected HOST:PORT, as 10.0.0.1:29500 or [::1]:29500, got {text}" in capsys.readouterr().err


def test_an_unknown_algorithm_is_answered_with_all_that_exist(capsys):
    said = refused(["--algorithm", "magic"], capsys)
    assert all(name in said for name in registry)


def test_bagua_names_its_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["--help"])
    assert caught.value.code == 0
    assert "demo" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main.main(["dance"])
    assert caught.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_bagua_alone_describes_itself(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bagua"])
    assert main.main() == 2
    assert "demo" in capsys.readouterr().err


def test_the_doctor_wants_at_least_one_process(capsys):
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--nproc", "0"])
    assert caught.value.code == 2
    assert "expected 1 or more, got 0" in capsys.readouterr().err


def launch_by(function: Callable[[Namespace], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``function`` stand for torchrun, which takes over the output where it records errors."""
    monkeypatch.setattr(torch.distributed.run, "run", function)
    monkeypatch.setattr(errors, "record", lambda function: function)


@pytest.mark.parametrize(
    ("given", "processes", "script"),
    [
        (["--nproc", "2", "t.py", "--nproc", "3"], "2", ["--nproc", "3"]),
        (["--nproc=2", "-m", "t"], "2", []),
        (["--nproc_per_node", "2", "t.py"], "2", []),
        (["--nnodes", "1", "t.py", "--", "--nproc=4"], "1", ["--nproc=4"]),
    ],
)
def test_baguarun_takes_nproc_and_leaves_the_script_its_own(given, processes, script, monkeypatch):
    seen: list[Namespace] = []
    launch_by(seen.append, monkeypatch)
    assert baguarun.main(given) == 0
    assert [(job.nproc_per_node, job.training_script_args) for job in seen] == [(processes, script)]


@pytest.mark.parametrize("flags", [["--nnodes", "2"], ["--rdzv-backend", "c10d", "--rdzv-endpoint", "head:1"]])
def test_several_hosts_meet_as_torchrun_says(flags, monkeypatch):
    seen: list[Namespace] = []
    launch_by(seen.append, monkeypatch)
    assert baguarun.main([*flags, "t.py"]) == 0
    assert seen == [torch.distributed.run.parse_args([*flags, "t.py"])]


def test_versions(capsys):
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"bagua {__version__}\n"
    assert baguarun.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_baguarun_help_shows_how_to_start_a_script_and_torchruns_flags(capsys):
    assert baguarun.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "baguarun --nproc 2 train.py" in said
    assert "--rdzv-backend" in said


def test_a_signal_becomes_the_exit_status_that_shells_use(monkeypatch):
    def end_by_signal(_: Namespace) -> None:
        raise SignalException("ended", signal.SIGTERM)

    launch_by(end_by_signal, monkeypatch)
    assert baguarun.main(["train.py"]) == 128 + signal.SIGTERM


def test_a_launcher_whose_port_is_taken_says_so_in_one_line(monkeypatch, capsys):
    def refuse(_: Namespace) -> None:
        raise torch.distributed.DistNetworkError("no listening, name: EADDRINUSE")

    launch_by(refuse, monkeypatch)
    assert baguarun.main(["--nnodes", "2", "--master-port", "1", "train.py"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("baguarun: the port is taken: pass another --master-port")


def test_what_else_a_launcher_raises_stays(monkeypatch):
    def refuse(_: Namespace) -> None:
        raise RuntimeError("something else")

    launch_by(refuse, monkeypatch)
    with pytest.raises(RuntimeError, match="something else"):
        baguarun.main(["train.py"])
