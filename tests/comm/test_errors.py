"""The error tree: what each class is and says, what the environment may hold, and a script that ends with one."""

import copy
import itertools
import json
import logging
import os
import pickle
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

from bagua import env, errors
from bagua.comm.startup import formation
from bagua.comm.startup.default_group import WorldHolder, own_traceback, report_uncaught, uncaught_error
from tests.interpreters import interpreter
from tests.launching import finished

PARENTS = {
    errors.BaguaError: (Exception,),
    errors.ConfigurationError: (errors.BaguaError, ValueError),
    errors.InvalidTypeError: (errors.ConfigurationError, TypeError),
    errors.InvalidTensorError: (errors.ConfigurationError, TypeError),
    errors.InvalidRankError: (errors.ConfigurationError,),
    errors.InvalidReduceOpError: (errors.ConfigurationError,),
    errors.UnsupportedAlgorithmException: (errors.ConfigurationError,),
    errors.NotInitializedError: (errors.BaguaError, RuntimeError),
    errors.RepeatedInitializationError: (errors.BaguaError, RuntimeError),
    errors.CommunicationError: (errors.BaguaError, RuntimeError),
    errors.CollectiveTimeoutError: (errors.CommunicationError, TimeoutError),
    errors.PeerLostError: (errors.CommunicationError, ConnectionError),
    errors.CollectiveMismatchError: (errors.CommunicationError,),
    errors.CommunicatorClosedError: (errors.CommunicationError,),
    errors.ConcurrentUseError: (errors.CommunicationError,),
    errors.TransportUnavailableError: (errors.CommunicationError,),
    errors.StoreLostError: (errors.CommunicationError, ConnectionError),
    errors.TooFewMembersError: (errors.CommunicationError, TimeoutError),
    errors.LeftOutError: (errors.CommunicationError, ConnectionError),
}
FACTS = {
    "rank": 1, "call": "#7 allreduce(3 x float32, sum)", "sequence": 7, "peers": (0, 2),
    "expected": "a sum", "seen": "a product", "elapsed_s": 1.23456, "timeout_s": 5.0,
    "history": ("#6 barrier()", "#7 allreduce(3 x float32, sum)"), "advice": "Do this.",
}  # fmt: skip


def example(kind):
    if issubclass(kind, errors.CommunicationError):
        return kind("it went wrong", **FACTS)
    if issubclass(kind, errors.ConfigurationError):
        return kind("it cannot be", argument="size", expected=">= 1", seen=0, advice="Do this.")
    return kind("it went wrong", advice="Do this.")


def test_the_tree_is_complete():
    assert {getattr(errors, name) for name in errors.__all__} == set(PARENTS)


@pytest.mark.parametrize("kind", PARENTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_each_error_is_what_a_user_would_catch_and_survives_copying_with_its_facts(kind, again):
    error = example(kind)
    twin = again(error)
    assert (type(twin), vars(twin), str(twin), twin.args) == (kind, vars(error), str(error), error.args)
    for caught in (kind, *PARENTS[kind]):
        with pytest.raises(caught):
            raise twin


def test_the_message_of_a_communication_error_tells_all_it_knows():
    message = str(example(errors.CollectiveMismatchError))
    assert message.startswith("it went wrong (in #7 allreduce(3 x float32, sum), on rank 1")
    for part in ("peers 0, 2", "this rank has a sum", "others have a product", "1.235", "5.0", "Do this."):
        assert part in message
    assert message.endswith("last calls on this communicator:\n  #6 barrier()\n  #7 allreduce(3 x float32, sum)")


def test_a_message_names_lost_and_missing_ranks_once():
    lost = errors.PeerLostError.of(3, "it closed its communicator", rank=0, sequence=7, call="#7 barrier()")
    assert str(lost).startswith("lost rank 3: it closed its communicator (in #7 barrier(), on rank 0). Look first")
    assert "fewer batches" in str(lost)
    assert "fewer batches" not in str(errors.PeerLostError.of(3, "it was killed by SIGKILL"))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.CollectiveTimeoutError("too late", rank=0), "too late (on rank 0)"),
        (errors.CollectiveTimeoutError("too late", peers=[0, 2]), "too late (late ranks 0, 2)"),
        (
            errors.ConfigurationError("no", argument="x", expected=True, seen=False),
            "no (argument x, expected True, seen False)",
        ),
    ],
)
def test_what_is_known_is_mentioned_and_nothing_else(error, text):
    """A rank of zero and a false value are facts."""
    assert str(error) == text


