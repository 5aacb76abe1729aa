"""A run that ends with weights that differ between ranks says so, once, with its steps and its period."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import subprocess
import time

import pytest
import torch

import bagua.comm
from bagua.algorithms import (
    Algorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    Every,
    Exchange,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LocalUpdates,
    Mean,
    Replace,
    Weights,
    around,
    registry,
)
from bagua.parallel.decentralized import DecentralizedDataParallel
from tests.harness import loss_of, mlp
from tests.launching import PATIENCE_S, REPOSITORY, launched
from tests.parallel.wrapping import Loop

NOTHING = "trained 4 steps and exchanged nothing: "
OF_DILOCO = f"{NOTHING}diloco exchanges every 100 steps (sync_every). Set sync_every, or call model.bagua_finish()."
DIFFER = "trained 4 steps, and ranks end with different weights: "


def tell(algorithm: Algorithm, tale: str) -> None:
    """What a rank does with a model, in words: numbers of steps, and actions."""
    loop, kept = Loop("with_bagua", algorithm=algorithm), []

    def evaluate() -> None:
        with loop.wrapped.bagua_global_average():
            loop.wrapped.state_dict()

    def switch() -> None:
        loop.switch_to(Algorithm.init("gradient_allreduce"))

    def keep() -> None:
        bagua.comm.get_default_group()._model = loop.wrapped

    def fail() -> None:
        with contextlib.suppress(KeyboardInterrupt), loop.wrapped.bagua_closing():
            raise KeyboardInterrupt

    for word in tale.split():
        if word == "resume":
            kept.append(loop)
            loop = Loop("with_bagua", algorithm=algorithm)
            loop.wrapped.bagua_load_state_dict(kept[0].wrapped.bagua_state_dict())
        elif word.isdigit():
            loop.train(int(word))
        else:
            {
                "save": loop.wrapped.bagua_state_dict,
                "finish": loop.wrapped.bagua_finish,
                "close": loop.wrapped.bagua_close,
                "switch": switch,
                "keep": keep,
                "evaluate": evaluate,
                "fail": fail,
            }[word]()


def mix(*_: object) -> None:
    """Its engine is that of a wrapper with optimizers of its own."""
    wrapped = DecentralizedDataParallel(mlp(), lambda named: torch.optim.SGD([one for _, one in named], lr=0.1))
    for step in range(4):
        loss_of(wrapped, bagua.comm.get_rank(), step).backward()
    wrapped.bagua_close()


SILENT = DiLoCoAlgorithm(100)
#: What is done, with what, and how that begins what is told. A model that is not closed is dropped in the end, and
#: another thread closes it then; one that is kept is there when its group is closed.
TALES: list[tuple[str, Algorithm, str]] = [
    ("4 close", SILENT, OF_DILOCO),
    ("4 save close", SILENT, OF_DILOCO),
    ("4", SILENT, OF_DILOCO),
    ("4 keep", SILENT, OF_DILOCO),
    ("4 finish close", SILENT, ""),
    ("4 evaluate close", SILENT, ""),
    ("3 finish 1 close", SILENT, OF_DILOCO),
    ("4 switch close", SILENT, ""),
    ("close", SILENT, ""),
    ("4 fail", SILENT, ""),
    ("3 finish resume 1 close", SILENT, OF_DILOCO),
    ("3 finish resume close", SILENT, ""),
    ("4 close", DiLoCoAlgorithm(4), ""),
    ("4 close", DiLoCoAlgorithm(8, fragments=2), f"{DIFFER}diloco"),
    ("4 close", DiLoCoAlgorithm(5, overlap=1), f"{DIFFER}diloco"),
    ("4 close", LocalSGDAlgorithm(5), f"{NOTHING}local_sgd exchanges every 5 steps (sync_every)"),
    ("4 close", LocalSGDAlgorithm(4), ""),
    ("4 close", LocalSGDAlgorithm(3), f"{DIFFER}local_sgd"),
    ("4 save finish", LocalSGDAlgorithm(3), ""),
    ("4 close", LocalSGDAlgorithm(5, start_after=4), ""),
    ("4 close", LocalSGDAlgorithm(5, start_after=2), NOTHING),
    ("4 close", LocalSGDAlgorithm(2, start_after=2), ""),
    ("4 close", GradientAllReduceAlgorithm(), ""),
    ("4 close", DecentralizedAlgorithm(), f"{DIFFER}decentralized"),
    ("4 close", DecentralizedAlgorithm(communication_interval=9), f"{DIFFER}decentralized"),
    ("4 close", around("gradient_allreduce", Exchange(Weights(), Every(8), Mean(), Replace())), ""),
    ("4 close", around(LocalSGDAlgorithm(9)), f"{NOTHING}local_sgd exchanges every 9 steps (sync_every)"),
    ("mixed", SILENT, DIFFER),
]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("trained ")]


@pytest.mark.parametrize(("tale", "algorithm", "expected"), TALES, ids=map(str, range(len(TALES))))
def test_a_run_that_ends_apart_says_so_once(thread_ranks, tale, algorithm, expected, caplog):
    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, mix if tale == "mixed" else tell, algorithm, tale)
        until = time.monotonic() + 20
        while len(told(caplog)) < bool(expected) and time.monotonic() < until:  # Another thread may close it.
            gc.collect()
            time.sleep(0.01)
    assert [one[: len(expected)] for one in told(caplog)] == [expected] * bool(expected)


def test_one_rank_says_nothing(thread_ranks, caplog):
    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(1, tell, SILENT, "4 close")
    assert told(caplog) == []


def test_the_page_names_the_period_of_each_algorithm():
    page = (REPOSITORY / "docs" / "algorithms.md").read_text()
    named = {name: steps for steps, name in re.findall(r"(\d+)\ssteps\s\(`(\w+)`", page)}
    kinds = {name: registry.get(name) for name in registry}
    assert named == {name: str(kind().sync_every) for name, kind in kinds.items() if issubclass(kind, LocalUpdates)}


# Processes end by themselves, with or without destroy_process_group, whatever is still alive.

SCRIPT = """
import sys
import torch
import bagua.torch_api as bagua

bagua.init_process_group()

def main():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    model = bagua.with_bagua(layer, [optimizer], "diloco")
    for step in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if sys.argv[1] == "fails":
        raise ValueError("a mistake of the user")
    return model

if sys.argv[1] == "drops":
    main()
else:
    kept = main()
print("trained", flush=True)
if sys.argv[1] == "exits":
    raise SystemExit(3)
if sys.argv[1] == "destroys":
    bagua.destroy_process_group()
"""


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ways", "statuses"),
    [
        (("keeps", "destroys"), [0, 0]),
        (("drops", "drops"), [0, 0]),
        (("fails", "fails"), [1, 1]),
        (("exits", "keeps"), [3, 0]),
    ],
    ids=str,
)
def test_a_process_that_ends_without_closing_says_so_and_ends_with_its_own_status(ways, statuses):
    with launched(2, "-c", SCRIPT, each=ways, stderr=subprocess.PIPE) as ranks:
        results = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    fails = ways[0] == "fails"
    errors = [one for _, one in results]
    assert [rank.returncode for rank in ranks] == statuses, errors
    assert [output for output, _ in results] == ["" if fails else "trained\n"] * 2
    assert [one.count("exchanged nothing") for one in errors] == [int(not fails), 0], errors
