"""The strategy, with the real Trainer on two processes. Lightning takes seconds to import: all tests have one pair."""

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, AsyncModelAverageAlgorithm, GradientAllReduceAlgorithm, registry
from bagua.errors import ConfigurationError, UnsupportedAlgorithmException
from bagua.parallel import with_bagua
from tests.harness import State, assert_close, assert_same_on_all_ranks, on_ranks, snapshot

pl = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")

from lightning.fabric import Fabric  # noqa: E402

from bagua.integrations.lightning import BaguaStrategy  # noqa: E402
from tests.integrations import lightning_runs as runs  # noqa: E402
from tests.integrations.one_pair import of_all_ranks  # noqa: E402

pytestmark = pytest.mark.gloo
BEGIN = runs.as_lightning_starts_it

STEPS_PER_EPOCH = runs.SAMPLES // runs.BATCH // 2


def _allreduces() -> int:
    """How many, so far, in all communicators of this rank."""
    return sum(found.calls for kind, found in bagua.comm.stats().items() if kind == "allreduce")


@on_ranks(2, assert_same_on_all_ranks, pool="pair")
def test_training_equals_ddp() -> State:
    unused = ("ddp_find_unused_parameters_true", {"find_unused_parameters": True})
    plain = ("ddp", {})
    cases: dict[str, tuple[Any, tuple[str, dict[str, Any]], dict[str, Any]]] = {
        "regression": (runs.Regression, plain, {}),
        "Lightning's example": (runs.Boring, plain, {"num_sanity_val_steps": 2}),
        "the demo's language model": (runs.LanguageModel, plain, {}),
        "accumulated": (runs.Regression, plain, {"accumulate_grad_batches": 2}),
        "accumulated by hand": (runs.ByHand, plain, {}),
        "adversaries": (runs.Adversaries, unused, {}),
        "adversaries, by name": (runs.Adversaries, unused, {"by_name": True}),
        "clipped": (runs.Regression, plain, {"gradient_clip_val": 0.1}),
        "bfloat16, mixed": (runs.Regression, plain, {"precision": "bf16-mixed"}),
        "bfloat16": (runs.Regression, plain, {"precision": "bf16-true"}),
        "normalized": (lambda: runs.Regression(normalized=True), plain, {}),
    }
    ends, calls = {}, {}
    for name, (make, (peer, engine_options), options) in cases.items():
        by_name = options.pop("by_name", False)
        expected = runs.fit(peer, make(), **options)
        before = _allreduces()
        ours = BaguaStrategy(GradientAllReduceAlgorithm(), **engine_options)
        ends[name] = runs.fit("bagua_find_unused_parameters_true" if by_name else ours, make(), **options)
        calls[name] = _allreduces() - before
        assert_close(ends[name], expected)
    different = ("regression", "accumulated", "clipped", "bfloat16, mixed")
    assert len({float(ends[name]["net.0.weight"].sum()) for name in different}) == len(different)
    # All parameters are in one bucket. Some calls more are Lightning's own, and as many in all runs.
    around = calls["regression"] - 2 * STEPS_PER_EPOCH
    assert 0 <= around <= 4
    assert calls["accumulated"] == calls["accumulated by hand"] == around + STEPS_PER_EPOCH
    del ends["normalized"]  # Running statistics are a rank's own until the next forward pass.
    return {f"{key} of {name}": value for name, end in ends.items() for key, value in end.items()}


class Gathering(runs.Regression):
    """Collects something of all ranks when validation ends."""

    def on_validation_epoch_end(self) -> None:
        self.gathered = self.all_gather(torch.tensor([float(self.global_rank)]))


@on_ranks(2, pool="pair")
def test_validation_test_and_prediction() -> None:
    module, trainer = Gathering(), runs.trainer("bagua_bytegrad", 1, num_sanity_val_steps=0)
    trainer.fit(module, runs.loader(), runs.loader())
    metric, (seen, others) = float(trainer.callback_metrics["loss"]), of_all_ranks(module.seen)
    assert seen != others
    assert metric == pytest.approx(sum(seen + others) / (2 * len(seen)), rel=1e-5)
    stats = bagua.comm.get_default_group().global_communicator.stats
    before = stats()["allreduce"].calls
    evaluated = trainer.validate(module, runs.loader(), verbose=False)
    evaluated += trainer.test(module, runs.loader(), verbose=False)
    assert stats()["allreduce"].calls >= before + 4, "two metrics and the sizes of their batches"
    assert of_all_ranks(evaluated) == [evaluated] * 2
    assert evaluated[0]["loss"] == pytest.approx(metric, rel=1e-5), "the same weights on the same data"
    assert sum(len(part) for part in trainer.predict(module, runs.loader())) == runs.SAMPLES // 2
    assert module.gathered.flatten().tolist() == [0.0, 1.0]
    assert type(module) is Gathering
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


