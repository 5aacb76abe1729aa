"""What a new user gets wrong, and what the error says; other rows of that table are tested where each belongs."""

from __future__ import annotations

import contextlib
import logging
from functools import partial

import pytest
import torch

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.comm import solo_group
from bagua.errors import ConfigurationError, InvalidTypeError, UnsupportedAlgorithmException
from bagua.parallel import DistributedDataParallel
from tests.harness import State, assert_same_on_all_ranks, mlp, sgd, snapshot
from tests.parallel.wrapping import Loop, on_ranks


@pytest.mark.parametrize(("own", "times"), [(True, 0), (False, 1)])
def test_an_optimizer_of_another_model_is_told(thread_ranks, caplog, own, times):
    def wrap() -> None:
        model, other = mlp(), mlp()
        bagua.with_bagua(model, [sgd(model.parameters()), sgd((model if own else other).parameters())])

    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, wrap)
    assert caplog.text.count("optimizer 1 (SGD) steps no parameter of this model") == times


class Scripted(torch.jit.ScriptModule):
    pass


LAYER = torch.nn.Linear(2, 1)
SGD = sgd(LAYER.parameters())
ADAM = torch.optim.AdamW(LAYER.parameters())
SWAPPED = r"swapped.*Call with_bagua\(model, optimizer, "
NO_OPTIMIZER = r"no optimizer .*seen Linear, then \w+\)\. Call with_bagua\("
QADAM = r"seen \['AdamW'\]\)\. Build QAdamOptimizer\(model\.parameters\(\)\)"
MISTAKES = {
    "swapped": (lambda: wrapped(SGD, LAYER, "bytegrad"), InvalidTypeError, SWAPPED),
    "swapped, in a list": (lambda: wrapped([SGD], LAYER, "bytegrad"), InvalidTypeError, SWAPPED),
    "a name for the optimizer": (lambda: wrapped(LAYER, "bytegrad"), InvalidTypeError, NO_OPTIMIZER),
    "an algorithm for it": (lambda: wrapped(LAYER, Algorithm.init("bytegrad")), InvalidTypeError, NO_OPTIMIZER),
    "a model for it": (lambda: wrapped(LAYER, torch.nn.Sequential(LAYER)), InvalidTypeError, NO_OPTIMIZER),
    "another optimizer": (lambda: wrapped(LAYER, ADAM, "qadam"), ConfigurationError, QADAM),
    "a large number": (
        lambda: Algorithm.init("top_k", ratio=2),
        ConfigurationError,
        "^ratio must be a number above 0 and at most 1, not 2$",
    ),
    "a module inside": (
        lambda: wrapped(torch.nn.Linear(2, 1), [], "bytegrad").module,
        AttributeError,
        "'Linear' object has no attribute 'module'",
    ),
    "scripted": (lambda: wrapped(Scripted(), [], "bytegrad"), ConfigurationError, "scripted"),
}


def wrapped(model, optimizer, *algorithm):
    return bagua.with_bagua(model, optimizer, *algorithm, process_group=solo_group())


@pytest.mark.parametrize("name", MISTAKES)
def test_what_the_error_says(name):
    call, error, words = MISTAKES[name]
    with pytest.raises(error, match=words):
        call()


# Names that are nearly right, and switching what was wrapped.


@on_ranks(2, assert_same_on_all_ranks)
def test_a_model_of_with_bagua_switches_when_it_is_wrapped_again() -> State:
    loop = Loop(bagua.with_bagua, bucket_bytes=100)
    wrapped = loop.wrapped
    assert wrapped is loop.model
    assert isinstance(wrapped.bagua_algorithm.options, GradientAllReduceAlgorithm)
    loop.train(2)
    assert bagua.with_bagua(wrapped, loop.optimizer, "bytegrad", bucket_bytes=200) is loop.model
    loop.train(2)
    assert (wrapped.bagua_optimizers, wrapped._bagua_engine.reducer.options.bucket_bytes) == ([loop.optimizer], 200)
    with pytest.raises(UnsupportedAlgorithmException):
        bagua.with_bagua(wrapped, loop.optimizer, "bytegrab")
    assert wrapped.bagua_algorithm.options == Algorithm.init("bytegrad")
    return snapshot(loop.model)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("bytgrad", "Did you mean 'bytegrad'. "),
        ("ByteGrad", "Did you mean 'bytegrad'. "),
        ("power-sgd", "Did you mean 'power_sgd'. "),
        ("quantised", "Did you mean 'quantize'. "),
        ("Gradient_Allreduce", "Did you mean 'gradient_allreduce'. "),
        ("", "no algorithm ''. "),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one_and_all(given, meant):
    with pytest.raises(UnsupportedAlgorithmException, match=f"{meant}There are gradient_allreduce, "):
        Algorithm.init(given)


