"""``metrics()`` on ranks that train, in a file, and in the loggers of others."""

import gc
import math
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import bagua.comm
import bagua.torch_api as bagua_api
from bagua.algorithms import GradientAllReduceAlgorithm
from bagua.integrations import transformers
from bagua.observe import CsvWriter
from bagua.observe.straggler import Reading, latest_rank
from tests.contract.algorithms import build, train
from tests.harness import train_steps, until
from tests.membership import training as islands_of_threads

ALWAYS = {
    *("comm/calls", "comm/bytes_sent", "comm/time", "comm/time_waiting", "comm/time_exposed", "comm/time_hidden"),
    *("comm/overlap", "comm/straggler", "comm/alive", "comm/epoch_members", "comm/contributed"),
}


def test_names_and_sums(thread_ranks):
    def counted() -> dict[str, float]:
        train(GradientAllReduceAlgorithm(), range(5))
        return bagua_api.metrics()

    for found in thread_ranks(2, counted):
        assert set(found) >= ALWAYS
        assert all(type(value) is float and math.isfinite(value) for value in found.values())
        parts = [found[f"comm/time_{part}"] for part in ("waiting", "exposed", "hidden")]
        assert min(parts) >= 0.0
        assert sum(parts) == pytest.approx(found["comm/time"], rel=1e-6)
        assert found["comm/bytes_sent"] > 5 * 484 * 4  # two ranks send each gradient once, and more at the start
        assert found["comm/alive"] == found["comm/epoch_members"] == 2.0
        assert {name for name in found if "wait_on_rank" in name} <= {"comm/wait_on_rank/0", "comm/wait_on_rank/1"}


def late_ranks(late: int) -> tuple[float, float]:
    tensor = torch.ones(4)
    for _ in range(10):
        if bagua.comm.get_rank() == late:
            time.sleep(0.03)  # Far longer than a busy machine keeps a thread waiting.
        bagua.comm.allreduce(tensor)
    found = bagua_api.metrics()
    return found["comm/straggler"], found.get(f"comm/wait_on_rank/{late}", 0.0)


@pytest.mark.parametrize("late", [0, 2])
def test_the_rank_that_comes_last_is_named_by_those_that_wait(thread_ranks, late):
    outcomes = thread_ranks(3, late_ranks, late)
    del outcomes[late]
    assert [straggler for straggler, _ in outcomes] == [late] * 2
    assert min(waited_s for _, waited_s in outcomes) > 0.02


def waited_in_turn() -> list[tuple[int, ...]]:
    """A collective for which rank 0 waits, and a message with the same number."""
    communicator, tensor = bagua.comm.get_default_group().global_communicator, torch.ones(4)
    before = len(communicator.statistics.recent)
    if communicator.rank == 1:
        until(lambda: communicator.awaited_by() == (0,))
        time.sleep(0.03)  # It has come, and begins to wait.
        communicator.allreduce(tensor)
        communicator.send(tensor, 0)
    else:
        communicator.allreduce(tensor)
        communicator.recv(tensor, 1)
    return [record.waited_for for record in list(communicator.statistics.recent)[before:]]


def test_a_message_is_not_what_a_collective_of_its_number_waited_for(thread_ranks):
    assert thread_ranks(2, waited_in_turn)[0] == [(1,), ()]


SAID = Reading(10.0, {}, 0.0)


@pytest.mark.threads
@pytest.mark.parametrize(
    ("mine", "others", "straggler"),
    [
        (Reading(10.0, {}, 0.0), {}, -1),
        (Reading(10.0, {1: 0.001}, 0.1), {1: SAID, 2: SAID}, -1),  # too little to matter
        (Reading(10.0, {1: 1.0, 2: 1.0}, 3.0), {1: SAID, 2: SAID}, -1),  # two are equally late
        (Reading(10.0, {1: 0.3}, 3.0), {1: SAID._replace(waits={0: 0.2})}, -1),  # now one comes last, now the other
        (Reading(10.0, {1: 1.0}, 3.0), {1: SAID._replace(waits={0: 0.2})}, 1),
        (Reading(10.0, {}, 0.0), {1: SAID._replace(waits={0: 2.0}), 2: SAID._replace(waits={0: 2.0})}, 0),
        # Rank 1 loses its core once, for long. Rank 2 is late by little, and nearly always.
        (Reading(10.0, {1: 1.0, 2: 0.4}, 3.0, {1: 10.0, 2: 90.0}), {1: SAID._replace(lasts={2: 80.0})}, 2),
        (Reading(10.0, {1: 0.5, 2: 0.4}, 3.0, {1: 50.0, 2: 60.0}), {1: SAID, 2: SAID}, -1),  # that is chance
        (Reading(10.0, {1: 0.01, 2: 0.01}, 3.0, {2: 90.0}), {1: SAID, 2: SAID}, -1),  # always, but it does not matter
        # Nobody saw who came when. All leave together, so rank 2, which was inside the shortest, came last.
        (Reading(10.0, {}, 2.0), {1: SAID._replace(collectives_s=2.1), 2: SAID._replace(collectives_s=0.4)}, 2),
        (Reading(10.0, {}, 2.0), {1: SAID._replace(collectives_s=2.001)}, -1),
        (Reading(10.0, {}, 0.4), {1: SAID._replace(collectives_s=2.1)}, 0),
    ],
)
def test_who_is_blamed(mine, others, straggler):
    assert latest_rank({0: mine, **others}) == straggler


