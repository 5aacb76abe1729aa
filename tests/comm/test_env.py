"""What bagua reads from the environment, and how it answers nonsense there."""

import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagua import env
from bagua.comm.startup import formation
from bagua.errors import ConfigurationError

SOURCE = Path(env.__file__).parent

READERS = {
    env.get_rank: ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"],
    env.get_world_size: ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"],
    env.get_local_rank: ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"],
    env.get_local_world_size: ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    env.get_node_rank: ["GROUP_RANK", "OMPI_COMM_WORLD_NODE_RANK", "SLURM_NODEID"],
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for names in READERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("BAGUA_TIMEOUT_S", "BAGUA_DEBUG", "BAGUA_LOG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_launchers_are_understood_in_order_of_precedence(read, monkeypatch):
    assert read() is None
    for value, name in enumerate(reversed(READERS[read])):
        monkeypatch.setenv(name, str(value))
        assert read() == value
    monkeypatch.setenv(READERS[read][0], "")
    assert read() == len(READERS[read]) - 2, "an empty variable is none"


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_a_number_that_is_none_is_an_error_that_names_the_variable(read, monkeypatch):
    monkeypatch.setenv(READERS[read][0], "three")
    with pytest.raises(ConfigurationError, match=f"{READERS[read][0]}.*three"):
        read()


def test_timeout(monkeypatch):
    assert env.timeout_s() is None
    monkeypatch.setenv("BAGUA_TIMEOUT_S", "2.5")
    assert env.timeout_s() == 2.5
    for wrong in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv("BAGUA_TIMEOUT_S", wrong)
        with pytest.raises(ConfigurationError, match="BAGUA_TIMEOUT_S"):
            env.timeout_s()


@pytest.mark.parametrize(("text", "on"), [("1", True), ("yes", True), ("0", False), ("", False), ("false", False)])
def test_debugging_is_switched_on_by_anything_but_a_no(text, on, monkeypatch):
    assert env.debug_checks() is False
    monkeypatch.setenv("BAGUA_DEBUG", text)
    assert env.debug_checks() is on


def test_launcher_variables_are_those_that_are_set(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "")
    found = env.launcher_variables()
    assert found["MASTER_ADDR"] == "host"
    assert "MASTER_PORT" not in found


def test_a_child_inherits_what_is_not_set_for_it(monkeypatch):
    monkeypatch.setattr(env.os, "environ", {"RANK": "7", "OMP_NUM_THREADS": "4"})
    inherited = env.for_child({"RANK": "0"}, {"OMP_NUM_THREADS": "1", "LANG": "C"})
    assert inherited == {"RANK": "0", "OMP_NUM_THREADS": "4", "LANG": "C"}


def test_variables_without_meaning_are_named_with_what_may_be_meant(monkeypatch, caplog):
    monkeypatch.setattr(
        env.os, "environ", {"BAGUA_TIMEOUT": "3", "BAGUA_LOG": "info", "BAGUA_COLOUR_OF_BIKESHED": "red"}
    )
    assert env.unknown_variables() == [
        "BAGUA_COLOUR_OF_BIKESHED has no meaning",
        "BAGUA_TIMEOUT has no meaning; did you mean BAGUA_TIMEOUT_S?",
    ]


def test_each_variable_of_ours_is_known_and_documented(monkeypatch):
    source = (SOURCE / "env.py").read_text(encoding="utf-8")
    read = set(re.findall(r'"(BAGUA_[A-Z_]+)"', source))
    monkeypatch.setattr(env.os, "environ", dict.fromkeys(read, "1"))
    assert not env.unknown_variables()
    page = (SOURCE.parent / "docs" / "api" / "environment.md").read_text(encoding="utf-8")
    assert read == set(re.findall(r"`(BAGUA_[A-Z_]+)`", page))


def test_variables_without_meaning_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setenv("BAGUA_TIMEOUTS", "3")
    formation._warn_of_variables.cache_clear()
    for _ in range(2):
        formation.configure_log()
    assert caplog.text.count("BAGUA_TIMEOUTS") == 1


@pytest.mark.parametrize("bars", [True, False])
def test_a_message_has_its_rank_and_a_line_of_its_own(monkeypatch, capsys, bars):
    monkeypatch.setenv("RANK", "3")
    record = logging.LogRecord("bagua", logging.WARNING, "", 0, "late: rank %d", (2,), None)
    shown, written = formation._Shown(), []
    fake = SimpleNamespace(tqdm=SimpleNamespace(write=lambda text, file: written.append(text)))
    monkeypatch.setitem(sys.modules, "tqdm", fake) if bars else monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    shown.handle(record)
    assert capsys.readouterr().err == ""  # pytest has set up logging
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    shown.handle(record)
    line = "[rank3] bagua WARNING: late: rank 2"
    assert (written, capsys.readouterr().err) == (([line], "") if bars else ([], f"{line}\n"))
    record.exc_info = (ValueError, ValueError("its traceback"), None)
    shown.handle(record)
    assert "ValueError: its traceback" in "".join([*written, capsys.readouterr().err])
    monkeypatch.setattr(logging.getLogger("bagua"), "handlers", [shown, logging.NullHandler()])
    shown.handle(record)
    assert capsys.readouterr().err == ""  # somebody else shows the messages of bagua