@pytest.mark.parametrize(
    "name", ["DecentralizedDataParallel", "decentralized_data_parallel", "DecentralisedDataParallel"]
)
def test_the_wrapper_among_the_names_says_what_it_is(name):
    with pytest.raises(UnsupportedAlgorithmException, match=r"DecentralizedDataParallel\(model, optim_fn\)"):
        Algorithm.init(name)


def test_options_that_are_nearly_right_are_answered():
    with pytest.raises(TypeError, match="warmup_steps is an option of QAdamOptimizer"):
        Algorithm.init("qadam", warmup_steps=4)
    with pytest.raises(TypeError, match="Did you mean 'hierarchical'"):
        Algorithm.init("bytegrad", hierarchial=True)
    with pytest.raises(TypeError, match=r"avrage.*hierarchical.*average"):
        Algorithm.init("gradient_allreduce", avrage=True)
    with pytest.raises(TypeError, match=r"unknown keyword arguments: bucket_byte; .*Did you mean 'bucket_bytes'\?"):
        bagua.with_bagua(mlp(), [], bucket_byte=1)
    for call in (
        partial(bagua.with_bagua, mlp(), [], algorithm="diloco"),
        partial(DistributedDataParallel, mlp(), algorithm="diloco"),
        partial(bagua.bagua_init, mlp(), [], "diloco"),
    ):
        with pytest.raises(TypeError, match=r"has sync_every: pass DiLoCoAlgorithm\(sync_every=\.\.\.\) as the alg"):
            call(sync_every=8)


def test_names_that_another_module_has_say_which():
    with pytest.raises(AttributeError, match=r"bagua\.distributed\.get_backend has it"):
        _ = bagua.get_backend
    with pytest.raises(AttributeError, match=r"bagua\.comm\.allgather has it"):
        _ = bagua.allgather


def test_a_class_in_the_place_of_an_algorithm_is_named_whole():
    layer = torch.nn.Linear(1, 1)
    with pytest.raises(InvalidTypeError, match=r"class GradientAllReduceAlgorithm\)\. Make one: GradientAll\w+\(\)\."):
        bagua.with_bagua(layer, [], GradientAllReduceAlgorithm, solo_group())


def test_debug_says_what_is_exchanged_and_info_does_not(thread_ranks, caplog):
    def train() -> None:
        Loop(lambda model, optimizer: bagua.with_bagua(model, optimizer, "bytegrad", bucket_bytes=600)).train()

    for level, times in (("INFO", 0), ("DEBUG", 1)):
        caplog.clear()
        with caplog.at_level(level, "bagua"):
            thread_ranks(2, train)
        assert caplog.text.count("rank 1: from step 0 on ByteGradAlgorithm(") == times
    assert "buckets of " in caplog.text
    assert "0.weight" in caplog.text


#: Passes of each update, with ``True`` for those in ``no_sync``; and how often something is said.
ACCUMULATED = {
    "all exchanged": ([[False, False]] * 4, 1),
    "the last one exchanged": ([[True, False]] * 4, 0),
    "now and then an update is skipped": ([[False, False], [False]] * 4, 0),
    "one pass each": ([[False]] * 8, 0),
}


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd"])
@pytest.mark.parametrize(("updates", "times"), ACCUMULATED.values(), ids=ACCUMULATED)
def test_passes_of_one_update_that_are_all_exchanged_are_told_once(thread_ranks, caplog, algorithm, updates, times):
    def train() -> None:
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = bagua.with_bagua(model, optimizer, algorithm)
        for passes in updates:
            for alone in passes:
                with wrapped.no_sync() if alone else contextlib.nullcontext():
                    wrapped(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, train)
    assert caplog.text.count("came after 2 backward passes that were exchanged") == times
    assert caplog.text.count("0.00387 MB of gradients where 0.00194 MB suffice") == times * (algorithm != "local_sgd")
