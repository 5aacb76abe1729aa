"""Traces of all ranks become one timeline: calls, exchanges, passes, waits, arrivals; clocks agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bagua.comm
from bagua.cli import main
from bagua.comm import Call, CallRecord, Place, Recorder
from bagua.errors import ConfigurationError
from bagua.observe import clock_offsets, timeline
from bagua.observe import trace as trace_module
from bagua.observe.trace import TraceFile
from bagua.testing import ThreadRanks
from bagua.torch_api.algorithms import gradient_allreduce

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
        assert sum(name.endswith("of bucket 0") and not name.startswith("wait") for name in names) == 3
        assert sum(name.startswith("wait for ") for name in names) == 3
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


def test_ranks_that_never_met_keep_their_clocks():
    assert clock_offsets({0: [meeting(1, 0.0, 1.0)], 3: []}) == {0: 0.0, 3: 0.0}


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
