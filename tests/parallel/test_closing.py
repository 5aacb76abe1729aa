"""Models that are closed, or dropped, give everything back; a run that ends with weights that differ says so."""

import contextlib
import copy
import gc
import logging
import math
import os
import re
import subprocess
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, Every, Exchange, LocalUpdates, Mean, Replace, Weights, around, registry
from bagua.comm.lifetime.background import _Closer, _closer
from bagua.errors import PeerLostError
from bagua.parallel import ModelSwitchWrapper, with_bagua
from bagua.parallel.decentralized import DecentralizedDataParallel
from bagua.parallel.wrappers import OverlappingWrapper
from tests.contract.algorithms import optimizer_maker
from tests.harness import State, assert_same_on_all_ranks, loss_of, mlp, seeded, snapshot, until
from tests.launching import PATIENCE_S, REPOSITORY, launched
from tests.parallel import test_decentralized as decentralized
from tests.parallel.wrapping import WRAPS, Loop, on_ranks

LIMIT_S = 20.0
#: A rank connects once to say that it is alive, when it says so first.
BEATS = 1


def held() -> dict[str, float]:
    """What this process holds."""
    mappings = Path("/proc/self/maps").read_text().count("memfd:bagua")
    threads = sum(thread.name != "bagua-closer" for thread in threading.enumerate())
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threads, "mappings": mappings}


def held_at_rest(allowed: dict[str, float]) -> dict[str, float]:
    """What this process holds when all dropped models were closed."""

    def rests() -> bool:
        gc.collect()
        within = all(number <= allowed[what] for what, number in held().items())
        return within and not bagua.comm.get_default_group()._descendants

    with contextlib.suppress(AssertionError):
        until(rests, LIMIT_S)
    return held()


def collect(garbage: weakref.ref[Any]) -> None:
    """Collect garbage until that is gone: ``gc.collect`` does nothing while another thread is at it."""
    until(lambda: gc.collect() >= 0 and garbage() is None)


def wide_model() -> nn.Module:
    """Its buckets are large enough for memory that peers map; it has buffers."""
    with seeded():
        return nn.Sequential(nn.Linear(8, 128), nn.BatchNorm1d(128), nn.Linear(128, 128), nn.Linear(128, 4))


KINDS = ("data_parallel", "gradient_allreduce", "bytegrad", "low_precision_decentralized", "neighbours")


def wrap_and_drop(kind: str) -> torch.optim.Optimizer:
    """Two steps of a model that is garbage afterwards. The optimizer is kept a little longer."""

    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        if kind == "neighbours":
            return DecentralizedDataParallel(model, decentralized.momentum)
        return with_bagua(model, [optimizer], kind)

    loop = Loop(kind if kind in WRAPS else wrap, wide_model)
    loop.train(2)
    return loop.optimizer


def wrap_and_drop_many(models: int, kinds: tuple[str, ...], rest_after: int) -> tuple[dict[str, float], ...]:
    """What this process may hold afterwards, and what it does."""
    for kind in kinds:
        wrap_and_drop(kind)
    bagua.comm.barrier()
    allowed = held_at_rest(defaultdict(lambda: math.inf))
    allowed["descriptors"] += BEATS
    bagua.comm.barrier()
    kept: list[torch.optim.Optimizer] = []
    for number in range(models):
        kept = [*kept[-3:], wrap_and_drop(kinds[number % len(kinds)])]
        if number % rest_after == 0:
            held_at_rest(allowed)
            bagua.comm.barrier()
    del kept
    after = held_at_rest(allowed)
    bagua.comm.barrier()  # Where ranks are threads, they count each other's.
    return allowed, after


@pytest.mark.parametrize("case", [(15, KINDS, 1000), (4, ("async",), 1)], ids=["of every kind", "that were averaged"])
def test_dropped_models_leave_nothing_behind(ranks, case):
    for allowed, after in ranks(2, wrap_and_drop_many, *case, deadline_s=120.0):
        for what, number in after.items():
            assert number <= allowed[what], what


#: Set when rank 0 has dropped its model: one for all ranks of a test.
dropped = pytest.fixture(lambda: threading.Event())  # noqa: PLW0108 - a class is no fixture


@on_ranks(2)
def test_a_slower_rank_gets_what_a_dropped_model_has_on_its_way(dropped):
    """With a lag, the last exchange of a rank is under way when it drops its model."""
    model = decentralized.wrap()
    decentralized.train(model, range(3))
    if bagua.comm.get_rank() == 0:
        reducer = weakref.ref(model.reducer)
        del model
        collect(reducer)
        dropped.set()
        return
    assert dropped.wait(LIMIT_S)
    decentralized.train(model, [3])  # It mixes with what the other rank had sent before.
    with pytest.raises(PeerLostError, match="lost rank 0"):
        decentralized.train(model, [4, 5])


