"""The typed function, switching what it wrapped, and names that are nearly right."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.comm import solo_group
from bagua.errors import InvalidTypeError, UnsupportedAlgorithmException
from bagua.parallel import DistributedDataParallel
from tests.harness import State, assert_same_on_all_ranks, mlp, snapshot
from tests.parallel.wrapping import Loop, on_ranks


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
    [("bytgrad", "bytegrad"), ("ByteGrad", "bytegrad"), ("power-sgd", "power_sgd"), ("quantise", "quantize")],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(given, meant):
    with pytest.raises(UnsupportedAlgorithmException, match=f"Did you mean '{meant}'"):
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
    with pytest.raises(TypeError, match=r"unknown keyword arguments: bucket_byte; .*Did you mean 'bucket_bytes'\?"):
        bagua.with_bagua(mlp(), [], bucket_byte=1)
    for call in (partial(bagua.with_bagua, mlp(), []), partial(DistributedDataParallel, mlp())):
        with pytest.raises(TypeError, match=r"has sync_every: pass algorithm=DiLoCoAlgorithm\(sync_every="):
            call(algorithm="diloco", sync_every=8)


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
