"""Checkpoints of the strategy: with every algorithm, of other strategies, and of other numbers of ranks."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua.algorithms import DiLoCoAlgorithm, registry
from bagua.errors import ConfigurationError
from tests.harness import State, assert_close, assert_same_on_all_ranks, on_ranks, snapshot

pl = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")

from bagua.integrations.lightning import BaguaStrategy  # noqa: E402
from tests.integrations import lightning_runs as runs  # noqa: E402
from tests.integrations.one_pair import of_all_ranks  # noqa: E402

#: Long after the last job has ended: one of them trains with all algorithms.
DEADLINE_S = 500.0
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(DEADLINE_S + 60)]
BEGIN = runs.as_lightning_starts_it

#: Those that remember something, with this model: remainders, weights of each rank, that warm-up has ended. The warm-up
#: of others lasts longer.
REMEMBERING = {
    *("qadam", "one_bit_adam", "decentralized", "low_precision_decentralized"),
    *("local_sgd", "slowmo", "diloco", "one_bit_lamb"),
}
#: Whose training is resumed: also one with nothing to remember, and one that averages in the background.
RESUMED = REMEMBERING | {"gradient_allreduce", "async"}


class SaveOnce(pl.Callback):
    """Writes a checkpoint at the end of the first epoch."""

    def __init__(self, path: str, weights_only: bool = False) -> None:
        self.path, self.weights_only = path, weights_only

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
            trainer.save_checkpoint(self.path, weights_only=self.weights_only)


def _edit(source: str, target: str, change: Any) -> str:
    """A changed copy of a checkpoint, each rank's own."""
    checkpoint = torch.load(source)
    change(checkpoint)
    torch.save(checkpoint, target)
    return target


def _module(algorithm: str) -> runs.Regression:
    make = registry.get(algorithm).optimizer_class
    if make is None:
        return runs.Regression()
    warmup = {"warmup_steps": 2} if "warmup_steps" in inspect.signature(make).parameters else {}
    return runs.Regression(lambda parameters: make(parameters, lr=0.01, **warmup))


def _equal(one: State, other: State) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@on_ranks(2, assert_same_on_all_ranks, pool="pair")
def test_every_algorithm_trains_checkpoints_and_resumes(tmp_path: Path) -> State:
    """Of each algorithm: what training ends with; resumed; resumed without what bagua saved."""
    ends, (start, _) = {}, of_all_ranks(snapshot(runs.Regression()))
    for name in registry:
        path = f"{tmp_path}/{name}.ckpt"
        whole = ends[name] = runs.fit(f"bagua_{name}", _module(name), callbacks=[SaveOnce(path)], validate=True)
        assert not _equal(whole, start), name
        if name in RESUMED:
            resumed = runs.fit(f"bagua_{name}", _module(name), checkpoint=path)
            assert all(value.isfinite().all() for value in resumed.values()), name
            # What comes of those in the background is not the same twice.
            assert registry.get(name)().in_background or _equal(whole, resumed), name
        if name in REMEMBERING:
            forgetful = _edit(path, f"{path}.{runs.this_rank.get().rank}", lambda checkpoint: checkpoint.pop("bagua"))
            end = runs.fit(f"bagua_{name}", _module(name), checkpoint=forgetful)
            assert not all(of_all_ranks(_equal(whole, end))), name
    assert not _equal(ends["decentralized"], ends["gradient_allreduce"])
    path, in_flight = f"{tmp_path}/flight.ckpt", DiLoCoAlgorithm(5, overlap=2)  # After the four steps of an epoch.
    whole = runs.fit(BaguaStrategy(in_flight), callbacks=[SaveOnce(path)])
    assert _equal(whole, runs.fit(BaguaStrategy(in_flight), checkpoint=path))
    saved = torch.load(path)["bagua"]["ranks"]
    assert all(own["algorithm_state"][f"rank{rank}"]["flights"] for rank, own in enumerate(saved))
    return {f"{key} of {name}": value for name, end in ends.items() for key, value in end.items()}


def _three_ranks(checkpoint: dict[str, Any]) -> None:
    ranks = checkpoint["bagua"]["ranks"]
    ranks.append(ranks[0])
    for rank in ranks:
        rank["algorithm_state"]["world_size"] = 3


@on_ranks(2, pool="pair")
def test_checkpoints_of_others(tmp_path: Path) -> None:
    ddp, own, slim = (f"{tmp_path}/{name}.ckpt" for name in ("ddp", "bagua", "slim"))
    mine = f"{tmp_path}/larger.{runs.this_rank.get().rank}"
    whole = runs.fit("ddp", callbacks=[SaveOnce(ddp)])
    of_ddp = runs.fit("bagua", checkpoint=ddp)
    runs.fit("bagua", callbacks=[SaveOnce(own)])
    ends = of_ddp, runs.fit("ddp", checkpoint=own), runs.fit("bagua", checkpoint=_edit(own, mine, _three_ranks))
    for end in ends:
        assert_close(end, whole)
        assert_same_on_all_ranks(of_all_ranks(end))
    with pytest.raises(ConfigurationError, match=r"another algorithm.*ByteGrad"):
        runs.fit("bagua_bytegrad", checkpoint=own)

    runs.fit("bagua_decentralized", callbacks=[SaveOnce(own)])
    larger = _edit(own, mine, _three_ranks)
    # Both go on from the weights of one rank, and training ends with one model.
    assert_same_on_all_ranks(of_all_ranks(runs.fit("bagua_decentralized", checkpoint=larger)))
    module, trainer = runs.Regression(), runs.trainer("bagua_decentralized")
    evaluated = trainer.validate(module, runs.loader(), ckpt_path=larger, verbose=False, weights_only=True)
    assert of_all_ranks(evaluated) == [evaluated] * 2
    assert_same_on_all_ranks(of_all_ranks(snapshot(module)))

    runs.fit("bagua_decentralized", callbacks=[SaveOnce(slim, weights_only=True)])
    assert "bagua" not in torch.load(slim)


class Partial(runs.Regression):
    """Keeps some of its weights out of checkpoints, as those of a large frozen model."""

    strict_loading = False

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        everything = super().state_dict(*arguments, **options)
        return {key: value for key, value in everything.items() if not key.startswith("net.0")}


@on_ranks(2, pool="pair")
def test_a_module_that_saves_a_part_of_itself_resumes(tmp_path: Path) -> None:
    again, save = Partial(), SaveOnce(f"{tmp_path}/part.ckpt")
    runs.fit("bagua_decentralized", Partial(), callbacks=[save], epochs=1)
    runs.trainer("bagua_decentralized", epochs=1).fit(again, runs.loader(), ckpt_path=save.path)
    trained, resumed = save.weights, dict(again.named_parameters())
    assert torch.equal(trained["net.2.weight"], resumed["net.2.weight"])
    assert not torch.equal(trained["net.0.weight"], resumed["net.0.weight"])
