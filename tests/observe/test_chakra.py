"""Execution traces: what a rank did, and what each part of it had to wait for, read by a reader of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua.comm
from bagua.cli import main
from bagua.observe import write_chakra
from bagua.testing import ThreadRanks

pytestmark = pytest.mark.threads

COMPUTES, SENDS, RECEIVES, COLLECTIVE = 4, 5, 6, 7


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data: bytes) -> list[tuple[int, Any]]:
    """Numbers of fields and their values: whole numbers, and bytes of texts and messages."""
    found, at = [], 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            found.append((key >> 3, data[at : at + value]))
            at += value
        else:
            assert key & 7 == 0
            found.append((key >> 3, value))
    return found


def attribute(data: bytes) -> tuple[str, Any]:
    (_, name), (number, value) = fields(data)
    return name.decode(), {9: int, 27: bool, 29: bytes.decode}[number](value)


def read(path: Path) -> list[dict[str, Any]]:
    """What a file holds: first what it says of itself, then its nodes."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        size, at = varint(data, at)
        found.append(fields(data[at : at + size]))
        at += size
    (_, version), *about = found[0]
    nodes = [
        {
            "id": dict(node)[1],
            "name": dict(node)[2].decode(),
            "type": dict(node)[3],
            "after": [value for number, value in node if number == 5],
            "begun": dict(node)[6],
            "took": dict(node)[7],
            **dict(attribute(value) for number, value in node if number == 10),
        }
        for node in found[1:]
    ]
    return [{"version": version.decode(), **dict(attribute(value) for _, value in about)}, *nodes]


def span(name: str, begun: float, ended: float, track: str, **facts: Any) -> dict[str, Any]:
    return {"span": name, "begun": begun, "ended": ended, "track": track, **facts}


def call(kind: str, begun: float, ended: float, label: str = "model0/world", **facts: Any) -> dict[str, Any]:
    fixed = {"kind": kind, "call": f"{kind}()", "bytes": 4000, "label": label, "sequence": 1, "ranks": [0, 3]}
    return {**fixed, "begun": begun, "ended": ended, **facts}


def nodes_of(tmp_path: Path, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    first = {"rank": 3, "ranks": [0, 3], "host": "h"}
    (tmp_path / "trace_rank_3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, *lines)))
    (written,) = write_chakra(tmp_path, tmp_path / "out")
    assert written == tmp_path / "out.3.et"
    about, *nodes = read(written)
    assert about == {"version": "0.0.4", "rank": 3, "world_size": 2}
    assert [node["id"] for node in nodes] == list(range(1, len(nodes) + 1))
    assert all(number < node["id"] for node in nodes for number in node["after"])
    return nodes


def test_an_exchange_goes_on_beside_computing_until_somebody_waits_for_it(tmp_path: Path) -> None:
    nodes = nodes_of(
        tmp_path,
        span("forward pass", 1000, 1100, "model"),
        span("backward pass", 1100, 1300, "model"),
        span("mean of bucket 0", 1200, 1350, "exchanges"),
        span("run mean of bucket 0", 1210, 1340, "work", group="model0"),
        call("alltoall", 1230, 1330),
        span("wait for mean of bucket 0", 1300, 1350, "waits"),
        span("between passes", 1300, 1400, "model"),
    )
    shown = [(node["name"], node["type"], node["begun"], node["took"], node["after"]) for node in nodes]
    assert shown == [
        ("compute", COMPUTES, 0, 200, []),
        ("run mean of bucket 0", COMPUTES, 210, 20, [1]),
        ("alltoall()", COLLECTIVE, 230, 100, [2]),
        ("run mean of bucket 0", COMPUTES, 330, 10, [3]),
        ("compute", COMPUTES, 200, 100, [1]),
        ("compute", COMPUTES, 350, 50, [5, 4]),
    ]
    assert nodes[2]["comm_type"] == 6
    assert (nodes[2]["comm_size"], nodes[2]["pg_name"], nodes[2]["is_cpu_op"]) == (4000, "model0/world", True)


def test_a_call_of_the_code_that_computes_holds_it_up(tmp_path: Path) -> None:
    nodes = nodes_of(
        tmp_path,
        span("forward pass", 0, 100, "model"),
        call("barrier", 100, 140, "world"),
        call("sendrecv", 150, 160, "world", between=[0, 3]),
        call("recv", 160, 170, "world", between=[-1, 3]),
    )
    shown = [(node["type"], node["after"], node.get("comm_src"), node.get("comm_dst")) for node in nodes]
    assert shown == [
        (COMPUTES, [], None, None),
        (COLLECTIVE, [1], None, None),
        (COMPUTES, [2], None, None),
        (SENDS, [3], 3, 3),
        (RECEIVES, [3], 0, 3),
        (RECEIVES, [5], None, 3),
    ]


def test_a_job_leaves_a_trace_of_each_rank(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("BAGUA_TRACE", str(tmp_path))

    def job() -> None:
        bagua.comm.allreduce(torch.ones(250))
        if bagua.comm.get_rank() == 0:
            bagua.comm.send(torch.ones(2), 1)
        else:
            bagua.comm.recv(torch.ones(2), 0)

    ThreadRanks(2).run(job, size=2)
    assert main.main(["timeline", str(tmp_path), "--format", "chakra"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"chakra.{rank}.et") for rank in range(2)]
    ends = []
    for rank in range(2):
        _, *nodes = read(tmp_path / f"chakra.{rank}.et")
        calls = [node for node in nodes if node["type"] != COMPUTES]
        assert (calls[0]["comm_type"], calls[0]["comm_size"]) == (0, 1000)
        ends.append((calls[1]["type"], calls[1]["comm_src"], calls[1]["comm_dst"]))
    assert ends == [(SENDS, 0, 1), (RECEIVES, 0, 1)]
    assert main.main(["timeline", str(tmp_path / "nowhere"), "--format", "chakra"]) == 1
    assert "there is no trace here" in capsys.readouterr().err
