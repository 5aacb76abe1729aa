"""Traces of all ranks become one timeline: calls, exchanges, passes, waits, arrivals; clocks agree."""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import bagua.comm
from bagua.cli import main
from bagua.comm import Call, CallRecord, Place, Recorder
from bagua.errors import ConfigurationError
from bagua.observe import clock_offsets, timeline
from bagua.observe.timeline import TraceFile
from bagua.testing import ThreadRanks
from bagua.torch_api.algorithms import gradient_allreduce

# Beside it, the package has a function of this name.
trace_module = importlib.import_module("bagua.observe.timeline")

pytestmark = pytest.mark.threads


def train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    bagua.comm.barrier()


def test_a_job_leaves_one_timeline(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BAGUA_TRACE", str(tmp_path))
    ThreadRanks(2).run(train, size=2)
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
        assert names.count("exchange of bucket 0") == 3
        assert names.count("wait for exchange of bucket 0") == 3
    barrier = [event for event in bars if event["cat"] == "arrivals" and "barrier()" in event["name"]]
    assert len(barrier) == 1
    ticks = [event for event in events if event["ph"] == "i" and event["tid"] == barrier[0]["tid"]]
    assert {event["name"] for event in ticks} == {"rank 0", "rank 1"}
    named = {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert {"arrivals", "model", "exchanges", "waits", "calls on world"} <= named


def meeting(sequence: int, begun: float, ended: float) -> dict[str, object]:
    fields = {"kind": "barrier", "label": "world", "ranks": [0, 1], "sequence": sequence, "call": ""}
    return {**fields, "begun": begun, "ended": ended}


def test_the_smallest_round_trip_decides_how_clocks_differ():
    # The clock of rank 1 is 1000 ahead. Each begins after the other in turns; one meeting takes 2 only.
    own = [meeting(1, 0.0, 50.0), meeting(2, 100.0, 102.0), meeting(3, 200.0, 290.0)]
    other = [meeting(1, 1040.0, 1051.0), meeting(2, 1100.0, 1102.0), meeting(3, 1201.0, 1300.0)]
    offsets = clock_offsets({0: own, 1: other})
    assert offsets[0] == 0.0
    assert abs(offsets[1] - 1000.0) <= 2.0


def with_host(host: str, *lines: dict[str, object]) -> list[dict[str, object]]:
    return [{"rank": 0, "host": host}, *lines]


def test_clocks_are_compared_through_others_and_on_one_host():
    between = [{**meeting(1, 70.0, 72.0), "label": "group1"}, {**meeting(1, 1070.0, 1072.0), "label": "group2"}]
    offsets = clock_offsets(
        {
            0: with_host("a", {**meeting(1, 50.0, 52.0), "label": "group1"}),
            1: with_host("b", *between),  # 20 ahead of rank 0
            2: with_host("c", {**meeting(1, 3070.0, 3072.0), "label": "group2"}),  # 2000 ahead of rank 1
            3: with_host("c"),
            4: with_host("d", {**meeting(1, 0.0, 1.0), "label": "group4"}),
            5: with_host("d", {**meeting(1, 7.0, 8.0), "label": "group4"}),
        }
    )
    assert offsets == {0: 0.0, 1: 20.0, 2: 2020.0, 3: 2020.0, 4: None, 5: None}


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
        lines = [{"rank": rank, "ranks": [0, 1, 2], "host": "a", "pid": rank}]
        for number in range(1, 21):
            for other, after in ((1, 0.0), (2, 30.0)):
                begun = 100.0 * number + after
                facts = {"label": "split", "ranks": [0, other], "bytes": 4}
                if rank in (0, other):
                    lines.append({**meeting(number, begun + (1.3 if rank else 0.0), begun + 10.0), **facts})
        (tmp_path / f"trace_rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = timeline(tmp_path)
    assert made["otherData"]["straggler"] == -1
    names = [event["args"]["name"] for event in made["traceEvents"] if event["name"] == "thread_name"]
    assert names[-2:] == ["arrivals on split of ranks 0, 1", "arrivals on split of ranks 0, 2"]


def test_a_clock_that_nobody_knows_is_told(tmp_path, capsys):
    for rank, host in ((0, "a"), (3, "b")):
        first = {"rank": rank, "ranks": [0, 3], "host": host, "pid": 1}
        lines = [first, {**meeting(1, 5.0, 6.0), "ranks": [rank], "bytes": 0}]
        (tmp_path / f"trace_rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = timeline(tmp_path)
    assert made["otherData"] == {
        "ranks_without_trace": [],
        "clock_offsets_us": {0: 0.0, 3: None},
        "waited_for_us": {0: 0.0},
        "straggler": -1,
    }
    names = [event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0 on a", "rank 3 on b, whose clock was compared with no other", "arrivals"]
    assert main.main(["timeline", str(tmp_path)]) == 0
    assert "ranks 3 share neither a collective nor a host with rank 0" in capsys.readouterr().err


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_the_rank_that_comes_last_is_named(tmp_path, capsys, hosts):
    """A collective each 100 us. Rank 2 comes 8 us after the others, which come together, in all but one."""
    for rank in range(3):
        lines = [{"rank": rank, "ranks": [0, 1, 2], "host": hosts[rank], "pid": rank}]
        for number in range(1, 11):
            begun, ended = 100.0 * number, 100.0 * number + 10.0
            late = 8.0 if rank == (1 if number == 4 else 2) else 0.0
            lines.append({**meeting(number, begun + late, ended), "ranks": [0, 1, 2], "bytes": 4})
        (tmp_path / f"trace_rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = timeline(tmp_path)["otherData"]
    assert facts["waited_for_us"] == {1: 16.0, 2: 144.0}
    assert facts["straggler"] == 2
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


@pytest.fixture
def file(tmp_path: Path) -> TraceFile:
    return TraceFile(Recorder(), Place("world", "threads", 0, (0,)), str(tmp_path))


def record(number: int) -> CallRecord:
    made = CallRecord(Call("barrier", number, torch.uint8), Place("world", "threads", 0, (0,)), number, 1.0)
    made.ended = 2.0
    return made


def test_the_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "MOST_LINES", 1000)
    file = TraceFile(Recorder(), Place("world", "threads", 0, (0,)), str(tmp_path))
    for number in range(3000):
        file.call(record(number + 1))
    file.close()
    lines = (tmp_path / "trace_rank_0.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 1000
    assert json.loads(lines[-1]) == {"cut": 1000}
    assert len(timeline(tmp_path)["traceEvents"]) > 999


@pytest.mark.parametrize("pause_s", [60.0, -1.0])
def test_no_line_is_lost_wherever_a_signal_or_another_thread_comes_in_between(tmp_path, monkeypatch, pause_s):
    """``flush`` runs at each instruction of a call that adds a line, as it may in another thread."""
    place, interrupted = Place("world", "threads", 0, (0,)), True
    monkeypatch.setattr(trace_module, "_PAUSE_S", pause_s)  # 60 s: others write; -1: this call does
    file = TraceFile(Recorder(), place, str(tmp_path))
    file.call(record(1))

    class Interruption:
        """At instruction number ``at`` of the calls of ``_add`` and ``flush``."""

        def __init__(self, at: int) -> None:
            self.left = at

        def __call__(self, frame: FrameType, event: str, _: object) -> object:
            if frame.f_code.co_filename != trace_module.__file__ or self.left < 0:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                self.left -= 1
                if self.left < 0:
                    sys.settrace(None)
                    file.flush()
            return self

    at = 0
    while interrupted:
        interruption = Interruption(at)
        before = sys.gettrace()
        sys.settrace(interruption)
        try:
            file.call(record(at + 2))
        finally:
            sys.settrace(before)
        interrupted, at = interruption.left < 0, at + 1
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
    first = {"rank": 1, "ranks": [0, 1, 2], "host": "a", "pid": 1}
    (tmp_path / "trace_rank_1.jsonl").write_text(json.dumps(first) + "\n")
    (tmp_path / "trace_rank_2.jsonl").touch()  # What a full disk leaves.
    assert main.main(["timeline", str(tmp_path)]) == 0
    assert "no trace of ranks 0, 2" in capsys.readouterr().err
    (tmp_path / "trace_rank_1.jsonl").write_text("")
    with pytest.raises(ConfigurationError, match="all traces are empty"):
        timeline(tmp_path)


def test_a_full_disk_is_a_typed_error_at_first_and_ends_the_trace_later(tmp_path, file, monkeypatch, caplog):
    def full(*_: object, **__: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "open", full)
        with pytest.raises(ConfigurationError, match="No space left") as caught:
            TraceFile(Recorder(), Place("world", "threads", 0, (0,)), str(tmp_path))
        assert caught.value.argument == "BAGUA_TRACE"
    file.call(record(1))
    monkeypatch.setattr(os, "open", full)
    file.flush()
    file.call(record(2))
    file.close()
    assert [one.message for one in caplog.records if one.name == "bagua"] == [
        f"trace: {tmp_path}/trace_rank_0.jsonl ends here: [Errno 28] No space left on device"
    ]


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
    names = [event.name for event in profile.events()]
    assert "world: #1 allreduce(2 x float32, sum)" in names
    assert "world: #2 allreduce(3 x float32, sum)" in names
    assert "wait for world: #2 allreduce(3 x float32, sum)" in names
