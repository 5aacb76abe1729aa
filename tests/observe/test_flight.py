"""Flight records name the rank that made another call, or that did not come."""

import gc
import json
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import bagua.comm
import bagua.torch_api
from bagua.comm import Place, Recorder
from bagua.comm.records.recorder import Statistics
from bagua.errors import CommunicationError, ConfigurationError
from bagua.observe import explain
from bagua.observe.flight import FlightRecord
from bagua.observe.folders import write_whole
from bagua.observe.timeline import TraceFile
from bagua.testing import ThreadRanks
from tests.harness import in_threads

pytestmark = pytest.mark.threads


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BAGUA_FLIGHT_DIR", str(tmp_path / "flights"))
    return tmp_path / "flights"


def of_job(folder: Path) -> Path:
    """The folder of the only job."""
    (found,) = folder.iterdir()
    return found


def run_into_an_error(job: Callable[[], None], size: int = 3, timeout_s: float = 60.0) -> None:
    with pytest.raises(CommunicationError):
        ThreadRanks(size, timeout_s=timeout_s).run(job, size=size)


def test_ranks_that_are_late_or_without_a_record_are_named(folder):
    given_up = threading.Event()

    def stop_one_rank() -> None:
        tensor = torch.ones(3)
        for _ in range(70):  # more than a record holds
            bagua.comm.allreduce(tensor)
        if bagua.comm.get_rank() == 2:
            assert given_up.wait(60)
        try:
            bagua.comm.barrier()
        finally:
            given_up.set()

    run_into_an_error(stop_one_rank, timeout_s=2.0)
    sentences = explain(folder)
    assert sentences[0] == "Ranks 0 and 1 came to call #71 on world, barrier(), and Rank 2 did not."
    assert sentences[1] == "Rank 2 came to it when the others had given up."
    (of_job(folder) / "calls_2.json").unlink()
    assert "Rank 2 has written no record: killed, stopped, or still busy with something else." in explain(folder)


def test_calls_that_were_refused_or_that_nobody_has_waited_for_confuse_nobody(folder, tmp_path):
    recorder, statistics, flight = calling(tmp_path, calls=3)
    refused, done, _ = statistics.recent
    refused.state, done.ended = "refused", recorder.clock()
    flight.write("a test")
    record = json.loads((tmp_path / "calls_0.json").read_text())
    assert [(one["sequence"], one["state"]) for one in record["calls"]] == [(2, "completed"), (3, "started")]


def make_another_call() -> None:
    tensor = torch.ones(3)
    bagua.comm.allreduce(tensor)
    bagua.comm.broadcast(tensor, 0) if bagua.comm.get_rank() == 1 else bagua.comm.allreduce(tensor)


def test_the_rank_that_makes_another_call_is_named_and_jobs_do_not_mix(folder):
    run_into_an_error(make_another_call)
    before = of_job(folder)
    parts = ("rank 1 of 3", "world  #2 broadcast(3 x float32, root 0)  failed", "test_flight.py")
    assert all(part in (before / "calls_1.txt").read_text() for part in parts)
    names = [f"calls_{rank}.{kind}" for rank in range(3) for kind in ("json", "txt")]
    assert sorted(path.name for path in before.iterdir()) == names
    run_into_an_error(lambda: bagua.comm.allreduce(torch.ones(5 + bagua.comm.get_rank())), size=2)
    other = "Rank 0 does allreduce(5 x float32, sum), while Rank 1 does allreduce(6 x float32, sum)."
    sentences = explain(folder)
    assert sentences[0] == f"In call #1 on world, {other}"
    (latest,) = set(folder.iterdir()) - {before}
    assert sentences[-1] == f"All this is of {latest}. In {folder} there is another job: {before.name}."
    assert sum("wrote its record because" in sentence for sentence in sentences) == 2
    other = "Rank 1 does broadcast(3 x float32, root 0), while Ranks 0 and 2 do allreduce(3 x float32, sum)."
    assert explain(before)[0] == f"In call #2 on world, {other}"


def calling(tmp_path: Path, rank: int = 0, calls: int = 1) -> tuple[Recorder, Statistics, FlightRecord]:
    """A rank that has begun so many calls."""
    recorder, place = Recorder(), Place("world", "threads", rank, (0, 1))
    statistics = Statistics(place, recorder)
    for number in range(1, calls + 1):
        begin_barrier(statistics, number)
    return recorder, statistics, FlightRecord(recorder, place, str(tmp_path), listens=False)


def begin_barrier(statistics: Statistics, number: int) -> None:
    statistics.begin(bagua.comm.Call("barrier", torch.uint8, sequence=number), statistics.recorder.clock())


def test_the_first_cause_stays(tmp_path):
    _recorder, statistics, flight = calling(tmp_path)
    flight.write("a signal before")
    flight.fail(CommunicationError("the cause"))
    for number in range(2, 100):
        begin_barrier(statistics, number)
    flight.fail(CommunicationError("what came of it"))
    record = json.loads((tmp_path / "calls_0.json").read_text())
    assert record["reason"] == "the cause"
    assert [one["sequence"] for one in record["calls"]] == [1]
    assert "because: the cause" in (tmp_path / "calls_0.txt").read_text()
    later = tmp_path / "calls_0_later.txt"
    assert "because: what came of it" in later.read_text()
    flight.write("a signal after")
    assert "because: a signal after" in later.read_text()
    assert explain(tmp_path)[-1] == f"Rank 0 wrote again after its first failure: {later}"


