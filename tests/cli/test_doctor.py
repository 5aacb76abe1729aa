"""`bagua doctor` looks at this machine and measures."""

import pytest

from bagua.cli import doctor
from bagua.cli.launch import RanksFailedError
from bagua.cli.main import main
from bagua.testing import Outcome, RankDiedError


def test_a_look_without_measuring(capsys):
    assert main(["doctor", "--no-timing"]) == 0
    lines = capsys.readouterr().out.splitlines()
    advice = doctor.advise(2)
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
    assert main(["doctor"]) == 0
    written, told = capsys.readouterr()
    assert written.startswith("2 ranks work together here\n")
    assert "ranks on each host: 2" in written
    head, *rows = written.splitlines()[-5:-2]
    assert head.split()[-1] == "gloo"
    assert [row.partition("  ")[0] for row in rows] == ["4 B", "1 KB"]
    assert all(row.endswith("B/s") for row in rows)
    assert told.startswith("1 of ")


def test_ranks_that_fail_are_a_finding(monkeypatch, capsys):
    def fail(*_: object) -> object:
        raise RanksFailedError([Outcome(1, error=RankDiedError("rank 1 was killed by SIGKILL"))])

    monkeypatch.setattr(doctor, "run_ranks", fail)
    assert main(["doctor"]) == 1
    written = capsys.readouterr().out
    assert written.startswith("2 ranks do not work together here: rank 1 was killed by SIGKILL\n")
    assert doctor.advise(2)[-1] in written.splitlines()


def test_advice_for_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 1000)
    assert doctor.advise(2)[0].startswith("OMP_NUM_THREADS=")
