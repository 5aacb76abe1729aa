"""Checkpoints of the strategy: with every algorithm, of other strategies, and of other numbers of ranks."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua.algorithms import DiLoCoAlgorithm, registry
from bagua.errors import ConfigurationError
from tests.harness import State, assert_close, assert_same_on_all_ranks, snapshot

pl = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")

from bagua.integrations.lightning import BaguaStrategy  # noqa: E402
from tests.integrations import lightning_runs as runs  # noqa: E402
from tests.integrations.one_pair import run_all  # noqa: E402

#: Long after the last job has ended: one of them trains with all algorithms.
DEADLINE_S = 500.0
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(DEADLINE_S + 60)]

#: Those that remember something, with this model: remainders, weights of each rank, that warm-up has ended. The warm-up
#: of others lasts longer.
REMEMBERING = {
    *("qadam", "one_bit_adam", "decentralized", "low_precision_decentralized"),
    *("local_sgd", "slowmo", "diloco", "one_bit_lamb"),
}
#: Whose training is resumed: also one with nothing to remember, and one that averages in the background.
RESUMED = REMEMBERING | {"gradient_allreduce", "async"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(folder):
    return run_all(dict.fromkeys((_stop_and_go_on, _from_elsewhere, _save_in_part), (str(folder),)), DEADLINE_S)


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


def _stop_and_go_on(folder: str) -> dict[str, list[State]]:
    """Of each algorithm: what training ends with; resumed; resumed without what bagua saved."""
    runs.as_lightning_starts_it()
    found = {}
    for name in registry:
        path = f"{folder}/{name}.ckpt"
        found[name] = [runs.fit(f"bagua_{name}", _module(name), callbacks=[SaveOnce(path)], validate=True)]
        if name in RESUMED:
            found[name].append(runs.fit(f"bagua_{name}", _module(name), checkpoint=path))
        if name in REMEMBERING:
            forgetful = _edit(path, f"{path}.{runs.this_rank.get().rank}", lambda checkpoint: checkpoint.pop("bagua"))
            found[name].append(runs.fit(f"bagua_{name}", _module(name), checkpoint=forgetful))
    path, in_flight = f"{folder}/flight.ckpt", DiLoCoAlgorithm(5, overlap=2)  # After the four steps of an epoch.
    found["in flight"] = [runs.fit(BaguaStrategy(in_flight), callbacks=[SaveOnce(path)])]
    found["in flight"].append(runs.fit(BaguaStrategy(in_flight), checkpoint=path))
    return found


def _equal(one: State, other: State) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_every_algorithm_trains_checkpoints_and_resumes(results, folder):
    first, second = results[_stop_and_go_on]
    start = snapshot(runs.Regression())
    for name in registry:
        for (whole, *resumed), (elsewhere, *_) in ((first[name], second[name]), (second[name], first[name])):
            assert not _equal(whole, start), name
            assert _equal(whole, elsewhere), name  # Training ends with one model.
            if resumed:
                assert all(value.isfinite().all() for value in resumed[0].values()), name
            if resumed and not registry.get(name)().in_background:  # What comes of those is not the same twice.
                assert _equal(whole, resumed[0]), name
        if name in REMEMBERING:
            assert not all(_equal(whole, forgetful) for whole, _, forgetful in (first[name], second[name])), name
    assert not _equal(first["decentralized"][0], first["gradient_allreduce"][0])
    assert all(_equal(*of_rank["in flight"]) for of_rank in (first, second))
    saved = torch.load(folder / "flight.ckpt")["bagua"]["ranks"]
    assert all(own["algorithm_state"][f"rank{rank}"]["flights"] for rank, own in enumerate(saved))


def _three_ranks(checkpoint: dict[str, Any]) -> None:
    ranks = checkpoint["bagua"]["ranks"]
    ranks.append(ranks[0])
    for rank in ranks:
        rank["algorithm_state"]["world_size"] = 3


def _from_elsewhere(folder: str) -> dict[str, Any]:
    runs.as_lightning_starts_it()
    mine = f"{folder}/{runs.this_rank.get().rank}"
    Path(mine).mkdir()
    found: dict[str, Any] = {"whole": runs.fit("ddp", callbacks=[SaveOnce(f"{folder}/ddp.ckpt")])}
    found["of ddp"] = runs.fit("bagua", checkpoint=f"{folder}/ddp.ckpt")
    runs.fit("bagua", callbacks=[SaveOnce(f"{folder}/bagua.ckpt")])
    found["to ddp"] = runs.fit("ddp", checkpoint=f"{folder}/bagua.ckpt")
    larger = _edit(f"{folder}/bagua.ckpt", f"{mine}/larger.ckpt", _three_ranks)
    found["of three ranks"] = runs.fit("bagua", checkpoint=larger)
    with pytest.raises(ConfigurationError, match=r"another algorithm.*ByteGrad"):
        runs.fit("bagua_bytegrad", checkpoint=f"{folder}/bagua.ckpt")

    runs.fit("bagua_decentralized", callbacks=[SaveOnce(f"{folder}/gossip.ckpt")])
    larger = _edit(f"{folder}/gossip.ckpt", f"{mine}/larger.ckpt", _three_ranks)
    found["gossip of three ranks"] = runs.fit("bagua_decentralized", checkpoint=larger)
    module, trainer = runs.Regression(), runs.trainer("bagua_decentralized")
    found["evaluated"] = trainer.validate(module, runs.loader(), ckpt_path=larger, verbose=False, weights_only=True)
    found["evaluated weights"] = snapshot(module)

    slim = f"{folder}/slim.ckpt"
    runs.fit("bagua_decentralized", callbacks=[SaveOnce(slim, weights_only=True)])
    found["weights only"] = "bagua" in torch.load(slim)
    return found


def test_checkpoints_of_others(results):
    first, second = results[_from_elsewhere]
    for kind in ("of ddp", "to ddp", "of three ranks"):
        assert_close(first[kind], first["whole"])
        assert_same_on_all_ranks([first[kind], second[kind]])
    # Both go on from the weights of one rank, and training ends with one model.
    assert_same_on_all_ranks([first["gossip of three ranks"], second["gossip of three ranks"]])
    assert first["evaluated"] == second["evaluated"]
    assert_same_on_all_ranks([first["evaluated weights"], second["evaluated weights"]])
    assert not first["weights only"]


class Partial(runs.Regression):
    """Keeps some of its weights out of checkpoints, as those of a large frozen model."""

    strict_loading = False

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        everything = super().state_dict(*arguments, **options)
        return {key: value for key, value in everything.items() if not key.startswith("net.0")}


def _save_in_part(folder: str) -> tuple[State, State]:
    runs.as_lightning_starts_it()
    again, save = Partial(), SaveOnce(f"{folder}/part.ckpt")
    runs.fit("bagua_decentralized", Partial(), callbacks=[save], epochs=1)
    runs.trainer("bagua_decentralized", epochs=1).fit(again, runs.loader(), ckpt_path=save.path)
    return save.weights, {name: parameter.detach().clone() for name, parameter in again.named_parameters()}


def test_a_module_that_saves_a_part_of_itself_resumes(results):
    for trained, resumed in results[_save_in_part]:
        assert torch.equal(trained["net.2.weight"], resumed["net.2.weight"])
        assert not torch.equal(trained["net.0.weight"], resumed["net.0.weight"])
