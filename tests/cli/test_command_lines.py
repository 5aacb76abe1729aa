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

A_YEAR = "31536000 (a year)"


def positive(text: str) -> str:
    return f"expected 1 or more, got {text}"


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        (demo, ["--nproc", "0"], positive("0")),
        (demo, ["--nproc", "two"], "invalid positive value: 'two'"),
        (demo, ["--nproc", "100000"], "--nproc 100000: at most"),
        (demo, ["--steps", "-1"], positive("-1")),
        *((demo, ["--link", text], f"above 0, got {text}") for text in ("0", "nan", "inf", "-1", "x")),
        (demo, ["--nprocs=x", "--unknown"], "unrecognized arguments"),
        *((demo, ["--algorithm", "magic"], name) for name in registry),
        *(
            (top, ["--once", "--interval", text], f"--interval: expected seconds above 0, at most {A_YEAR}, got {text}")
            for text in ("0", "nan", "inf", "-1", "1e30", "x")
        ),
        *(
            (top, [text], f"expected HOST:PORT, as 10.0.0.1:29500 or [::1]:29500, got {text}")
            for text in ("localhost", "localhost:70000", ":29500", "localhost:x")
        ),
        (doctor, ["--nproc", "0"], positive("0")),
        (main, ["dance"], "demo"),
    ],
)
def test_commands_say_what_is_wrong_with_an_argument(command, arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_bagua_alone_describes_itself(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bagua"])
    assert main.main() == 2
    assert "demo" in capsys.readouterr().err


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
    meets, said = capsys.readouterr().err.splitlines()
    assert meets.endswith("when all machines (--nnodes 2) have met at 127.0.0.1:1")
    assert said.startswith("baguarun: the port is taken: pass another --master-port")


def test_what_else_a_launcher_raises_stays(monkeypatch):
    def refuse(_: Namespace) -> None:
        raise RuntimeError("something else")

    launch_by(refuse, monkeypatch)
    with pytest.raises(RuntimeError, match="something else"):
        baguarun.main(["train.py"])
