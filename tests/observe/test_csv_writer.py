"""The CSV writer of metrics: it goes on where it ended, and drops half a row."""

from __future__ import annotations

import csv
import sys

import pytest

from bagua.observe import CsvWriter

VALUES = {"comm/overlap": 0.5, "comm/wait_on_rank/3": 1.25}


def test_csv_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "metrics.csv"
    for step in (1, 2):
        writer = CsvWriter(path)
        writer.write(step, VALUES)
        writer.close()
        writer.close()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["step"], row["name"], float(row["value"])) for row in rows] == [
        (step, name, value) for step in ("1", "2") for name, value in VALUES.items()
    ]


@pytest.mark.parametrize("cut", ["", "st", "step,name,value\n1,comm/calls,5\n2,comm/calls,12"])
@pytest.mark.parametrize("tail_bytes", [4096, 3])
def test_half_a_row_of_a_process_that_was_killed_is_dropped(tmp_path, monkeypatch, cut, tail_bytes):
    monkeypatch.setattr(sys.modules[CsvWriter.__module__], "_TAIL_BYTES", tail_bytes)
    path = tmp_path / "metrics.csv"
    path.write_text(cut)
    writer = CsvWriter(path)
    writer.write(3, {"comm/calls": 7})
    writer.close()
    kept = ["1,comm/calls,5"] if "calls" in cut else []
    assert path.read_text().splitlines() == ["step,name,value", *kept, "3,comm/calls,7"]
