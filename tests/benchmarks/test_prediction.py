"""Predicted against measured steps: what the table says of cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.cli.lab.network import LabUnavailableError
from benchmarks import prediction
from benchmarks.prediction import Cell, add_to, main


def test_cells_are_collected_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cells.json"
    add_to(file, [Cell("ddp", 2, "1000mbit", 0.110, 0.100), Cell("top_k:warmup_steps=0", 2, "1000mbit", 0.06, 0.10)])
    add_to(file, [Cell("bytegrad", 4, "100mbit", 0.2, 0.2)])
    assert len(json.loads(file.read_text())) == 3
    assert main(["--read", str(file)]) == 0
    said = capsys.readouterr().out
    assert "| `ddp` | 2 | 1000mbit | 110.0 ms | 100.0 ms | +10% |" in said
    assert "| `top_k` | 2 | 1000mbit | 60.0 ms | 100.0 ms | -40% |" in said
    assert "3 cells: median error 10.0%, 67% within 15 %, nine in ten within 40%" in said


def test_a_machine_without_a_lab_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: object) -> list[list[Cell]]:
        raise LabUnavailableError("needs root")

    monkeypatch.setattr(prediction, "cells_by_link", refuse)
    assert main([]) == prediction.NOT_AVAILABLE
    assert "needs root" in capsys.readouterr().err
