"""Beats of a running job, and the table that ``bagua top`` makes of them."""

import io
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

import bagua.comm
from bagua.algorithms import GradientAllReduceAlgorithm
from bagua.cli import main, top
from bagua.comm.store.asking import Beats
from bagua.comm.store.serving import connect_store, serve_store
from bagua.observe import watch as watch_module
from bagua.testing import ThreadRanks
from tests.contract.algorithms import train
from tests.harness import until


def beat(**facts: object) -> dict[str, object]:
    plain = {"world_size": 2, "at": 1000.0, "host": "h", "pid": 7, "backend": "shm", "window_s": 10.0, "waits": {}}
    sums = {"collectives_s": 0.0, "running_s": 10.0, "time_s": 4.0, "exposed_s": 2.0, "waiting_s": 1.0}
    made = {"sent_bytes": 50_000_000, "steps": [20, 120], "call": "world #9 barrier()"}
    return {**plain, **sums, **made, "gauges": {}, **facts}


def gone(*_: object) -> bool:
    """What a store answers that has ended."""
    raise RuntimeError("gone")


def test_a_row_shows_shares_of_the_time_between_two_looks():
    before = {0: beat(at=990.0, running_s=0.0, time_s=0.0, exposed_s=0.0, waiting_s=0.0, sent_bytes=0, steps=[5, 105])}
    rows = top.rows_of({0: beat(world_size=1)}, before, wall_s=1001.0)
    shown = ("120", "1.5", "40%", "20%", "10%", "5.00", "")
    assert rows == [("0", "h:7", "1 s ago", *shown, "world #9 barrier()")]
    assert top.rows_of({0: beat(world_size=1, steps=None)}, {}, wall_s=1000.0)[0][3:5] == ("", "")  # It trains nothing.


def test_a_look_that_finds_nothing_new_shows_the_last_news():
    """Ranks speak once in a second at most: a row may not fall back to the mean of the whole run in between."""
    seen = top.Seen()
    first = beat(at=990.0, running_s=500.0, time_s=500.0, exposed_s=500.0, waiting_s=0.0, sent_bytes=0)
    second = beat(at=1000.0, running_s=510.0, time_s=504.0, exposed_s=502.0, waiting_s=1.0)
    rows = []
    for now in (first, second, second, second):
        seen.look({0: now})
        rows.append(top.rows_of({0: now}, seen.before, wall_s=1000.0)[0][5:9])
    assert rows == [("100%", "100%", "0%", "0.00"), *[("40%", "20%", "10%", "5.00")] * 3]


def test_a_store_that_never_answers_is_given_up():
    answers = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        Beats(SimpleNamespace(check=lambda _: not answers.wait()), -1).read_within(0.01)
    answers.set()
    with pytest.raises(RuntimeError, match="gone"):
        Beats(SimpleNamespace(check=gone), -1).read_within(60.0)


def test_an_address_may_be_of_ipv6(capsys):
    with socket.socket(socket.AF_INET6) as free:
        try:
            free.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        # Nobody listens there.
        assert main.main(["top", f"[::1]:{free.getsockname()[1]}", "--once"]) == 1
    assert "Connection refused" in capsys.readouterr().err


def test_who_has_seen_enough_of_the_table_is_told_no_error(monkeypatch, capsys, port):
    Beats(connect_store(port, 10.0), 0).post_now(beat(world_size=1))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as table, monkeypatch.context() as piped:
        piped.setattr(sys, "stdout", table)
        assert main.main(["top", f"127.0.0.1:{port}", "--once"]) == 0
    assert capsys.readouterr().err == f"looking for a job at 127.0.0.1:{port}\n"


def test_late_and_silent_ranks_are_marked():
    now = {0: beat(waits={"1": 3.0}, world_size=3), 1: beat(at=900.0, world_size=3, waiting_s=0.0)}
    rows = top.rows_of(now, {}, wall_s=1000.0)
    assert rows[1][2] == "100 s ago !"
    assert [row[9] for row in rows] == ["", "late", ""]
    assert (rows[2][0], rows[2][-1]) == ("2", "has said nothing yet")
    assert top.plain_table(rows).splitlines()[0].startswith("rank  host")


@pytest.mark.parametrize(("waiting_s", "mark"), [(0.0, ""), (0.05, ""), (0.2, "late")])
def test_nobody_is_late_for_whom_nobody_waits_in_what_the_table_shows(waiting_s, mark):
    blamed = {rank: beat(waits={"1": 3.0} if rank == 0 else {}) for rank in range(2)}
    before = {rank: beat(at=990.0, running_s=0.0, time_s=0.0, exposed_s=2.0, waiting_s=1.0) for rank in range(2)}
    blamed[0]["waiting_s"] = 1.0 + waiting_s
    assert [row[9] for row in top.rows_of(blamed, before, wall_s=1000.0)] == ["", mark]