class Watch(pl.Callback):
    """Notes how averaging goes, and the weights, while the Trainer evaluates and while it trains."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, float]] = []

    def _note(self, where: str, trainer: pl.Trainer, module: runs.Regression, *_: Any) -> None:
        state = "paused" if trainer.model.bagua_algorithm._paused else "averaging"
        self.seen.append((where, state, float(module.net[0].weight.detach().double().sum())))

    on_train_batch_end = functools.partialmethod(_note, "training")
    on_validation_batch_start = functools.partialmethod(_note, "validation")


@on_ranks(2, assert_same_on_all_ranks, pool="pair")
def test_averages_in_the_background_rest_during_validation_and_end_with_training() -> State:
    watch = Watch()
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=2)
    weights = runs.fit(
        BaguaStrategy(algorithm), validate=True, callbacks=[watch], num_sanity_val_steps=1, val_check_interval=2
    )
    states = {(where, state) for where, state, _ in watch.seen}
    assert ("training", "averaging") in states
    assert {state for where, state in states if where == "validation"} == {"paused"}
    of_ranks = of_all_ranks(watch.seen)
    validated = [[value for where, _, value in seen if where == "validation"] for seen in of_ranks]
    assert validated[0][1:] == validated[1][1:], "after the sanity check, ranks validate equal weights"
    assert len(set(validated[0][1:])) > 1
    trained = [[value for where, _, value in seen if where == "training"] for seen in of_ranks]
    assert trained[0] != trained[1], "between averages, ranks go their own ways"
    return weights


def _of_two_optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
    halves = list(parameters)
    return [torch.optim.SGD(halves[:2], lr=0.1), torch.optim.SGD(halves[2:], lr=0.1)]


@on_ranks(2, pool="pair")
def test_what_an_algorithm_cannot_use_and_another_transport_than_there_is_are_refused() -> None:
    for name in ("low_precision_decentralized", "qadam"):
        with pytest.raises(ConfigurationError, match=r"one optimizer.*2 optimizers"):
            runs.fit(f"bagua_{name}", runs.ByHand(_of_two_optimizers))
    with pytest.raises(ConfigurationError, match="QAdamOptimizer"):
        runs.fit("bagua_qadam")
    with pytest.raises(ConfigurationError, match=r"backend, expected gloo, seen shm"):
        runs.fit(BaguaStrategy(backend="shm"))
    runs.fit(BaguaStrategy(backend="gloo"), epochs=1)


@on_ranks(2, pool="pair")
def test_fabric_trains_a_wrapped_model_as_it_is_trained_without() -> None:
    for algorithm in (GradientAllReduceAlgorithm(), Algorithm.init("local_sgd", sync_every=2)):
        states = []
        for inside in (True, False):
            torch.manual_seed(bagua.comm.get_rank())
            module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
            model: Any = with_bagua(module, optimizer, algorithm)
            fabric = Fabric(accelerator="cpu", devices=1)
            if inside:
                model, optimizer = fabric.setup(model, optimizer)
            for step in range(4):
                random = torch.Generator().manual_seed(100 * step + bagua.comm.get_rank())
                inputs = torch.randn(8, 4, generator=random)
                loss = nn.functional.mse_loss(model(inputs), inputs[:, :1])
                fabric.backward(loss) if inside else loss.backward()
                if inside:
                    fabric.clip_gradients(model, optimizer, max_norm=1.0)
                else:
                    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            states.append(snapshot(module))
        assert_same_on_all_ranks([*states, *of_all_ranks(states[0])])


@pytest.mark.filterwarnings("ignore:The .srun. command is available")  # Lightning says so where Slurm is installed.
def test_unknown_algorithms_are_answered_with_those_that_exist():
    for wrong in (lambda: BaguaStrategy("bogus"), lambda: runs.trainer("bagua_bogus")):
        with pytest.raises(UnsupportedAlgorithmException, match="bogus") as refused:
            wrong()
        assert all(name in str(refused.value) for name in registry)
    for name in registry:
        assert type(runs.trainer(f"bagua_{name}").strategy) is BaguaStrategy
    with pytest.raises(ValueError, match="invalid strategy name"):
        runs.trainer("bogus")


@pytest.mark.parametrize("option", ["static_graph", "ddp_comm_hook", "model_averaging_period"])
def test_options_for_torchs_ddp_are_refused(option):
    with pytest.raises(TypeError, match=rf"{option}.*bucket_bytes"):
        BaguaStrategy(**{option: None})


def test_a_missing_package_is_named_with_the_extra_that_installs_it(monkeypatch):
    for name in ("lightning", "pytorch_lightning"):
        for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "bagua.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'bagua-torch\[lightning\]'"):
        __import__("bagua.integrations.lightning")


@pytest.mark.parametrize(("algorithm", "wanted"), [("gradient_allreduce", True), ("diloco", False), ("async", False)])
def test_buffers_meet_before_each_forward_pass_only_where_weights_do(algorithm, wanted):
    assert BaguaStrategy(algorithm)._engine_options["forward_sync_buffers"] is wanted
    assert BaguaStrategy(algorithm, forward_sync_buffers=True)._engine_options["forward_sync_buffers"] is True
