"""``bagua.watch``: what is seen of plain ``torch.distributed``, and what is said of it."""

import atexit
import contextlib
import dataclasses
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bagua.advise import ModelFacts, ParameterFacts, verdict
from bagua.advise.verdict import RankReport, TorchWatch, predictions, watch
from bagua.cli import watch as command
from bagua.cli.main import main
from bagua.errors import NotInitializedError
from bagua.testing import ProcessRanks, this_rank
from tests.harness import on_ranks

STEPS = 24
SEEN = RankReport("host", 100, 0.010, 0.004, 400_000, 100)
FACTS = ModelFacts((ParameterFacts("weight", (512, 512), "float32", 0.004),), (0.006, 0.006), "SGD")


@pytest.fixture
def pool() -> ProcessRanks:
    return ProcessRanks(2, backend=None)


def meet(place: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=this_rank.get().rank, world_size=2)


def train(place: Path, watched: bool) -> tuple[list[torch.Tensor], RankReport | None, str]:
    """Weights after some steps of torch's DDP over Gloo with a buffer, what this rank saw, and the verdict."""
    meet(place)
    seeing = watch() if watched else None
    verdict._expected = lambda *_: []  # That takes seconds, and has a test of its own.
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(STEPS):
        with model.no_sync() if step % 4 == 3 else contextlib.nullcontext():
            model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen, said = (None, "") if seeing is None else (seeing.seen(), seeing.end())
    weights = [one.detach() for one in model.state_dict().values()]
    del model  # As the last one that has the group, it waits for a thread of Gloo, which waits for Python's lock.
    dist.destroy_process_group()
    return weights, seen, said