def test_a_terminal_shows_the_names_of_groups_as_they_are():
    console = pytest.importorskip("rich.console").Console(width=200, record=True, file=io.StringIO())
    calls = ["[red]shards[/red] #1 barrier()", "a[/b] #2 barrier()"]
    rows = top.rows_of({rank: beat(call=call) for rank, call in enumerate(calls)}, {}, wall_s=1000.0)
    console.print(top.rich_table(rows))
    assert all(call in console.export_text(clear=False) for call in calls)


def test_what_an_earlier_job_left_in_the_store_is_not_shown():
    left = {1: beat(job="a", at=900.0, waits={"0": 9.0})}
    rows = top.rows_of({0: beat(job="b"), **left}, {}, wall_s=1000.0)
    shown = [("0", "", "world #9 barrier()"), ("1", "", "has said nothing yet")]
    assert [(row[0], row[9], row[-1]) for row in rows] == shown


def test_a_second_job_of_one_process_counts_from_its_beginning():
    before = {0: beat(job="a", world_size=1, at=990.0, running_s=500.0, time_s=400.0)}
    rows = top.rows_of({0: beat(job="b", world_size=1)}, before, wall_s=1000.0)
    assert rows[0][5:9] == ("40%", "20%", "10%", "5.00")


@pytest.mark.parametrize("token", ["", "ours"])
def test_a_job_is_found_through_its_store(token, capsys, monkeypatch, port):
    monkeypatch.setenv("BAGUA_TOKEN", token)
    for rank in range(2):
        Beats(PrefixStore("bagua/3", PrefixStore("torch", connect_store(port, 10.0))), rank).post_now(beat())
    assert main.main(["top", f"127.0.0.1:{port}", "--once"]) == 0
    assert "world #9 barrier()" in capsys.readouterr().out.splitlines()[1]


def test_a_store_without_ranks_and_no_store_at_all_are_said(capsys):
    store, port = serve_store()
    assert main.main(["top", f"127.0.0.1:{port}", "--once"]) == 1
    assert "no rank has said anything" in capsys.readouterr().out
    del store
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # Nobody listens there.
        assert main.main(["top", f"127.0.0.1:{free.getsockname()[1]}", "--once"]) == 1
    assert "no job answers" in capsys.readouterr().err


@pytest.mark.parametrize(("says", "shown"), [(b"", "no answer within 0.1 s"), (b"SSH-2.0", "is no store")])
def test_who_listens_and_is_no_store_is_given_up_without_torch(says, shown, capsys, monkeypatch):
    """Torch takes seconds to be imported, and seconds more to find out."""
    monkeypatch.setattr(top, "_FOUND_S", 60.0 if says else 0.1)
    monkeypatch.setitem(sys.modules, "bagua.comm", None)  # Its import fails.
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as beside:
        asked = beside.submit(listener.accept)
        if says:
            asked.add_done_callback(lambda done: done.result()[0].sendall(says))
        assert main.main(["top", f"127.0.0.1:{listener.getsockname()[1]}"]) == 1
        asked.result()[0].close()
    assert shown in capsys.readouterr().err


def test_ranks_post_beats_while_they_call(monkeypatch):
    monkeypatch.setattr(watch_module, "BEAT_S", 0.0)

    def job() -> int:
        watch = watch_module._watches.of[bagua.comm.get_default_group().recorder]
        until, tensor = time.monotonic() + 60, torch.zeros(1)
        # All go on until all have heard of each other.
        while tensor.item() < 2 and time.monotonic() < until:
            tensor.fill_(float(len(watch.others) == 1))
            bagua.comm.allreduce(tensor)
            time.sleep(0.001)
        return len(watch.others)

    assert ThreadRanks(2).run(job, size=2) == [1, 1]


def test_steps_of_a_model_are_counted():
    def job() -> tuple[int, int] | None:
        train(GradientAllReduceAlgorithm(), range(3))
        return bagua.comm.get_default_group().recorder.steps

    assert ThreadRanks(2).run(job, size=2) == [(3, 3), (3, 3)]


def test_a_beat_that_cannot_arrive_disturbs_nobody():
    beats = Beats(SimpleNamespace(set=gone), 0)
    beats.post(beat(), lambda: None)
    until(lambda: not beats._busy)


def test_beats_go_on_when_threads_can_start_again():
    store, arrived = HashStore(), threading.Event()
    beats = Beats(store, 0)
    with mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")) as start:
        beats.post(beat(), arrived.set)
    assert start.called
    assert Beats(store, -1).read() == {}
    beats.post(beat(), arrived.set)
    assert arrived.wait(60)


def test_silent_ranks_are_not_alive():
    place = bagua.comm.Place("world", "threads", 0, (0, 1, 2))
    watch = watch_module.RankWatch(bagua.comm.Recorder(), place, Beats(HashStore(), 0))
    assert watch.alive(0.0) == 3
    watch._heard = {1: 0.0, 2: 50.0}
    assert watch.alive(55.0) == 2
