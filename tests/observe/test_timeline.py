"""Traces of all ranks become one timeline: calls, exchanges, passes, waits, arrivals; clocks agree."""

import errno
import importlib
import itertools
import json
import os
import sys
from pathlib import Path
from types import FrameType
from unittest.mock import Mock

import pytest
import torch

import bagua.comm
from bagua.algorithms import GradientAllReduceAlgorithm
from bagua.cli import main
from bagua.comm import Call, CallRecord, Place, Recorder
from bagua.errors import ConfigurationError
from bagua.observe import clock_offsets, timeline
from bagua.observe.timeline import TraceFile
from bagua.testing import ThreadRanks
from tests.contract.algorithms import ONE_BUCKET_BYTES, train

# Beside it, the package has a function of this name.
trace_module = importlib.import_module("bagua.observe.timeline")

pytestmark = pytest.mark.threads


def test_a_job_leaves_one_timeline(tmp_path, monkeypatch, capsys):
    def job() -> None:
        train(GradientAllReduceAlgorithm(), range(3), ONE_BUCKET_BYTES)
        bagua.comm.barrier()

    monkeypatch.setenv("BAGUA_TRACE", str(tmp_path))
    ThreadRanks(2).run(job, size=2)
    assert main.main(["timeline", str(tmp_path)]) == 0
    assert "perfetto" in capsys.readouterr().out
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in bars)
    for rank in range(2):
        names = [event["name"] for event in bars if event["pid"] == rank]
        assert {"forward pass", "backward pass", "between passes"} <= set(names)
        assert sum("barrier()" in name for name in names) == 1
        # Buckets exist from the second step on; the gradients of the first one go the same way.
        assert names.count("exchange of bucket 0") == names.count("wait for exchange of bucket 0") == 3
    (barrier,) = [event for event in bars if event["cat"] == "arrivals" and "barrier()" in event["name"]]
    ticks = {event["name"] for event in events if event["ph"] == "i" and event["tid"] == barrier["tid"]}
    assert ticks == {"rank 0", "rank 1"}
    named = {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert {"arrivals", "model", "exchanges", "waits", "calls on world"} <= named


def meeting(sequence: int, begun: float, ended: float, **facts: object) -> dict[str, object]:
    fields = {"kind": "barrier", "label": "world", "ranks": [0, 1], "sequence": sequence, "call": ""}
    return {**fields, "begun": begun, "ended": ended, **facts}


def write_trace(folder: Path, rank: int, ranks: list[int], host: str, *lines: dict[str, object]) -> None:
    first = {"rank": rank, "ranks": ranks, "host": host, "pid": rank}
    (folder / f"trace_rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, *lines)))


def test_the_smallest_round_trip_decides_how_clocks_differ():
    # The clock of rank 1 is 1000 ahead. Each begins after the other in turns; one meeting takes 2 only.
    own = [meeting(1, 0.0, 50.0), meeting(2, 100.0, 102.0), meeting(3, 200.0, 290.0)]
    other = [meeting(1, 1040.0, 1051.0), meeting(2, 1100.0, 1102.0), meeting(3, 1201.0, 1300.0)]
    assert clock_offsets({0: own, 1: other}) == {0: 0.0, 1: pytest.approx(1000.0, abs=2.0)}


def with_host(host: str, *lines: dict[str, object]) -> list[dict[str, object]]:
    return [{"rank": 0, "host": host}, *lines]


def test_clocks_are_compared_through_others_and_on_one_host():
    between = [meeting(1, 70.0, 72.0, label="group1"), meeting(1, 1070.0, 1072.0, label="group2")]
    lines = {
        0: with_host("a", meeting(1, 50.0, 52.0, label="group1")),
        1: with_host("b", *between),  # 20 ahead of rank 0
        2: with_host("c", meeting(1, 3070.0, 3072.0, label="group2")),  # 2000 ahead of rank 1
        3: with_host("c"),
        4: with_host("d", meeting(1, 0.0, 1.0, label="group4")),
        5: with_host("d", meeting(1, 7.0, 8.0, label="group4")),
    }
    assert clock_offsets(lines) == {0: 0.0, 1: 20.0, 2: 2020.0, 3: 2020.0, 4: None, 5: None}


def test_two_machines_of_one_name_have_two_clocks():
    # Rank 2 is on the host of rank 0; rank 1 is on a clone of it, whose clock is 1000 ahead.
    clocks = {0: 0.0, 1: 1000.0, 2: 0.0}
    lines = {
        rank: with_host("worker", *(meeting(n, 100.0 * n + ahead, 100.0 * n + ahead + 4.0 + rank) for n in (1, 2)))
        for rank, ahead in clocks.items()
    }
    assert clock_offsets(lines) == {0: 0.0, 1: 1001.0, 2: 0.0}


def test_groups_of_one_name_are_apart(tmp_path):
    """Rows and columns are called "split". In each, the last rank comes 1.3 us late in 100, which blames nobody."""
    for rank in range(3):
        lines = []
        for number, (other, after) in itertools.product(range(1, 21), ((1, 0.0), (2, 30.0))):
            begun, facts = 100.0 * number + after, {"label": "split", "ranks": [0, other], "bytes": 4}
            if rank in (0, other):
                lines.append(meeting(number, begun + (1.3 if rank else 0.0), begun + 10.0, **facts))
        write_trace(tmp_path, rank, [0, 1, 2], "a", *lines)
    made = timeline(tmp_path)
    assert made["otherData"]["straggler"] == -1
    names = [event["args"]["name"] for event in made["traceEvents"] if event["name"] == "thread_name"]
    assert names[-2:] == [f"arrivals on split of ranks 0, {other}" for other in (1, 2)]


def test_a_clock_that_nobody_knows_is_told(tmp_path, capsys):
    for rank, host in ((0, "a"), (3, "b")):
        write_trace(tmp_path, rank, [0, 3], host, meeting(1, 5.0, 6.0, ranks=[rank], bytes=0))
    made = timeline(tmp_path)
    clocks = {"clock_offsets_us": {0: 0.0, 3: None}, "waited_for_us": {0: 0.0}}
    assert made["otherData"] == {"ranks_without_trace": [], **clocks, "straggler": -1}
    names = [event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0 on a", "rank 3 on b, whose clock was compared with no other", "arrivals"]
    assert main.main(["timeline", str(tmp_path)]) == 0
    assert "ranks 3 share neither a collective nor a host with rank 0" in capsys.readouterr().err


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_the_rank_that_comes_last_is_named(tmp_path, capsys, hosts):
    """A collective each 100 us. Rank 2 comes 8 us after the others, which come together, in all but one."""
    everyone = [0, 1, 2]
    for rank in everyone:
        lines = []
        for number in range(1, 11):
            begun = 100.0 * number
            late = 8.0 if rank == (1 if number == 4 else 2) else 0.0
            lines.append(meeting(number, begun + late, begun + 10.0, ranks=everyone, bytes=4))
        write_trace(tmp_path, rank, everyone, hosts[rank], *lines)
    facts = timeline(tmp_path)["otherData"]
    assert (facts["waited_for_us"], facts["straggler"]) == ({1: 16.0, 2: 144.0}, 2)
    assert main.main(["timeline", str(tmp_path)]) == 0
    assert "Rank 2 is late: the others have waited 0.00 s for it" in capsys.readouterr().out


def test_the_traces_of_the_latest_job_are_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("BAGUA_TRACE", str(tmp_path))
    ThreadRanks(3).run(bagua.comm.barrier, size=3)
    ThreadRanks(2).run(bagua.comm.barrier, size=2)
    assert len(list(tmp_path.iterdir())) == 2
    assert set(timeline(tmp_path)["otherData"]["clock_offsets_us"]) == {0, 1}
    older = min(tmp_path.iterdir())
    assert set(timeline(older)["otherData"]["clock_offsets_us"]) == {0, 1, 2}


PLACE = Place("world", "threads", 0, (0,))


@pytest.fixture
def file(tmp_path: Path) -> TraceFile:
    return TraceFile(Recorder(), PLACE, str(tmp_path))


def record(number: int) -> CallRecord:
    made = CallRecord(Call("barrier", torch.uint8, sequence=number), PLACE, number, 1.0)
    made.ended = 2.0
    return made


def test_the_size_is_bounded(tmp_path, file, monkeypatch):
    monkeypatch.setattr(trace_module, "MOST_LINES", 1000)
    for number in range(3000):
        file.call(record(number + 1))
    file.close()
    lines = (tmp_path / "trace_rank_0.jsonl").read_text().splitlines()
    assert (len(lines), json.loads(lines[-1])) == (1 + 1000, {"cut": 1000})
    assert len(timeline(tmp_path)["traceEvents"]) > 999


@pytest.mark.parametrize("pause_s", [60.0, -1.0])
def test_no_line_is_lost_wherever_a_signal_or_another_thread_comes_in_between(tmp_path, monkeypatch, pause_s):
    """``flush`` runs at each instruction of a call that adds a line, as it may in another thread."""
    monkeypatch.setattr(trace_module, "_PAUSE_S", pause_s)  # 60 s: others write; -1: this call does
    file = TraceFile(Recorder(), PLACE, str(tmp_path))
    file.call(record(1))
    at, left = 0, -1

    def interrupt(frame: FrameType, event: str, _: object) -> object:
        """At instruction number ``at`` of the calls of ``_add`` and ``flush``."""
        nonlocal left
        if frame.f_code.co_filename != trace_module.__file__ or left < 0:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                file.flush()
        return interrupt

    while left < 0:
        left, before = at, sys.gettrace()
        sys.settrace(interrupt)
        try:
            file.call(record(at + 2))
        finally:
            sys.settrace(before)
        at += 1
    assert at > 20, "it was interrupted everywhere"
    file.close()
    written = [json.loads(line) for line in (tmp_path / "trace_rank_0.jsonl").read_text().splitlines()[1:]]
    assert sorted(line["sequence"] for line in written) == list(range(1, at + 2))


def test_a_forked_child_writes_nothing_into_the_trace_of_its_parent(tmp_path, file, monkeypatch):
    file.call(record(1))
    with monkeypatch.context() as child:
        child.setattr("os.getpid", lambda: -1)
        file.call(record(2))
        file.close()
    assert len((tmp_path / "trace_rank_0.jsonl").read_text().splitlines()) == 1


def test_a_file_that_ends_in_the_middle_of_a_line_is_read_up_to_there(tmp_path, file):
    file.call(record(1))
    file.close()
    with (tmp_path / "trace_rank_0.jsonl").open("a") as opened:
        opened.write('{"call": "#2 bar')
    assert sum(event["name"] == "#1 barrier()" for event in timeline(tmp_path)["traceEvents"]) == 2


def test_ranks_that_left_no_trace_are_named(tmp_path, capsys):
    write_trace(tmp_path, 1, [0, 1, 2], "a")
    (tmp_path / "trace_rank_2.jsonl").touch()  # What a full disk leaves.
    assert main.main(["timeline", str(tmp_path)]) == 0
    assert "no trace of ranks 0, 2" in capsys.readouterr().err
    (tmp_path / "trace_rank_1.jsonl").write_text("")
    with pytest.raises(ConfigurationError, match="all traces are empty"):
        timeline(tmp_path)


def test_a_full_disk_is_a_typed_error_at_first_and_ends_the_trace_later(tmp_path, file, monkeypatch, caplog):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as disk:
        disk.setattr(os, "open", full)
        with pytest.raises(ConfigurationError, match="No space left") as caught:
            TraceFile(Recorder(), PLACE, str(tmp_path))
        assert caught.value.argument == "BAGUA_TRACE"
    file.call(record(1))
    monkeypatch.setattr(os, "open", full)
    file.flush()
    file.call(record(2))
    file.close()
    ends = f"trace: {tmp_path}/trace_rank_0.jsonl ends here: [Errno 28] No space left on device"
    assert [one.message for one in caplog.records if one.name == "bagua"] == [ends]


def test_a_folder_without_traces_is_a_typed_error(tmp_path, capsys):
    with pytest.raises(ConfigurationError, match="BAGUA_TRACE"):
        timeline(tmp_path)
    assert main.main(["timeline", str(tmp_path)]) == 1
    assert "BAGUA_TRACE" in capsys.readouterr().err
    (tmp_path / "trace_rank_0.jsonl").write_text("nothing\n")
    with pytest.raises(ConfigurationError, match="no trace of bagua"):
        timeline(tmp_path)


def test_a_profiler_names_calls():
    bagua.comm.init_process_group()
    with torch.profiler.profile() as profile:
        bagua.comm.allreduce(torch.ones(2))
        bagua.comm.allreduce(torch.ones(3), async_op=True).wait()
    bagua.comm.destroy_process_group()
    calls = {"world: #1 allreduce(2 x float32, sum)", "world: #2 allreduce(3 x float32, sum)"}
    assert {*calls, "wait for world: #2 allreduce(3 x float32, sum)"} <= {event.name for event in profile.events()}