@pytest.mark.parametrize(
    ("exit_code", "said"),
    [
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-(signal.SIGRTMIN + 3), f"was killed by signal {signal.SIGRTMIN + 3}"),  # Python has no name for it.
        (0, "ended too early, with exit status 0"),
        (None, "ended too early, with exit status None"),
    ],
)
def test_an_end_is_told_whatever_the_exit_code(exit_code, said):
    assert errors.how_it_ended(exit_code) == said


READERS = {
    env.get_rank: ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"],
    env.get_world_size: ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"],
    env.get_local_rank: ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"],
    env.get_local_world_size: ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    env.get_node_rank: ["GROUP_RANK", "OMPI_COMM_WORLD_NODE_RANK", "SLURM_NODEID"],
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    others = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "NODE_RANK")
    for name in itertools.chain(*READERS.values(), others, ("BAGUA_TIMEOUT_S", "BAGUA_DEBUG", "BAGUA_LOG")):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_launchers_are_understood_in_order_of_precedence_and_a_number_that_is_none_is_named(read, monkeypatch):
    assert read() is None
    for value, name in enumerate(reversed(READERS[read])):
        monkeypatch.setenv(name, str(value))
        assert read() == value
    monkeypatch.setenv(READERS[read][0], "")
    assert read() == len(READERS[read]) - 2, "an empty variable is none"
    monkeypatch.setenv(READERS[read][0], "three")
    with pytest.raises(errors.ConfigurationError, match=f"{READERS[read][0]}.*three"):
        read()


def test_timeout(monkeypatch):
    assert env.timeout_s() is None
    monkeypatch.setenv("BAGUA_TIMEOUT_S", "2.5")
    assert env.timeout_s() == 2.5
    for wrong in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv("BAGUA_TIMEOUT_S", wrong)
        with pytest.raises(errors.ConfigurationError, match="BAGUA_TIMEOUT_S"):
            env.timeout_s()


@pytest.mark.parametrize(("text", "on"), [("1", True), ("yes", True), ("0", False), ("", False), ("false", False)])
def test_debugging_is_switched_on_by_anything_but_a_no(text, on, monkeypatch):
    assert env.debug_checks() is False
    monkeypatch.setenv("BAGUA_DEBUG", text)
    assert env.debug_checks() is on


def test_launcher_variables_are_those_that_are_set(monkeypatch):
    monkeypatch.setattr(env.os, "environ", {"MASTER_ADDR": "host", "MASTER_PORT": ""})
    assert env.launcher_variables() == {"MASTER_ADDR": "host"}


def test_a_child_inherits_what_is_not_set_for_it(monkeypatch):
    monkeypatch.setattr(env.os, "environ", {"RANK": "7", "OMP_NUM_THREADS": "4"})
    inherited = env.for_child({"RANK": "0"}, {"OMP_NUM_THREADS": "1", "LANG": "C"})
    assert inherited == {"RANK": "0", "OMP_NUM_THREADS": "4", "LANG": "C"}


def test_variables_without_meaning_are_named_with_what_may_be_meant(monkeypatch):
    variables = {"BAGUA_TIMEOUT": "3", "BAGUA_LOG": "info", "BAGUA_COLOUR_OF_BIKESHED": "red"}
    monkeypatch.setattr(env.os, "environ", variables)
    assert env.unknown_variables() == [
        "BAGUA_COLOUR_OF_BIKESHED has no meaning",
        "BAGUA_TIMEOUT has no meaning; did you mean BAGUA_TIMEOUT_S?",
    ]


