"""Predicted against measured steps: what the table says of cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.advise import CallFacts, MachineFacts, Message, ModelFacts, Moment, ParameterFacts, Rehearsal, Run
from bagua.cli.lab.network import LabUnavailableError
from bagua.link import parse_link
from benchmarks import prediction
from benchmarks.grounds import Ground, Grounds
from benchmarks.lab_calls import lab_cluster
from benchmarks.prediction import (
    CONTENDERS,
    GRID,
    Cell,
    add_to,
    main,
    make_parser,
    pieces,
    plain_step_s,
    summary,
    tables,
)


def test_cells_are_collected_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cells.json"
    add_to(file, [Cell("ddp", 2, "1000mbit", 0.110, 0.100), Cell("top_k:warmup_steps=0", 2, "1000mbit", 0.06, 0.10)])
    add_to(file, [Cell("bytegrad", 4, "100mbit", 0.2, 0.2)])
    assert len(json.loads(file.read_text())) == 3
    assert main(["--read", str(file)]) == 0
    said = capsys.readouterr().out
    assert "| `ddp` | 110.0 / 100.0 ms, +10% |" in said
    assert "| `top_k` | 60.0 / 100.0 ms, -40% |" in said
    assert "3 cells: median error 10.0%, 67% within 15 %, nine in ten within 40%" in said


def test_what_the_switch_could_not_carry_does_not_count() -> None:
    said = tables([Cell("ddp", 2, "1000mbit,20ms", 1.0, 2.0, late=0.2), Cell("ddp", 2, "10mbit,20ms", 1.0, 1.0)])
    assert "| `ddp` | (1000.0 / 2000.0 ms, -50%) | 1000.0 / 1000.0 ms, +0% |" in said
    assert "1 cells: median error 0.0%" in said


def test_the_named_algorithm_is_held_against_the_best() -> None:
    near = [
        Cell("ddp", 2, "10mbit", 1.0, 1.0),
        Cell("bytegrad", 2, "10mbit", 0.5, 0.52),
        Cell("x", 2, "10mbit", 0.6, 0.5),
    ]
    # Not worth a change: plain DDP is named unless another one is predicted to be 5 % faster.
    far = [Cell("ddp", 4, "10gbit", 1.0, 1.2), Cell("bytegrad", 4, "10gbit", 0.96, 1.0)]
    said = summary([*near, *far])
    assert "at most 1.05 of the best time on 1 of 2 networks" in said
    assert "2 hosts, 10mbit: bytegrad, 1.04 of the best" in said
    assert "4 hosts, 10gbit: ddp, 1.20 of the best" in said


def test_old_cells_are_predicted_again_from_what_was_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = (CallFacts("allreduce", 2e-3, ((1e6, 0.5),)),)
    ground = Ground(
        ModelFacts((ParameterFacts("weight", (4, 4), "float32", 0.05),), (0.1, 0.1)),
        (
            Rehearsal(
                "ddp",
                ((Moment("arrival"), Moment("start"), Moment("wait"), Moment("stepped")),),
                (Run((0.0, Message("allreduce", 1e6, 2, 2), 0.0)),),
            ),
        ),
        MachineFacts(message_s=0.0, byte_s=0.0, cores=2, calls=(CallFacts("allreduce", 0.0, ((1e6, 1e-9),)),)),
    )
    file, cells = tmp_path / "facts.json", tmp_path / "cells.json"
    link = parse_link("100mbit,1ms")
    Grounds(file, lambda _: ground, lambda *_: calls).of(2, link)
    kept = Grounds(file, refuse, refuse)
    assert kept.of(2, link) == (ground, calls)
    assert kept.has(2, link)
    assert not kept.has(4, link)
    add_to(cells, [Cell("ddp", 2, str(link), 9.0, 0.604)])
    assert main(["--read", str(cells), "--facts", str(file)]) == 0
    # 0.1 s of computing, and the call: 0.5 s that 1 MB took on the link, and four delays of two messages.
    assert "| `ddp` | 604.0 / 604.0 ms" in capsys.readouterr().out
    cells.unlink()
    add_to(cells, [Cell("ddp", 2, str(link), 9.0, 0.704, pace=2.0)])
    assert main(["--read", str(cells), "--facts", str(file)]) == 0
    # A machine that is half as fast computes for twice as long, and its links are the same.
    assert "| `ddp` | 704.0 / 704.0 ms" in capsys.readouterr().out


def test_ranks_that_share_cores_take_turns_without_a_network_as_well() -> None:
    facts = ModelFacts((ParameterFacts("weight", (4, 4), "float32", 0.05),), (0.1,))
    assert plain_step_s(Ground(facts, (), MachineFacts(cores=2)), 2) == 0.1
    assert plain_step_s(Ground(facts, (), MachineFacts(cores=2)), 4) == 0.2


def test_a_pace_changes_all_that_a_processor_does() -> None:
    parameters = (ParameterFacts("weight", (4, 4), "float32", 0.05),)
    run = Run((1.0, Message("allreduce", 1e6, 2, 2), 0.5))
    calls = (CallFacts("allreduce", 2e-3, ((1e6, 0.5),)),)
    machine = MachineFacts(message_s=1.0, byte_s=0.5, local_message_s=3.0, local_byte_s=4.0, calls=calls)
    ground = Ground(ModelFacts(parameters, (0.1,)), (Rehearsal("ddp", (), (run,), 0.25),), machine, {"x": calls})
    slower = ground.at_pace(2.0)
    assert slower.facts.steps_s == (0.2,)
    assert slower.facts.parameters[0].arrival_s == 0.1
    assert slower.rehearsals[0].extra_s == 0.5
    assert slower.rehearsals[0].runs[0].items == (2.0, run.items[1], 1.0)
    assert (slower.machine.message_s, slower.machine.byte_s) == (2.0, 1.0)
    assert (slower.machine.local_message_s, slower.machine.local_byte_s) == (6.0, 8.0)
    assert slower.machine.calls == (CallFacts("allreduce", 4e-3, ((1e6, 1.0),)),)
    assert slower.links == ground.links


def refuse(*_: object) -> Ground:
    raise AssertionError("it was measured before")


def test_the_grid_goes_on_where_it_ended() -> None:
    options = make_parser().parse_args(["--grid", "--pieces", "2"])
    known = [Cell(who, hosts, str(link), 1.0, 1.0) for hosts, link in GRID[:3] for who in CONTENDERS]
    assert len(GRID) == 16
    # Of the third network, the last algorithm is missing.
    assert pieces(options, known[:-1]) == [(*GRID[2], [CONTENDERS[-1]]), (*GRID[3], list(CONTENDERS))]
    assert pieces(make_parser().parse_args(["--grid"]), []) == [(*one, list(CONTENDERS)) for one in GRID]
    some = make_parser().parse_args(["--grid", "--contenders", "ddp", "power_sgd"])
    assert pieces(some, known)[0] == (*GRID[3], ["ddp", "power_sgd"])


def test_a_machine_without_a_lab_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_lab(*_: object) -> list[Cell]:
        raise LabUnavailableError("needs root")

    monkeypatch.setattr(prediction, "cells_of", no_lab)
    assert main([]) == prediction.NOT_AVAILABLE
    assert "needs root" in capsys.readouterr().err


def test_links_of_the_lab_let_some_bytes_pass_at_once() -> None:
    cluster = lab_cluster(4, 1, parse_link("100mbit"))
    assert (cluster.hosts, cluster.shared, cluster.burst_bytes) == (4, True, 128 * 1024)
    # A millisecond at 10 Gbit/s is more than the largest packets; the switch that makes delays has no bucket.
    assert lab_cluster(2, 1, parse_link("10gbit")).burst_bytes == 1_250_000
    assert lab_cluster(2, 1, parse_link("100mbit,20ms")).burst_bytes == 0