@pytest.mark.parametrize("end", ["destroy", "drop"])
@on_ranks(2)
def test_the_end_waits_for_a_rank_that_has_yet_to_come_to_the_last_step(dropped, end):
    rank, model = bagua.comm.get_rank(), decentralized.wrap()
    decentralized.train(model, range(2))
    if rank == 1:
        assert dropped.wait(LIMIT_S)
    decentralized.train(model, [2])
    if rank == 0:
        reducer = weakref.ref(model.reducer)
        del model
        collect(reducer)
        dropped.set()
        if end == "destroy":
            bagua.comm.destroy_process_group()
    else:
        model.reducer.scheduler.settle()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@on_ranks(2)
def test_a_model_that_failed_can_be_dropped_like_any_other(algorithm):
    """The error knows the frames of the loop that it came through, and these know the model."""

    def raise_memory_error(gradient: torch.Tensor) -> None:
        raise MemoryError

    def fail() -> weakref.ref[Any]:
        loop = Loop("with_bagua", algorithm=algorithm)
        loop.backward()
        if loop.rank == 0:
            loop.model[0].weight.register_hook(raise_memory_error)
        with pytest.raises((MemoryError, PeerLostError)):
            loop.backward()
        return weakref.ref(loop.reducer)

    collect(fail())
    until(lambda: not bagua.comm.get_default_group()._descendants)


class Owner:
    """Nothing but a lifetime."""


def watched(closer: _Closer, **idle: Any) -> tuple[Owner, Mock, Callable[[], None], threading.Thread]:
    """An owner, what belongs to it, what has this closed soon, and the thread that does so."""
    owner, belonging = Owner(), Mock(idle=Mock(**idle))
    return owner, belonging, closer.watch(owner, belonging), closer._thread


def test_the_thread_that_closes_ends_with_the_last_owner():
    closer = _Closer()
    (owner, first, soon, thread), (other, second, *_) = (watched(closer, return_value=False) for _ in range(2))
    soon()
    del owner
    first.idle.return_value = True
    until(lambda: first.close.called, LIMIT_S)
    assert thread.is_alive()
    del other
    assert thread.is_alive()
    assert not second.close.called
    second.idle.return_value = True
    thread.join(LIMIT_S)
    assert (thread.is_alive(), second.close.called) == (False, True)


def test_what_cannot_be_looked_at_is_closed_all_the_same(caplog):
    owner, belonging, _, thread = watched(_Closer(), side_effect=AttributeError)
    del owner
    thread.join(LIMIT_S)
    assert belonging.close.called
    assert "AttributeError" in caplog.text


def test_a_forked_child_closes_nothing_of_its_parent():
    closer = _Closer()
    of_parent, parents, soon, before = watched(closer)
    wake = closer._wake
    closer.disown()  # As after a fork, but for the thread, which is still there: it must end.
    closer._stopping = True
    wake.set()
    closer._wake.set()  # At which a thread looks that has only begun.
    before.join(LIMIT_S)
    closer._stopping = False
    of_child, childs, _, thread = watched(closer)
    soon()
    del of_parent, of_child
    thread.join(LIMIT_S)
    assert thread is not before
    assert (childs.close.called, parents.close.called) == (True, False)


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_a_model_may_be_closed_between_forward_and_backward(size):
    loop = Loop("with_bagua", find_unused_parameters=True)
    loop.train(2)
    loss = loop.loss()
    loop.wrapped.bagua_close()
    loss.backward()
    averaging = decentralized.wrap()
    decentralized.train(averaging, range(2))
    loss, before = loss_of(averaging, loop.rank, 2), snapshot(averaging)
    averaging.bagua_close()
    loss.backward()
    assert_same_on_all_ranks([before, snapshot(averaging)])  # Who steps it now is up to the caller.
    assert len(averaging.bagua_optimizers) == len(averaging.bagua_buckets)
    averaging.bagua_state_dict()


@on_ranks(2)
def test_a_finalizer_takes_no_lock():
    """It may run between any two instructions, also where its own thread holds one."""
    loop = Loop("data_parallel")
    loop.train(2)
    group = loop.wrapped.reducer.group
    parent = bagua.comm.get_default_group()
    with _closer._guard, parent._closing, group._closing, group.recorder._writing, group._made[0].pipeline.in_use:
        reducer = weakref.ref(loop.wrapped.reducer)
        del loop
        collect(reducer)
        assert not group.closed
    until(lambda: not parent._descendants)


