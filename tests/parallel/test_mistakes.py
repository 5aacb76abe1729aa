"""What users get wrong: wrong arguments, typical mistakes, two wrappers at once. Errors say what to do."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, fully_shard

import bagua.torch_api as bagua
from bagua import parallel
from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.comm import solo_group
from bagua.engine.reducer import BucketType, Reducer
from bagua.errors import ConfigurationError, InvalidTensorError, InvalidTypeError, UnsupportedAlgorithmException
from bagua.parallel import DistributedDataParallel, with_bagua
from bagua.parallel.wrappers import DistributedModule, ModelSwitchWrapper, OverlappingWrapper
from bagua.testing import ThreadRanks
from bagua.torch_api.data_parallel import DecentralizedDataParallel
from tests.harness import State, assert_same_on_all_ranks, mlp, sgd, snapshot
from tests.parallel.wrapping import Loop, on_ranks


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrap_with_bagua(**given):
    module = nn.Linear(2, 2)
    options = {"optimizers": _optimizer(module), "algorithm": "allreduce", "process_group": solo_group(), **given}
    return parallel.with_bagua(options.pop("model", module), **options)


def switch_wrapper(**given):
    module = nn.Linear(2, 2)
    options = {"module": module, "optimizer": _optimizer(module), "process_group": solo_group(), **given}
    algorithm = options.pop("algorithm", "allreduce")
    return ModelSwitchWrapper(**options).switch_to(algorithm)


def overlapping(**given):
    module = nn.Linear(2, 2)
    return OverlappingWrapper(
        **{"module": module, "optimizers": _optimizer(module), "process_group": solo_group(), **given}
    )


def reducer(**given):
    options = {
        "module": nn.Linear(2, 2),
        "optimizers": [],
        "bucket_type": BucketType.Gradient,
        "hierarchical_reduce": False,
        "align_bytes": 8,
        "chunking": False,
        "fusion": True,
        "process_group": solo_group(),
    }
    return Reducer(**{**options, **given})


def data_parallel(**given):
    return DistributedDataParallel(**{"module": nn.Linear(2, 2), "process_group": solo_group(), **given})


def decentralized(**given):
    options = {
        "model": nn.Linear(2, 2),
        "optim_fn": lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        "process_group": solo_group(),
    }
    return DecentralizedDataParallel(**{**options, **given})


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (wrap_with_bagua, ["do_flatten", "broadcast_buffers", "delay_reduce", "find_unused_parameters"]),
        (switch_wrapper, ["broadcast_buffers", "delay_reduce", "hierarchical_reduce"]),
        (switch_wrapper, ["chunking", "fusion", "find_unused_parameters"]),
        (overlapping, ["delay_reduce", "hierarchical_reduce", "decentralize_reduce", "chunking", "fusion"]),
        (reducer, ["hierarchical_reduce", "decentralize_reduce", "chunking", "fusion", "delay_reduce"]),
        (data_parallel, ["init_sync", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"]),
        (data_parallel, ["broadcast_buffers", "forward_sync_buffers", "check_reduction"]),
        (decentralized, ["param_as_bucket_view", "sync_buffer_in_global_avg", "find_unused_parameters"]),
    ],
)
@pytest.mark.parametrize("wrong", ["no", 1])
def test_flags(make, flags, wrong):
    for flag in flags:
        with pytest.raises(ConfigurationError) as caught:
            make(**{flag: wrong})
        assert (caught.value.argument, caught.value.seen) == (flag, repr(wrong))


@pytest.mark.parametrize(
    ("make", "argument", "wrong"),
    [
        (wrap_with_bagua, "model", 3),
        (wrap_with_bagua, "optimizers", 3),
        (wrap_with_bagua, "optimizers", ["sgd"]),
        (wrap_with_bagua, "algorithm", 3),
        (wrap_with_bagua, "process_group", 3),
        (wrap_with_bagua, "grad_scaler", 3),
        (wrap_with_bagua, "bucket_bytes", "x"),
        (wrap_with_bagua, "align_bytes", "x"),
        *((wrap_with_bagua, "check_every", wrong) for wrong in (-1, 2.5)),
        (switch_wrapper, "module", 3),
        (switch_wrapper, "optimizer", "sgd"),
        (switch_wrapper, "algorithm", 3),
        (switch_wrapper, "message_size", "x"),
        (switch_wrapper, "process_group", "x"),
        (switch_wrapper, "grad_scaler", "x"),
        *((switch_wrapper, "intra_comm_root_rank", wrong) for wrong in ("x", -1, 5)),
        (switch_wrapper, "buckets", "x"),
        (switch_wrapper, "buckets", [3]),
        (switch_wrapper, "buckets", [[3]]),
        (overlapping, "module", 3),
        (overlapping, "optimizers", 3),
        (overlapping, "bucket_type", "x"),
        (overlapping, "parameter_manager", object()),
        *((overlapping, "bucket_bytes", wrong) for wrong in (0, -1, 1.5, True)),
        *((reducer, "align_bytes", wrong) for wrong in (0, 4, 12, -8, 8.0, True)),
        *((reducer, "buckets", wrong) for wrong in ([["weight"]], [["weight", "no such"]], [["weight"]] * 2)),
        (reducer, "module", "x"),
        (reducer, "optimizers", [3]),
        (reducer, "process_group", 3),
        (DistributedModule, "module", 3),
        (data_parallel, "module", 3),
        (data_parallel, "optimizers", 3),
        *((data_parallel, "process_group", wrong) for wrong in (3, object())),
        *((data_parallel, "device_mesh", wrong) for wrong in (3, object())),
        *((data_parallel, "device_ids", wrong) for wrong in (3, [None], [0])),
        *((data_parallel, "output_device", wrong) for wrong in (1.5, 0)),
        *((data_parallel, "bucket_cap_mb", wrong) for wrong in ("x", float("inf"), float("nan"), True, 0, -1)),
        (data_parallel, "dim", 1),
        (data_parallel, "check_reduction", True),
        (data_parallel, "delay_all_reduce_named_params", [("weight", nn.Parameter(torch.zeros(1)))]),
        (data_parallel, "param_to_hook_all_reduce", nn.Parameter(torch.zeros(1))),
        (data_parallel, "mixed_precision", object()),
        (data_parallel, "skip_all_reduce_unused_params", True),
        (data_parallel, "bucket_cap_mb_list", [1, 25]),
        (data_parallel, "batched_grad_copy", True),
        (data_parallel, "lazy_bucket_allocation", True),
        (data_parallel, "bucket_bytes", "x"),
        (data_parallel, "grad_scaler", 3),
        (decentralized, "model", 3),
        (decentralized, "optim_fn", 3),
        (decentralized, "lr_scheduler_fn", 3),
        (decentralized, "topology", 3),
        (decentralized, "topology", "small-world"),
        (decentralized, "scaler", 3),
        *((decentralized, "grad_clip_norm", wrong) for wrong in ("x", float("nan"), -1.0)),
        (decentralized, "bucket_size_in_mb", "x"),
        (decentralized, "bucket_size_in_mb", 0),
        (decentralized, "process_group", 3),
        *((decentralized, "_local_world_size", wrong) for wrong in ("x", 3)),
    ],
)
def test_other_arguments(make, argument, wrong):
    if make is data_parallel and argument == "device_mesh":
        make = _on_a_mesh
    with pytest.raises(ConfigurationError) as caught:
        make(**{argument: wrong})
    assert caught.value.argument == argument
    assert caught.value.expected or argument == "parameter_manager"


def _on_a_mesh(**given):
    return DistributedDataParallel(nn.Linear(2, 2), **given)


def test_settings_that_are_changed_later():
    wrapper = overlapping()
    for argument, wrong in (("hierarchical_reduce", "x"), ("buckets", "x"), ("bucket_bytes", "x")):
        with pytest.raises(ConfigurationError) as caught:
            wrapper.reset_reducer(**{argument: wrong})
        assert caught.value.argument == argument
    with pytest.raises(InvalidTypeError, match="argument enable"):
        decentralized().set_accumulate_grad("x")


def test_one_size_of_buckets_counts():
    with pytest.raises(ConfigurationError) as caught:
        switch_wrapper(message_size=100, bucket_bytes=200)
    assert (caught.value.argument, caught.value.seen) == ("bucket_bytes", "100 and 200")
    for sizes in ({"message_size": 200, "bucket_bytes": 200}, {"bucket_bytes": 200}, {"message_size": 200}):
        assert switch_wrapper(**sizes).bagua_close() is None


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
    assert (wrapped.bagua_optimizers, wrapped._bagua_engine.reducer.formation.options.bucket_bytes) == ([loop.optimizer], 200)
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


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained() -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    return with_bagua(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "gradient_allreduce", solo_group())


@pytest.mark.parametrize("nested", [False, True])
def test_a_module_inside_ddp_of_torch_is_refused(gloo: None, nested: bool) -> None:
    module = trained()
    wrapped = nn.parallel.DistributedDataParallel(torch.nn.Sequential(module) if nested else module)
    with pytest.raises(ConfigurationError, match=r"both exchange the gradients.*see attach in"):
        wrapped(torch.ones(1, 2))


def test_a_module_beside_ddp_of_torch_is_not(gloo: None) -> None:
    module, other = trained(), torch.nn.Linear(2, 2)

    class Teacher(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = other

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.other(inputs) + module(inputs)

    nn.parallel.DistributedDataParallel(Teacher())(torch.ones(1, 2)).sum().backward()
    for one in (*module.parameters(), *other.parameters()):
        assert torch.equal(one.grad, torch.ones_like(one))


def test_ddp_of_torch_inside_a_module_is_refused(gloo: None) -> None:
    inner = nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for module in (inner, torch.nn.Sequential(inner)):
        with pytest.raises(ConfigurationError, match=r"already.*its \.module"):
            with_bagua(module, torch.optim.SGD(module.parameters(), lr=0.1), "gradient_allreduce", solo_group())


def test_ddp_of_torch_with_frozen_parameters_is_not(gloo: None) -> None:
    teacher = nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    teacher.requires_grad_(False)
    module = torch.nn.Sequential(teacher, torch.nn.Linear(2, 2))
    student = with_bagua(module, torch.optim.SGD(module[1].parameters(), lr=0.1), "gradient_allreduce", solo_group())
    student(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module[1].bias.grad, torch.ones(2))
    assert [one.grad for one in teacher.parameters()] == [None, None]


def test_fully_shard_around_a_module_is_refused(gloo: None) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))

    def shard() -> None:
        layer = torch.nn.Linear(2, 2)
        module = with_bagua(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "gradient_allreduce")
        fully_shard(module, mesh=mesh)
        with pytest.raises(InvalidTensorError, match=r"fully_shard.*register_fsdp_hook"):
            module(torch.ones(1, 2))

    ThreadRanks(2).run(shard)


def test_a_module_that_is_sharded_is_refused(gloo: None) -> None:
    sharded, flat = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    flat.weight = FlatParameter(flat.weight.detach())  # as FSDP makes them, which needs a GPU
    for module in (sharded, flat):
        with pytest.raises(InvalidTensorError, match="register_fsdp_hook"):
            with_bagua(module, torch.optim.SGD(module.parameters(), lr=0.1), "gradient_allreduce", solo_group())