def test_a_record_that_cannot_be_written_leaves_no_draft(tmp_path):
    recorder, _, flight = calling(tmp_path)
    with mock.patch.object(Path, "replace", side_effect=OSError("no space left")) as full:
        flight.fail(RuntimeError("the first cause"))
    assert full.called
    assert list((tmp_path / recorder.job).iterdir()) == []


def test_threads_that_fail_at_once_leave_one_cause(tmp_path):
    _recorder, _statistics, flight = calling(tmp_path)
    written = []
    with mock.patch("bagua.observe.flight.write_whole", lambda path, content: written.append(path.name)):
        in_threads(8, lambda number: flight.fail(CommunicationError(str(number))))
    assert sorted(written) == ["calls_0.json", "calls_0.txt", *["calls_0_later.txt"] * 7]


def test_a_rank_that_is_dropped_takes_its_record_with_it(folder):
    recorder, place = Recorder(), Place("world", "threads", 0, (0, 1))
    for observer in bagua.comm.observers:
        observer.started(recorder, place, bagua.comm.Beats(torch.distributed.HashStore(), 0))
    dropped = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert dropped() is None
    # The next rank takes over the signal.
    recorder = Recorder()
    flight = FlightRecord(recorder, place, str(folder))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert (folder / "calls_0.json").exists()
    flight.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_record_from_before_says_nothing_of_later_calls(tmp_path):
    """Rank 1 had failed in a call of its own, went on, and its record is older than the call in which rank 0 waits."""
    for rank, calls in ((1, 1), (0, 2)):
        recorder, statistics, flight = calling(tmp_path, rank, calls)
        statistics.recent[0].ended = recorder.clock()
        flight.fail(CommunicationError(f"of rank {rank}"))
    assert explain(tmp_path)[0] == "Rank 0 came to call #2 on world, barrier(). Rank 1 had written its record before."


def test_a_rank_that_signs_with_the_number_of_an_earlier_epoch_is_told_all_the_same(tmp_path):
    """It was member 4 of the epoch in which its record began, and is member 1 of two now."""
    recorder, earlier = Recorder(), Place("islands", "gloo", 2, (0, 1, 4))
    begin_barrier(Statistics(Place("islands", "gloo", 1, (0, 1)), recorder), 7)
    FlightRecord(recorder, earlier, str(tmp_path), listens=False).write("a test")
    told = "Ranks 0 and 1 have written no record: killed, stopped, or still busy with something else."
    assert explain(tmp_path)[0] == told


def test_a_job_without_errors_leaves_nothing(folder):
    ThreadRanks(2).run(bagua.comm.barrier, size=2)
    assert list(folder.iterdir()) == []


def test_a_signal_writes_a_record_and_the_rank_goes_on(folder):
    bagua.comm.init_process_group()
    try:
        bagua.comm.allreduce(torch.ones(3))
        os.kill(os.getpid(), signal.SIGUSR2)
        bagua.comm.allreduce(torch.ones(3))
        record = json.loads((of_job(folder) / "calls_0.json").read_text())
        assert record["reason"] == "signal SIGUSR2"
        assert [one["state"] for one in record["calls"]] == ["completed"]
        assert explain(folder)[0] == "All ranks made the same calls, and none was under way."
    finally:
        bagua.comm.destroy_process_group()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_handler_of_the_user_stays(folder):
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        bagua.comm.init_process_group()
        bagua.comm.destroy_process_group()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BAGUA_FLIGHT_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigurationError, match="BAGUA_FLIGHT_DIR"):
        bagua.comm.init_process_group()
    assert not bagua.comm.is_initialized()


def test_files_that_are_no_records_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="BAGUA_FLIGHT_DIR"):
        explain(tmp_path)
    for text in ("{", "[]", "{}"):
        (tmp_path / "calls_0.json").write_text(text)
        with pytest.raises(ConfigurationError, match="no flight record of bagua"):
            explain(tmp_path)


def test_files_are_their_owners_alone_and_follow_no_link(tmp_path):
    others, place = tmp_path / "others", tmp_path / "calls_0.txt"
    others.write_text("theirs")
    place.symlink_to(others)
    write_whole(place, b"ours")
    assert (place.read_text(), others.read_text(), place.is_symlink()) == ("ours", "theirs", False)
    assert place.stat().st_mode & 0o777 == 0o600
    with mock.patch("uuid.UUID.hex", "draft"):
        (tmp_path / "draft.tmp").symlink_to(others)
        with pytest.raises(FileExistsError):
            write_whole(place, b"again")
    assert others.read_text() == "theirs"


def test_a_trace_that_became_a_link_ends(tmp_path):
    trace = TraceFile(Recorder(), Place("world", "threads", 0, (0,)), str(tmp_path))
    (file,) = tmp_path.rglob("trace_rank_0*")
    file.unlink()
    file.symlink_to(tmp_path / "theirs")
    (tmp_path / "theirs").touch()
    trace.span("step", 0.0, 1.0, {})
    trace.close()
    assert (tmp_path / "theirs").read_text() == ""