@pytest.mark.parametrize("closes", [True, False], ids=["close", "drop"])
def test_what_is_measured_on_a_model_ends_with_it(thread_ranks, closes):
    def measured() -> list[float]:
        models = list(build(GradientAllReduceAlgorithm()))
        train_steps(*models, bagua.comm.get_rank(), range(1))
        models[0]._bagua_engine.reducer.group.gauges["comm/contributed"] = 7.0
        seen = [bagua_api.metrics()["comm/contributed"]]
        if closes:
            models[0].bagua_close()
        models.clear()
        until = time.monotonic() + 20.0  # The groups of a model that is dropped are closed in the background.
        while bagua_api.metrics()["comm/contributed"] == 7.0 and time.monotonic() < until:
            gc.collect()  # It does nothing while another thread collects.
            time.sleep(0.01)
        return [*seen, bagua_api.metrics()["comm/contributed"]]

    assert thread_ranks(2, measured) == [[7.0, 2.0]] * 2


@pytest.mark.threads
def test_members_of_the_epoch_are_counted_and_not_those_of_the_group():
    def island(store) -> dict[str, float]:
        own = torch.distributed.HashStore()
        bagua.comm.init_process_group(backend="threads", store=own, rank=0, world_size=1, timeout=20.0)
        with islands_of_threads.joined(store, 3) as islands:
            model = islands_of_threads.wrapped(islands, "diloco")
            seen = []

            def step(number: int) -> None:
                seen.append(bagua_api.metrics())
                if islands.seat == 2 and number == islands_of_threads.PERIOD + 1:
                    islands_of_threads.vanish(islands)

            islands_of_threads.train(islands, model, 2 * islands_of_threads.PERIOD, step)
            return [seen[islands_of_threads.PERIOD], bagua_api.metrics()]

    ends = islands_of_threads.survivors(islands_of_threads.run(3, island, islands_of_threads.new_store()))
    assert all(end[1]["comm/bytes_between_islands"] > end[0]["comm/bytes_between_islands"] > 0 for end in ends)
    names = ("comm/epoch_members", "comm/contributed")
    assert [[tuple(found[name] for name in names) for found in end] for end in ends] == [[(3, 3), (2, 2)]] * 2


WRITTEN = "step,name,value\n1,comm/calls,5\n"


@pytest.mark.parametrize("cut", ["", "st", WRITTEN, WRITTEN + "2,comm/calls,12"])
@pytest.mark.parametrize("tail_bytes", [4096, 3])
def test_a_file_goes_on_where_it_ended_without_half_a_row_of_a_killed_process(tmp_path, monkeypatch, cut, tail_bytes):
    monkeypatch.setattr(sys.modules[CsvWriter.__module__], "_TAIL_BYTES", tail_bytes)
    path = tmp_path / "metrics.csv"
    path.write_text(cut)
    writer = CsvWriter(path)
    writer.write(3, {"comm/calls": 7, "comm/overlap": 0.5})
    writer.close()
    writer.close()
    kept = ["1,comm/calls,5"] if "calls" in cut else []
    assert path.read_text().splitlines() == ["step,name,value", *kept, "3,comm/calls,7", "3,comm/overlap,0.5"]


@pytest.fixture
def world():
    bagua.comm.init_process_group()
    yield
    bagua.comm.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_lightning_logs_as_often_as_it_does_otherwise():
    lightning = pytest.importorskip("bagua.integrations.lightning", reason="needs the extra lightning")
    logged = []
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append((step, "comm/overlap" in values)))
    strategy = object.__new__(lightning.BaguaStrategy)
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=4, loggers=[logger])
    strategy._lightning_module = SimpleNamespace(trainer=trainer)
    for batch in range(24):
        trainer.global_step = batch // 2  # Gradients are accumulated over two batches.
        strategy.on_train_batch_start(None, batch)
    assert logged == [(4, True), (8, True)]


@pytest.mark.usefixtures("world")
def test_what_a_trainer_reports_has_the_metrics_before_anybody_reports_it(monkeypatch):
    callbacks, trainer = ["reports"], Mock()
    trainer.callback_handler.callbacks, trainer.add_callback = callbacks, callbacks.append
    trainer.accelerator.distributed_type.value = "MULTI_CPU"
    module = SimpleNamespace(Trainer=Mock, TrainerCallback=object)
    monkeypatch.setattr(transformers, "_module_of_transformers", lambda: module)
    transformers.attach(trainer, "bytegrad")
    first, second, _ = callbacks
    assert second == "reports"
    logs, evaluated = {"loss": 0.5}, {"eval_loss": 0.5}
    for reported in (logs, evaluated):
        first.on_log(None, None, None, logs=reported)
    assert "comm/overlap" in logs
    assert evaluated == {"eval_loss": 0.5}