@pytest.mark.parametrize("wrap", [*WRAPS, "overlapping"])
@on_ranks(2)
def test_a_closed_model_trains_on_alone(wrap):
    """Like a plain one, on each rank with its own data, and with buffers of its own."""
    loop = Loop(OverlappingWrapper if wrap == "overlapping" else wrap, wide_model)
    plain = Loop(lambda model, _: model, wide_model)
    loop.train(3)
    for _ in range(2):
        loop.wrapped.bagua_close()
    loop.wrapped.state_dict()
    with loop.wrapped.no_sync():
        loop.backward()
    plain.model.load_state_dict(loop.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    loop.step = plain.step = 3
    assert_same_on_all_ranks([plain.train(3), loop.train(3)])
    assert not bagua.comm.get_default_group()._descendants


@pytest.mark.parametrize("name", sorted(set(registry)))
@on_ranks(2, assert_same_on_all_ranks)
def test_every_algorithm_can_be_closed_and_begun_anew(name) -> State:
    """Wrapping a closed model is a first time: it starts from rank 0, not from the mean."""
    algorithm = registry.get(name)()
    loop = Loop("with_bagua", mlp, optimizer_maker(algorithm), algorithm=algorithm)
    with loop.model.bagua_closing():
        loop.train(3)
    alone = loop.train(2)
    with_bagua(loop.model, [loop.optimizer], algorithm)
    if loop.rank == 0:
        assert_same_on_all_ranks([alone, snapshot(loop.model)])
    return snapshot(loop.model)


@on_ranks(2, assert_same_on_all_ranks)
def test_a_switch_wrapper_is_closed_and_given_an_algorithm_again() -> State:
    loop = Loop(ModelSwitchWrapper)
    loop.wrapped.bagua_close()  # There is nothing to close yet.
    with loop.wrapped.switch_to("allreduce").bagua_closing():
        loop.train(2)
    alone = loop.train(2)
    loop.wrapped.switch_to("allreduce")
    return alone if loop.rank == 0 else snapshot(loop.model)


@on_ranks(2)
def test_an_error_in_the_block_closes_the_model_and_tells_the_others():
    loop = Loop("with_bagua")
    with pytest.raises(PeerLostError if loop.rank else MemoryError), loop.wrapped.bagua_closing():
        loop.train(2)
        if loop.rank == 0:
            raise MemoryError
        loop.train(2)
    loop.train(2)


def test_a_model_whose_group_is_closed_first_keeps_no_thread(thread_ranks):
    def lanes() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "/model" in thread.name]

    before = lanes()
    thread_ranks(2, wrap_and_drop, "bytegrad")
    until(lambda: gc.collect() >= 0 and len(lanes()) <= len(before))


# A run that ends with weights that differ between ranks says so, once, with its steps and its period.

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
        loop.switch_to("gradient_allreduce")

    def keep() -> None:
        bagua.comm.get_default_group()._model = loop.wrapped

    def fail() -> None:
        with contextlib.suppress(KeyboardInterrupt), loop.wrapped.bagua_closing():
            raise KeyboardInterrupt

    actions = {action.__name__: action for action in (evaluate, switch, keep, fail)}
    for word in tale.split():
        if word == "resume":
            kept.append(loop)
            loop = Loop("with_bagua", algorithm=algorithm)
            loop.wrapped.bagua_load_state_dict(kept[0].wrapped.bagua_state_dict())
        elif word.isdigit():
            loop.train(int(word))
        elif word in actions:
            actions[word]()
        else:
            getattr(loop.wrapped, f"bagua_{word}")()


def mix(*_: object) -> None:
    """Its engine is that of a wrapper with optimizers of its own."""
    wrapped = decentralized.wrap()
    decentralized.train(wrapped, range(4))
    wrapped.bagua_close()


diloco, local_sgd = registry.get("diloco"), registry.get("local_sgd")
SILENT = diloco(100)
#: What is done, with what, and how that begins what is told. A model that is not closed is dropped in the end, and
#: another thread closes it then; one that is kept is there when its group is closed.
TALES: list[tuple[str, Algorithm, str]] = [
    ("4 close", SILENT, OF_DILOCO),
    ("4 state_dict close", SILENT, OF_DILOCO),
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
    ("4 close", diloco(4), ""),
    ("4 close", diloco(8, fragments=2), f"{DIFFER}diloco"),
    ("4 close", diloco(5, overlap=1), f"{DIFFER}diloco"),
    ("4 close", local_sgd(5), f"{NOTHING}local_sgd exchanges every 5 steps (sync_every)"),
    ("4 close", local_sgd(4), ""),
    ("4 close", local_sgd(3), f"{DIFFER}local_sgd"),
    ("4 state_dict finish", local_sgd(3), ""),
    ("4 close", local_sgd(5, start_after=4), ""),
    ("4 close", local_sgd(5, start_after=2), NOTHING),
    ("4 close", local_sgd(2, start_after=2), ""),
    ("4 close", Algorithm.init("gradient_allreduce"), ""),
    ("4 close", Algorithm.init("decentralized"), f"{DIFFER}decentralized"),
    ("4 close", Algorithm.init("decentralized", communication_interval=9), f"{DIFFER}decentralized"),
    ("4 close", around("gradient_allreduce", Exchange(Weights(), Every(8), Mean(), Replace())), ""),
    ("4 close", around(local_sgd(9)), f"{NOTHING}local_sgd exchanges every 9 steps (sync_every)"),
    ("mixed", SILENT, DIFFER),
]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("trained ")]


@pytest.mark.parametrize(("tale", "algorithm", "expected"), TALES, ids=map(str, range(len(TALES))))
def test_a_run_that_ends_apart_says_so_once(thread_ranks, tale, algorithm, expected, caplog):
    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, mix if tale == "mixed" else tell, algorithm, tale)
        until(lambda: gc.collect() >= 0 and len(told(caplog)) >= bool(expected))  # Another thread may close it.
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

kept = main()
if sys.argv[1] == "drops":
    del kept
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