def test_each_variable_of_ours_is_known_and_documented(monkeypatch):
    source = Path(env.__file__)
    read = set(re.findall(r'"(BAGUA_[A-Z_]+)"', source.read_text(encoding="utf-8")))
    monkeypatch.setattr(env.os, "environ", dict.fromkeys(read, "1"))
    assert not env.unknown_variables()
    page = (source.parents[1] / "docs" / "api" / "environment.md").read_text(encoding="utf-8")
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


SCRIPT = """
import sys, torch, bagua.comm as comm
comm.init_process_group(backend=sys.argv[1], timeout=20)
tensor = torch.ones(3)
comm.allreduce(tensor)
if comm.get_rank() == 1:
    {end}
comm.allreduce(tensor)
"""


def run(tmp_path: Path, backend: str, end: str) -> str:
    """What the launcher and the ranks write."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    done = finished(*interpreter(), "-m", "bagua.cli.baguarun", "--nproc", "2", str(script), backend)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("backend", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("shm", "gloo")])
def test_the_error_of_a_rank_reaches_the_others_and_the_launcher_names_it(tmp_path: Path, backend: str) -> None:
    said = run(tmp_path, backend, "raise RuntimeError('my own bug')")
    assert "PeerLostError: lost rank 1: it left its script with RuntimeError: my own bug" in said
    assert "RuntimeError: my own bug" in said
    assert "site-packages" not in said
    summary = said.partition("baguarun: ")[2]
    assert summary.startswith("rank 1 failed: RuntimeError: my own bug\n  Traceback")
    assert "rank 0 failed: PeerLostError: lost rank 1" in summary
    folder = summary.split()[-1]
    assert "site-packages" not in Path(folder, "summary.txt").read_text()
    assert "PeerLostError" in Path(folder, "traceback_0.txt").read_text()
    assert len(list(Path(folder).glob("*/calls_0.json"))) == 1
    shutil.rmtree(folder)


@pytest.mark.shm
@pytest.mark.usefixtures("forked_python")
def test_a_rank_that_ends_in_order_has_closed_its_communicator(tmp_path: Path) -> None:
    assert "lost rank 1: it closed its communicator" in run(tmp_path, "shm", "sys.exit(0)")


def test_an_old_error_at_a_prompt_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("a slip of the user")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert uncaught_error() is error
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert uncaught_error() is None


def test_a_world_is_closed_although_its_error_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    holder, abort = WorldHolder(), Mock(side_effect=TypeError("an error whose text cannot be made"))
    world = SimpleNamespace(process=os.getpid(), abort=abort, close=Mock())
    monkeypatch.setattr(holder, "process_world", world)
    with pytest.raises(TypeError):
        holder._close_at_exit()
    assert world.close.call_count == 1


def test_a_traceback_holds_the_users_frames_alone() -> None:
    with pytest.raises(TypeError) as caught:
        torch.utils.data.default_collate([object()])
    told = own_traceback(caught.value)
    assert Path(__file__).name in told
    assert "TypeError: default_collate" in told
    assert "site-packages/torch" not in told
    error = errors.PeerLostError.of(1, "it died")
    assert own_traceback(error) == f"PeerLostError: {str(error).partition(chr(10))[0]}\n"


@pytest.mark.parametrize(
    ("place", "hooked"), [("no folder/error.json", True), ("error.json", True), ("error.json", False)]
)
def test_an_error_is_shown_by_the_hook_of_the_program_or_as_usual(tmp_path, monkeypatch, capsys, place, hooked) -> None:
    """Also one that cannot be handed over."""
    hook, error, path = Mock(return_value=None), ValueError("mine"), tmp_path / place
    monkeypatch.setattr(sys, "excepthook", hook if hooked else sys.__excepthook__)
    report_uncaught(3, str(path))
    sys.excepthook(ValueError, error, None)
    assert hook.mock_calls == ([call(ValueError, error, None)] if hooked else [])
    assert capsys.readouterr().err == ("" if hooked else "[rank3]: ValueError: mine\n")
    if place == "error.json":
        assert "ValueError: mine" in path.read_text()
        facts = json.loads(path.read_text())["message"]["extraInfo"]
        assert (facts["culprit"], facts["rank"]) == (3, 3)