@on_ranks(2, pool="pool")
def test_shards_of_fsdp_are_seen(tmp_path: Path) -> None:
    meet(tmp_path / "meeting")
    seeing = watch()
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(8, 8, bias=False), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen, said, rank = seeing.seen(), seeing.end(), dist.get_rank()
    dist.destroy_process_group()
    # A step gathers the halves, and reduces and scatters a gradient.
    assert (seen.calls, seen.nbytes) == (2 * STEPS, STEPS * 4 * (8 * 8 // 2 + 8 * 8))
    assert seen.waiting_s > 0
    assert said == "" if rank else "rank 0 put" in said


@on_ranks(2, pool="pool")
def test_plain_collectives_count_the_input_of_a_rank(tmp_path: Path) -> None:
    """Half of them come after the end of the watch."""
    meet(tmp_path / "meeting")
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
    seeing = TorchWatch()
    for _ in range(2):
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
        gather(torch.ones(6), torch.ones(3))
        dist.all_to_all_single(torch.ones(4), torch.ones(4))
        dist.broadcast(torch.ones(5, dtype=torch.float64), 0)
        dist.barrier()
        seeing.calls.end()
    dist.destroy_process_group()
    assert (seeing.calls.calls, seeing.calls.input_bytes) == (7, 4 * (10 + 10 + 3 + 3 + 4) + 8 * 5)


def test_bytes_are_exact_and_results_are_those_of_torch(pool: ProcessRanks, tmp_path: Path) -> None:
    alone, seeing = (pool.run(train, tmp_path / str(watched), watched) for watched in (False, True))
    for (before, _, _), (after, _, _) in zip(alone, seeing, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    # Three steps of four exchange gradients. DDP sends its buffers before each pass but those that follow the fourth,
    # and all that it holds at first.
    gradients, buffers = 4 * (8 * 8 + 8 + 8 + 8), 4 * 8 + 4 * 8 + 8
    nbytes = (STEPS * 3 // 4 + 1) * gradients + (STEPS - STEPS // 4 + 2) * buffers
    for _, seen, _ in seeing:
        assert (seen.steps, seen.nbytes) == (STEPS - 3, nbytes)
        assert 0 < seen.waiting_s <= seen.step_s
    assert "rank 0 put" in seeing[0][2]
    assert seeing[1][2] == ""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(atexit, "register", lambda _: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if TorchWatch.now is not None:
        TorchWatch.now.calls.end()
    TorchWatch.now = None
    dist.destroy_process_group()


def test_a_watch_before_there_is_a_group_is_refused() -> None:
    with pytest.raises(NotInitializedError, match=r"call init_process_group before bagua.watch\(\)"):
        watch()


@pytest.mark.usefixtures("alone")
def test_a_second_watch_is_the_first(caplog: pytest.LogCaptureFixture) -> None:
    first = watch()
    with caplog.at_level(logging.WARNING, logger="bagua"):
        assert watch() is first
    assert "watches this process already" in caplog.text


@pytest.mark.usefixtures("alone")
def test_who_communicates_nothing_hears_one_sentence_and_gets_torch_back() -> None:
    before = dist.ProcessGroup.allreduce
    seeing = watch()
    assert dist.ProcessGroup.allreduce is not before
    said = seeing.end()
    assert said == seeing.end()
    assert said.startswith("bagua watch: no call of torch.distributed was seen")
    assert said.count("\n") == 1
    assert dist.ProcessGroup.allreduce is before


def test_a_network_that_is_no_bottleneck_comes_first_and_nothing_is_recommended() -> None:
    said = verdict.verdict({0: dataclasses.replace(SEEN, waiting_s=0.0002)}, 1, FACTS)
    assert said.startswith("bagua watch: The network is not the bottleneck: 2% of a step")
    assert "Try" not in said


def test_who_waits_least_is_late_and_its_wait_is_the_network_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "_expected", lambda *_: [])
    said = verdict.verdict({0: SEEN, 1: dataclasses.replace(SEEN, waiting_s=0.001), 2: SEEN}, 4, FACTS)
    assert "10% of a step waits for the network" in said
    assert "Rank 1 is late: the others wait 3.0 ms for it" in said
    assert "Only 3 of 4 ranks" in said
    assert "late" not in verdict.verdict({0: SEEN, 1: SEEN}, 2, FACTS)


def test_few_steps_and_other_models_are_said() -> None:
    assert "too few steps" in verdict.verdict({0: dataclasses.replace(SEEN, steps=0)}, 1, None)
    assert "Predictions need a model in DistributedDataParallel" in verdict.verdict({0: SEEN, 1: SEEN}, 2, None)


def test_algorithms_are_expected_on_the_link_on_which_ddp_takes_as_long() -> None:
    cluster = verdict._cluster({0: SEEN, 1: dataclasses.replace(SEEN, host="other")}, 2)
    lines = verdict._expected(dataclasses.replace(FACTS, steps_s=(0.010, 0.010)), cluster, 0.040, 0.004)
    # A MB takes at least 34 ms: 245 Mbit/s, a little more for calls.
    rate = int(lines[0].removeprefix("As fast as a link of ").partition(" ")[0])
    assert 240 < rate < 330
    assert any(line.startswith("local_sgd (sync_every=8, codec='") and "loss depends" in line for line in lines)
    assert lines[-1].startswith("Try: model = bagua.with_bagua(model, [optimizer], ")
    assert len(lines) <= 4
    assert predictions(FACTS, verdict._cluster({0: SEEN}, 1), 0.040)[0].startswith("No prediction: one rank")


def test_hosts_and_delays_are_found_out() -> None:
    far = {rank: dataclasses.replace(SEEN, host=f"h{rank // 2}", way_s=0.02 * (rank > 1)) for rank in range(4)}
    cluster = verdict._cluster(far, 4)
    assert (cluster.hosts, cluster.ranks_per_host, cluster.delay_s, cluster.shared) == (2, 2, 0.02, False)
    near = verdict._cluster({0: SEEN, 1: SEEN}, 2)
    assert (near.hosts, near.delay_s, near.shared) == (2, 0.0, True)


def test_a_script_is_watched_without_a_change(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customized')")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "sys.path = [one for one in sys.path if 'watch' not in one]\n"
        "from torch.distributed import init_process_group\n"
        "init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(10))\nraise KeyboardInterrupt\n"
    )
    folder = {"PYTHONPATH": f"{tmp_path}:{Path(command.__file__).parents[2]}"}
    words = [sys.executable, "-m", "bagua", "watch", "--", str(script)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, env=folder)
    assert "bagua watch: 1 calls, 0.00 MB; too few steps" in ended.stderr
    assert "customized" in ended.stdout
    assert ended.returncode == 130
    capfd.readouterr()


def test_a_command_that_watches_nothing_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--", sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert "no process called init_process_group" in capfd.readouterr().err
    assert main(["watch", str(tmp_path / "no-such-command")]) == 1
    assert "no-such-command" in capfd.readouterr().err
