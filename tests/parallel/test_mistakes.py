"""What users get wrong: wrong arguments, typical mistakes, ranks that come to differ. Errors say what to do."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, fully_shard

import bagua.comm
from bagua import errors, torch_api
from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.comm import solo_group
from bagua.engine.reducer import BucketType, Reducer
from bagua.engine.state.agreement import gather_objects
from bagua.engine.state.replicas import plain
from bagua.optim import QAdamOptimizer
from bagua.parallel import DistributedDataParallel, bagua_init, with_bagua
from bagua.parallel.wrappers import DistributedModule, ModelSwitchWrapper, OverlappingWrapper
from bagua.primitives import differ_by_rounding, quick_digest
from bagua.testing import ThreadRanks
from bagua.torch_api.data_parallel import DecentralizedDataParallel
from tests.harness import State, assert_same_on_all_ranks, mlp, seeded, sgd, snapshot, train_steps
from tests.parallel.wrapping import Loop, Made, Operations, Wrap, on_ranks


def on_one_rank(make: Callable[..., Any], *names: str, **good: Any) -> Callable[..., Any]:
    """What calls ``make`` with good arguments, save those it is given; model and optimizer go by these ``names``."""

    def made(**given: Any) -> Any:
        layer = nn.Linear(2, 2)
        own = dict(zip(names, (layer, sgd(layer.parameters())), strict=False))
        return make(**{**own, "process_group": solo_group(), **good, **given})

    made.__name__ = make.__name__
    return made


def wrap(model: nn.Module, **options: Any) -> nn.Module:
    return with_bagua(model, **options)


def switch(algorithm: Any, **options: Any) -> ModelSwitchWrapper:
    return ModelSwitchWrapper(**options).switch_to(algorithm)


wrap_with_bagua = on_one_rank(wrap, "model", "optimizers", algorithm="allreduce")
switch_wrapper = on_one_rank(switch, "module", "optimizer", algorithm="allreduce")
overlapping = on_one_rank(OverlappingWrapper, "module", "optimizers")
PARTS = {"hierarchical_reduce": False, "align_bytes": 8, "chunking": False, "fusion": True}
reducer = on_one_rank(Reducer, "module", optimizers=[], bucket_type=BucketType.Gradient, **PARTS)
data_parallel = on_one_rank(DistributedDataParallel, "module")
on_a_mesh = on_one_rank(DistributedDataParallel, "module", process_group=None)
decentralized = on_one_rank(DecentralizedDataParallel, "model", optim_fn=lambda named: sgd(one for _, one in named))


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
        with pytest.raises(errors.ConfigurationError) as caught:
            make(**{flag: wrong})
        assert (caught.value.argument, caught.value.seen) == (flag, repr(wrong))


@pytest.mark.parametrize(
    ("make", "argument", "wrong"),
    [
        *((wrap_with_bagua, name, 3) for name in ("model", "optimizers", "algorithm", "process_group", "grad_scaler")),
        (wrap_with_bagua, "optimizers", ["sgd"]),
        *((wrap_with_bagua, name, "x") for name in ("bucket_bytes", "align_bytes")),
        *((wrap_with_bagua, "check_every", wrong) for wrong in (-1, 2.5)),
        *((switch_wrapper, name, 3) for name in ("module", "algorithm")),
        (switch_wrapper, "optimizer", "sgd"),
        *((switch_wrapper, name, "x") for name in ("message_size", "process_group", "grad_scaler")),
        *((switch_wrapper, "intra_comm_root_rank", wrong) for wrong in ("x", -1, 5)),
        *((switch_wrapper, "buckets", wrong) for wrong in ("x", [3], [[3]])),
        *((overlapping, name, 3) for name in ("module", "optimizers")),
        (overlapping, "bucket_type", "x"),
        (overlapping, "parameter_manager", object()),
        *((overlapping, "bucket_bytes", wrong) for wrong in (0, -1, 1.5, True)),
        *((reducer, "align_bytes", wrong) for wrong in (0, 4, 12, -8, 8.0, True)),
        *((reducer, "buckets", wrong) for wrong in ([["weight"]], [["weight", "no such"]], [["weight"]] * 2)),
        *((reducer, name, wrong) for name, wrong in (("module", "x"), ("optimizers", [3]), ("process_group", 3))),
        (DistributedModule, "module", 3),
        *((data_parallel, name, 3) for name in ("module", "optimizers", "grad_scaler")),
        *((data_parallel, "process_group", wrong) for wrong in (3, object())),
        *((on_a_mesh, "device_mesh", wrong) for wrong in (3, object())),
        *((data_parallel, "device_ids", wrong) for wrong in (3, [None], [0])),
        *((data_parallel, "output_device", wrong) for wrong in (1.5, 0)),
        *((data_parallel, "bucket_cap_mb", wrong) for wrong in ("x", float("inf"), float("nan"), True, 0, -1)),
        *((data_parallel, name, True) for name in ("check_reduction", "batched_grad_copy", "lazy_bucket_allocation")),
        (data_parallel, "skip_all_reduce_unused_params", True),
        (data_parallel, "dim", 1),
        (data_parallel, "delay_all_reduce_named_params", [("weight", nn.Parameter(torch.zeros(1)))]),
        (data_parallel, "param_to_hook_all_reduce", nn.Parameter(torch.zeros(1))),
        (data_parallel, "mixed_precision", object()),
        (data_parallel, "bucket_cap_mb_list", [1, 25]),
        (data_parallel, "bucket_bytes", "x"),
        *((decentralized, name, 3) for name in ("model", "optim_fn", "lr_scheduler_fn", "scaler", "process_group")),
        *((decentralized, "topology", wrong) for wrong in (3, "small-world")),
        *((decentralized, "grad_clip_norm", wrong) for wrong in ("x", float("nan"), -1.0)),
        *((decentralized, "bucket_size_in_mb", wrong) for wrong in ("x", 0)),
        *((decentralized, "_local_world_size", wrong) for wrong in ("x", 3)),
    ],
)
def test_other_arguments(make, argument, wrong):
    with pytest.raises(errors.ConfigurationError, check=lambda error: error.argument == argument) as caught:
        make(**{argument: wrong})
    assert caught.value.expected or argument == "parameter_manager"


def test_settings_that_are_changed_later():
    reset = overlapping().reset_reducer
    for argument in ("hierarchical_reduce", "buckets", "bucket_bytes"):
        with pytest.raises(errors.ConfigurationError, check=lambda error, name=argument: error.argument == name):
            reset(**{argument: "x"})
    with pytest.raises(errors.InvalidTypeError, match="argument enable"):
        decentralized().set_accumulate_grad("x")


def test_one_size_of_buckets_counts():
    with pytest.raises(errors.ConfigurationError, check=lambda error: error.argument == "bucket_bytes") as caught:
        switch_wrapper(message_size=100, bucket_bytes=200)
    assert caught.value.seen == "100 and 200"
    for sizes in ({"message_size": 200, "bucket_bytes": 200}, {"bucket_bytes": 200}, {"message_size": 200}):
        assert switch_wrapper(**sizes).bagua_close() is None


def wrapped(model, optimizer, *algorithm):
    return with_bagua(model, optimizer, *algorithm, process_group=solo_group())


LAYER = nn.Linear(2, 1)
SGD, ADAM = sgd(LAYER.parameters()), torch.optim.AdamW(LAYER.parameters())
SWAPPED = r"swapped.*Call with_bagua\(model, optimizer, "
NO_OPTIMIZER = r"no optimizer .*seen Linear, then \w+\)\. Call with_bagua\("
A_CLASS = r"class GradientAllReduceAlgorithm\)\. Make one: GradientAll\w+\(\)\."
QADAM = r"seen \['AdamW'\]\)\. Build QAdamOptimizer\(model\.parameters\(\)\)"
RATIO = "^ratio must be a number above 0 and at most 1, not 2$"
MODULE = "'Linear' object has no attribute 'module'"
WARMUP, AVERAGE = "warmup_steps is an option of QAdamOptimizer", "avrage.*hierarchical.*average"
BYTES = r"unknown keyword arguments: bucket_byte; .*Did you mean 'bucket_bytes'\?"
SYNC_EVERY = r"has sync_every: pass DiLoCoAlgorithm\(sync_every=\.\.\.\) as the alg"
#: What is given, and the beginning of the answer, which goes on with the names of all.
NAMES = {"bytgrad": "Did you mean 'bytegrad'", "ByteGrad": "Did you mean 'bytegrad'", "": "no algorithm ''",
         "power-sgd": "Did you mean 'power_sgd'", "quantised": "Did you mean 'quantize'",
         "Gradient_Allreduce": "Did you mean 'gradient_allreduce'"}  # fmt: skip
WRAPPERS = "DecentralizedDataParallel", "decentralized_data_parallel", "DecentralisedDataParallel"
ANSWERS = {**{given: f"{answer}. There are gradient_allreduce, " for given, answer in NAMES.items()},
           **dict.fromkeys(WRAPPERS, r"DecentralizedDataParallel\(model, optim_fn\)")}  # fmt: skip
MISTAKES = {
    "swapped": (lambda: wrapped(SGD, LAYER, "bytegrad"), errors.InvalidTypeError, SWAPPED),
    "swapped, in a list": (lambda: wrapped([SGD], LAYER, "bytegrad"), errors.InvalidTypeError, SWAPPED),
    "a name for the optimizer": (lambda: wrapped(LAYER, "bytegrad"), errors.InvalidTypeError, NO_OPTIMIZER),
    "an algorithm for it": (lambda: wrapped(LAYER, Algorithm.init("bytegrad")), errors.InvalidTypeError, NO_OPTIMIZER),
    "a model for it": (lambda: wrapped(LAYER, nn.Sequential(LAYER)), errors.InvalidTypeError, NO_OPTIMIZER),
    "a class": (lambda: wrapped(LAYER, [], GradientAllReduceAlgorithm), errors.InvalidTypeError, A_CLASS),
    "another optimizer": (lambda: wrapped(LAYER, ADAM, "qadam"), errors.ConfigurationError, QADAM),
    "a large number": (lambda: Algorithm.init("top_k", ratio=2), errors.ConfigurationError, RATIO),
    "a module inside": (lambda: wrapped(nn.Linear(2, 1), [], "bytegrad").module, AttributeError, MODULE),
    "scripted": (lambda: wrapped(torch.jit.ScriptModule(), [], "bytegrad"), errors.ConfigurationError, "scripted"),
    **{f"the name {given!r}": (partial(Algorithm.init, given), errors.UnsupportedAlgorithmException, answer)
       for given, answer in ANSWERS.items()},
    "an option of QAdam": (lambda: Algorithm.init("qadam", warmup_steps=4), TypeError, WARMUP),
    "option": (lambda: Algorithm.init("bytegrad", hierarchial=True), TypeError, "Did you mean 'hierarchical'"),
    "one of two": (lambda: Algorithm.init("gradient_allreduce", avrage=True), TypeError, AVERAGE),
    "option of with_bagua": (lambda: with_bagua(mlp(), [], bucket_byte=1), TypeError, BYTES),
    "diloco, with_bagua": (partial(with_bagua, LAYER, [], algorithm="diloco", sync_every=8), TypeError, SYNC_EVERY),
    "diloco, bagua_init": (partial(bagua_init, LAYER, [], "diloco", sync_every=8), TypeError, SYNC_EVERY),
    "diloco, DDP": (partial(DistributedDataParallel, LAYER, algorithm="diloco", sync_every=8), TypeError, SYNC_EVERY),
    "elsewhere": (lambda: torch_api.get_backend, AttributeError, r"bagua\.distributed\.get_backend has it"),
    "in bagua.comm": (lambda: torch_api.allgather, AttributeError, r"bagua\.comm\.allgather has it"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES.values(), ids=MISTAKES)
def test_what_the_error_says(call, error, words):
    with pytest.raises(error, match=words):
        call()


@on_ranks(2, assert_same_on_all_ranks)
def test_a_model_of_with_bagua_switches_when_it_is_wrapped_again() -> State:
    loop = Loop(with_bagua, bucket_bytes=100)
    wrapped = loop.wrapped
    assert wrapped is loop.model
    assert isinstance(wrapped.bagua_algorithm.options, GradientAllReduceAlgorithm)
    loop.train(2)
    assert with_bagua(wrapped, loop.optimizer, "bytegrad", bucket_bytes=200) is loop.model
    loop.train(2)
    assert (wrapped.bagua_optimizers, loop.reducer.formation.options.bucket_bytes) == ([loop.optimizer], 200)
    with pytest.raises(errors.UnsupportedAlgorithmException):
        with_bagua(wrapped, loop.optimizer, "bytegrab")
    assert wrapped.bagua_algorithm.options == Algorithm.init("bytegrad")
    return snapshot(loop.model)


def test_debug_says_what_is_exchanged_and_info_does_not(thread_ranks, caplog):
    for level, times in (("INFO", 0), ("DEBUG", 1)):
        caplog.clear()
        with caplog.at_level(level, "bagua"):
            thread_ranks(2, lambda: Loop(with_bagua, algorithm="bytegrad", bucket_bytes=600).train())
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
        loop = Loop(with_bagua, algorithm=algorithm)
        for passes in updates:
            for alone in passes:
                with loop.wrapped.no_sync() if alone else contextlib.nullcontext():
                    loop.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    thread_ranks(2, train)
    assert caplog.text.count("came after 2 backward passes that were exchanged") == times
    assert caplog.text.count("0.00387 MB of gradients where 0.00194 MB suffice") == times * (algorithm != "local_sgd")


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("nested", [False, True])
def test_a_module_inside_ddp_of_torch_is_refused(gloo: None, nested: bool) -> None:
    module = wrap_with_bagua()
    outer = nn.parallel.DistributedDataParallel(nn.Sequential(module) if nested else module)
    with pytest.raises(errors.ConfigurationError, match=r"both exchange the gradients.*see attach in"):
        outer(torch.ones(1, 2))


def test_a_module_beside_ddp_of_torch_is_not(gloo: None) -> None:
    module, other = wrap_with_bagua(), nn.Linear(2, 2)
    teacher = Made(lambda self, inputs: self.other(inputs) + module(inputs), other=lambda: other)
    nn.parallel.DistributedDataParallel(teacher)(torch.ones(1, 2)).sum().backward()
    for one in (*module.parameters(), *other.parameters()):
        assert torch.equal(one.grad, torch.ones_like(one))


def test_ddp_of_torch_inside_a_module_is_refused_unless_it_is_frozen(gloo: None) -> None:
    inner = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    for module in (inner, nn.Sequential(inner)):
        with pytest.raises(errors.ConfigurationError, match=r"already.*its \.module"):
            wrapped(module, sgd(module.parameters()))
    inner.requires_grad_(False)
    module = nn.Sequential(inner, nn.Linear(2, 2))
    wrapped(module, sgd(module[1].parameters()))(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module[1].bias.grad, torch.ones(2))
    assert [one.grad for one in inner.parameters()] == [None, None]


def test_fully_shard_around_a_module_or_in_its_place_is_refused(gloo: None) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))

    def shard() -> None:
        layer = nn.Linear(2, 2)
        module = with_bagua(layer, sgd(layer.parameters()))
        fully_shard(module, mesh=mesh)
        with pytest.raises(errors.InvalidTensorError, match=r"fully_shard.*register_fsdp_hook"):
            module(torch.ones(1, 2))

    ThreadRanks(2).run(shard)
    sharded, flat = nn.Linear(2, 2), nn.Linear(2, 2)
    fully_shard(sharded, mesh=mesh)
    flat.weight = FlatParameter(flat.weight.detach())  # as FSDP makes them, which needs a GPU
    for module in (sharded, flat):
        with pytest.raises(errors.InvalidTensorError, match="register_fsdp_hook"):
            wrapped(module, sgd(module.parameters()))


# Ranks that come to hold different models by a mistake: found in steps that all ranks know, or repaired on request.

DILOCO = Algorithm.init("diloco", sync_every=2, fragments=1)


def load(loop: Loop, **options: Any) -> None:
    loop.model.load_state_dict(mlp(seed=7).state_dict(), **options)


def on_rank(rank: int, act: Callable[..., object]) -> Callable[..., object]:
    return lambda loop, **options: act(loop, **options) if loop.rank == rank else None


load_on_first = on_rank(0, load)
forget_a_layer = on_rank(1, lambda loop: nn.init.zeros_(loop.model[2].weight))
other_rate = on_rank(1, lambda loop: loop.optimizer.param_groups[0].update(lr=0.2))


def train(
    mistake: Callable[[Loop], object], at: int, algorithm: Any = "gradient_allreduce", steps: int = 6, **options: Any
) -> tuple[errors.BaguaError | None, int, State]:
    """What ended the training, before which step, and the weights."""
    loop = Loop("with_bagua", algorithm=algorithm, **options)
    try:
        for step in range(steps):
            if step == at:
                mistake(loop)
            loop.train()
    except errors.BaguaError as error:
        return error, loop.step - 1, snapshot(loop.model)
    return None, steps, snapshot(loop.model)


RATE = r"settings of optimizers: lr of optimizer 0 \(SGD\).*first: 0\.weight.*0\.1 on rank 0.*0\.2 on rank 1"
DIFFERENCES = {
    "load": (load_on_first, r"weights: 0\.weight .*Only rank 0 loaded weights, before step"),
    "init": (forget_a_layer, r"weights: 2\.weight .*Change weights on all ranks alike"),
    "rate": (other_rate, RATE),
}


@pytest.mark.parametrize(("mistake", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
@pytest.mark.parametrize(("at", "options"), [(0, {}), (3, {"check_every": 1})], ids=["at first", "later"])
def test_ranks_that_differ_get_an_error_that_names_what_and_who(thread_ranks, mistake, message, at, options):
    ends = thread_ranks(3, partial(train, **options), mistake, at)
    for rank, (error, step, _) in enumerate(ends):
        assert (step, error.rank, error.peers) == (at, rank, (1, 2) if mistake is load_on_first else (1,))
        with pytest.raises(errors.CollectiveMismatchError, match=message):
            raise error


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "top_k"])
@on_ranks(2)
def test_calls_that_cross_on_the_model_name_what_each_rank_does(algorithm):
    """Rank 0 alone loads all parts of a checkpoint, while rank 1 makes its first step."""
    loop = Loop("with_bagua", algorithm=algorithm)
    saved = loop.wrapped.bagua_state_dict()
    with pytest.raises(errors.CollectiveMismatchError, match="ranks make different calls on the model") as found:
        loop.wrapped.bagua_load_state_dict(saved) if loop.rank == 0 else loop.train()
    assert all(call in str(found.value) for call in ("a comparison of checkpoints", "the forming of buckets"))


@on_ranks(2)
def test_an_agreement_that_meets_another_call_on_objects_is_an_error_on_its_rank():
    communicator = bagua.comm.get_default_group().global_communicator
    if bagua.comm.get_rank():
        communicator.allgather_object(True)
        return
    with pytest.raises(errors.CollectiveMismatchError, match=r"a test, others have another call"):
        gather_objects(communicator, "a test", 1)


def test_later_steps_are_compared_after_100_and_a_lone_load_is_told_at_once(thread_ranks, caplog):
    ends = thread_ranks(2, partial(train, steps=105), load_on_first, 3)
    assert [(type(error), step) for error, step, _ in ends] == [(errors.CollectiveMismatchError, 100)] * 2
    assert caplog.text.count("rank 0 loaded weights before step 3, and rank 1 did not") == 1


@pytest.mark.parametrize("algorithm", ["decentralized", "local_sgd"])
def test_where_ranks_differ_on_purpose_only_a_load_on_one_rank_is_a_mistake(thread_ranks, algorithm):
    run = partial(train, check_every=1)
    assert [error for error, _, _ in thread_ranks(2, run, forget_a_layer, 3, algorithm)] == [None, None]
    for error, step, _ in thread_ranks(2, run, load_on_first, 3, algorithm):
        assert (type(error), step) == (errors.CollectiveMismatchError, 3)
        assert "Only rank 0 loaded weights, before step 3" in str(error)


@pytest.mark.parametrize(("assign", "algorithm"), [(True, "gradient_allreduce"), (False, DILOCO)])
def test_a_model_that_changed_on_one_rank_alone_keeps_nobody_waiting(thread_ranks, assign, algorithm):
    """Before, both waited until their timeouts, each for the other."""
    (first, _, _), (second, _, _) = thread_ranks(2, train, partial(load_on_first, assign=assign), 2, algorithm)
    assert (type(first), first.peers) == (errors.CollectiveMismatchError, (1,))
    assert "on every rank" in str(first)
    assert isinstance(second, errors.PeerLostError)
    assert "change of the model that other ranks did not make" in str(second)


def in_buckets_of_the_user(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    return OverlappingWrapper(model, optimizer, buckets=[["bias"], ["weight"]])


@pytest.mark.parametrize(
    ("wrap", "gradients", "times"),
    [
        *((wrap, *case) for wrap in ("gradient_allreduce", in_buckets_of_the_user)
          for case in (([1.0, 1.0], 1), ([1.0, 2.0], 0), ([0.0, 0.0], 0))),
        ("gradient_allreduce", [1.0], 0),
        *((name, [1.0, 1.0], 1) for name in ("local_sgd", "decentralized", "diloco")),  # Buckets exist from the start.
    ],
)  # fmt: skip
def test_ranks_that_read_the_same_data_are_told_once(thread_ranks, caplog, wrap, gradients, times):
    def train_on_the_same_data() -> None:
        own = wrap if callable(wrap) else lambda *made: with_bagua(*made, wrap)
        with seeded():
            layer = nn.Linear(2, 2)
        loop = Loop(own, lambda: layer)
        for _ in range(2):
            (loop.wrapped(torch.ones(1, 2)).sum() * gradients[loop.rank]).backward()
            loop.optimizer.step()

    thread_ranks(len(gradients), train_on_the_same_data)
    assert caplog.text.count("computed the same gradient in the first step") == times


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("numel", [1, 3, 1000])
def test_a_digest_depends_on_each_element_and_its_place(dtype, numel):
    tensor = torch.arange(1, numel + 1).to(dtype)
    same = quick_digest([tensor.clone()])
    assert quick_digest([tensor]) == same
    for place in {0, numel // 2, numel - 1}:
        other = tensor.clone()
        other[place] += 64
        assert quick_digest([other]) != same
    if numel > 1:
        assert quick_digest([tensor.flip(0)]) != same
    assert quick_digest([tensor, tensor]) != same


def test_a_digest_reads_small_tensors_all_at_once_and_depends_on_their_order():
    tensors = [torch.ones(100) for _ in range(200)]
    with Operations() as few:
        quick_digest(tensors)
    assert len(few.noted) <= 4 * 200 + 10  # Looked at, one by one; summed, hashed and copied together.
    one, other = torch.ones(3), torch.zeros(2, dtype=torch.bfloat16)
    assert quick_digest([one, other]) == quick_digest([one.clone(), other.clone()])
    assert quick_digest([one, other]) != quick_digest([other, one])


def wrap_twice(second: str, model: nn.Module) -> None:
    for algorithm in ("gradient_allreduce", second):
        with_bagua(model, sgd(model.parameters()), algorithm)


OTHER = "optimizer 1 (SGD) steps no parameter of this model"
AGAIN = "is wrapped with it again, which averages the weights"
EARLIER = "the earlier wrapper exchanges nothing from now on"
#: How a model is wrapped, what may be said of that, and how often it is.
TOLD = {
    "other optimizer": (lambda it: with_bagua(it, [sgd(it.parameters()), sgd(mlp().parameters())]), OTHER, 1),
    "own optimizers": (lambda it: with_bagua(it, [sgd(it.parameters()), sgd(it.parameters())]), OTHER, 0),
    "the same algorithm again": (partial(wrap_twice, "gradient_allreduce"), AGAIN, 1),
    "another algorithm": (partial(wrap_twice, "bytegrad"), AGAIN, 0),
    "another wrapper": (lambda it: bagua_init(with_bagua(it, []), []), EARLIER, 1),
}


@pytest.mark.parametrize(("wrap", "words", "times"), TOLD.values(), ids=TOLD)
def test_what_is_told_of_wrapping(thread_ranks, caplog, wrap, words, times):
    thread_ranks(2, lambda: wrap(mlp()))
    assert caplog.text.count(words) == times


@pytest.mark.parametrize(
    ("options", "headline"),
    [
        ([{"algorithm": "bytegrad"}, {"algorithm": "qadam"}], "ranks have different algorithms"),
        ([{"find_unused_parameters": True}, {}], r"ranks have different options \(find_unused_parameters\)"),
        ([{"seed": 1}, {}], None),
    ],
)
@on_ranks(2)
def test_a_mismatch_is_headed_by_what_differs(options, headline):
    own = dict(options[bagua.comm.get_rank()])
    model = mlp(own.pop("seed", 0))
    wrap = partial(with_bagua, model, QAdamOptimizer(model.parameters(), lr=0.1), **own)
    if headline is None:
        wrap()
        return
    with pytest.raises(errors.CollectiveMismatchError, match=headline) as caught:
        wrap()
    assert "Build the same model" not in str(caught.value)


@on_ranks(2)
def test_a_run_that_was_resumed_is_compared_as_before():
    loop = Loop("with_bagua", check_every=1)
    loop.train(2)
    saved = {**loop.wrapped.bagua_state_dict(), "step": 5000}
    loop.wrapped.load_state_dict({name: value.clone() for name, value in loop.wrapped.state_dict().items()})
    loop.wrapped.bagua_load_state_dict(saved)
    loop.train()
    other_rate(loop)
    with pytest.raises(errors.CollectiveMismatchError):
        loop.train()


@pytest.mark.parametrize("again", ["", "bytegrad"])
@on_ranks(2)
def test_settings_and_state_of_what_is_not_exchanged_stay_a_rank_s_own(caplog, again):
    """As an expert that each rank trains by itself."""
    rank, model = bagua.comm.get_rank(), mlp()
    model._ddp_params_and_buffers_to_ignore = ["2.weight"]
    own = model[2].weight
    rest = [parameter for parameter in model.parameters() if parameter is not own]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": [own], "lr": 0.1 * (rank + 1)}], lr=0.1, momentum=0.5)
    for one in (own, rest[0]):
        optimizer.state[one]["momentum_buffer"] = torch.full_like(one, float(rank))
    for algorithm in ("gradient_allreduce", again)[: 1 + bool(again)]:
        wrapped = with_bagua(model, [optimizer], algorithm, check_every=1)
    momenta = [float(optimizer.state[one]["momentum_buffer"].mean()) for one in (own, rest[0])]
    train_steps(wrapped, optimizer, rank, range(3))
    assert (optimizer.param_groups[1]["lr"], momenta) == (0.1 * (rank + 1), [float(rank), 0.0])
    assert "settings of optimizers" not in caplog.text


def with_a_rate_of_its_own(wrap: Wrap) -> Loop:
    return Loop(wrap, make_optimizer=lambda them: torch.optim.SGD(them, lr=0.1 * (bagua.comm.get_rank() + 1)))


@on_ranks(2)
def test_another_learning_rate_when_wrapping_is_told_and_becomes_that_of_rank_0(caplog):
    loop = with_a_rate_of_its_own(with_bagua)
    assert loop.optimizer.param_groups[0]["lr"] == 0.1
    loop.train(5)
    told = "settings of optimizers: lr of optimizer 0 (SGD), parameter group 0 (first: 0.weight) on rank 1"
    assert caplog.text.count(told) == 1
    assert "0.1 on rank 0, 0.2 on rank 1" in caplog.text


@on_ranks(2)
def test_another_learning_rate_of_an_optimizer_that_nobody_passed_is_found_in_the_second_step():
    loop = with_a_rate_of_its_own(lambda model, _: with_bagua(model, []))
    assert loop.optimizer.param_groups[0]["lr"] == 0.1 * (loop.rank + 1)
    loop.train()
    told = r"ranks have different weights: 0\.weight on rank 1 is not that of rank 0"
    with pytest.raises(errors.CollectiveMismatchError, match=rf"{told}.*with_bagua\(model, optimizer\) compares those"):
        loop.train()


@pytest.mark.parametrize("owner", [0, 1])
def test_a_setting_that_only_one_rank_has_is_named(thread_ranks, owner):
    add = on_rank(owner, lambda loop: loop.optimizer.param_groups[0].update(warm=3))
    for error, step, _ in thread_ranks(2, train, add, 0):
        assert (type(error), step) == (errors.CollectiveMismatchError, 0)
        assert "settings of optimizers: warm of optimizer 0 (SGD)" in str(error)
        assert (error.expected, error.seen) == tuple(f"{'3' if r == owner else 'none'} on rank {r}" for r in range(2))


def test_settings_are_compared_without_devices_and_addresses():
    assert plain((torch.tensor(0.5), [1, None], object())) == [0.5, [1, None], "object"]


def swap(loop: Loop) -> None:
    """An evaluation of other weights, as of their moving average."""
    kept = snapshot(loop.model)
    load(loop)
    with torch.no_grad():
        loop.model.eval()(torch.ones(1, 8))
    loop.model.train().load_state_dict(kept)


swap_on_first = on_rank(0, swap)


def swap_on_first_and_load_everywhere(loop: Loop) -> None:
    swap_on_first(loop)
    load(loop)


def load_the_same_everywhere(loop: Loop) -> None:
    """On rank 0, which holds them already, nothing changes."""
    state = snapshot(loop.model)
    loop.model.load_state_dict(bagua.comm.get_default_group().global_communicator.broadcast_object(state))


EAGER = Algorithm.init("diloco", sync_every=2, fragments=1, eager=True)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd", DILOCO, EAGER, "decentralized"])
def test_weights_that_are_put_back_change_nothing(thread_ranks, caplog, algorithm):
    run = partial(train, check_every=1)
    ends = thread_ranks(2, run, swap_on_first, 3, algorithm)
    expected = thread_ranks(2, run, lambda _: None, 3, algorithm)
    for (error, _, seen), (_, _, undisturbed) in zip(ends, expected, strict=True):
        assert error is None
        assert_same_on_all_ranks([seen, undisturbed])
    assert "loaded" not in caplog.text


def load_twice_on_first(loop: Loop) -> None:
    for _ in range(2 - loop.rank):
        load(loop)


@pytest.mark.parametrize(
    ("load", "algorithm", "options"),
    [
        *((load, name, {"check_every": 1}) for name in ("gradient_allreduce", DILOCO, "decentralized")),
        *((swap_on_first_and_load_everywhere, name, {"check_every": 1}) for name in ("local_sgd", DILOCO)),
        *((load_the_same_everywhere, name, {"check_every": 1}) for name in ("local_sgd", DILOCO)),
        (load_twice_on_first, DILOCO, {"steps": 110}),
    ],
)
def test_a_load_on_all_ranks_goes_on(thread_ranks, caplog, load, algorithm, options):
    """However often each of them loads before one step."""
    ends = thread_ranks(2, partial(train, **options), load, 3, algorithm)
    assert [error for error, _, _ in ends] == [None, None]
    assert "loaded" not in caplog.text


@on_ranks(2)
def test_a_state_saved_after_weights_were_put_back_has_the_anchor():
    loop = Loop("with_bagua", algorithm=DILOCO)
    loop.train(3)
    before = loop.wrapped.bagua_state_dict()["parameters"]
    swap_on_first(loop)
    after = loop.wrapped.bagua_state_dict()["parameters"]
    assert before["0.bias"].keys() == after["0.bias"].keys() != set()


@on_ranks(2)
def test_loads_leave_one_key_for_each_rank_in_the_store():
    loop = Loop("with_bagua", check_every=0)
    store = loop.reducer.group.store
    for _ in range(6):
        load(loop)
        loop.train()
        assert sum(store.check([f"loaded{end}"]) for end in ("/0", "/1", *(f"{n}/0" for n in range(7)))) <= 2


def test_ranks_that_round_differently_are_told_once_and_train_on(thread_ranks, caplog):
    def train_while_rounding() -> State:
        loop = Loop("with_bagua", check_every=1)
        for _ in range(8):
            loop.train()
            with torch.no_grad():
                for weight in loop.model.parameters() if loop.rank == 1 else ():
                    weight.copy_(torch.nextafter(weight, torch.tensor(torch.inf)))
        return snapshot(loop.model)

    first, second = thread_ranks(2, train_while_rounding)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert caplog.text.count("but only by rounding") == 1
    assert "0.weight on rank 1 is not that of rank 0" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64, torch.bfloat16])
@on_ranks(2)
def test_rounding_is_256_units_in_the_last_place_or_three_hundredths(dtype):
    group, limit = bagua.comm.get_default_group(), min(256 * torch.finfo(dtype).eps, 0.03)
    base = torch.linspace(-1, 1, 9, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    for part, allowed in ((0.9, True), (1.4, False)):
        own = base * (1 + part * limit * group.rank)
        assert differ_by_rounding([base.to(dtype), own.to(dtype)], group.global_communicator) == allowed


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ([1, 2], [1, 2], True), ([1, 2], [1, 3], False), ([], [], True),
        ([0.0, 0.0], [0.0, -0.0], True), ([0.0, 0.0], [1e-9, 0.0], False),
        ([1.0, torch.nan], [1.0, torch.nan], True), ([1.0, 1.0], [1.0, torch.nan], False),
        ([1.0, torch.inf], [1.0, torch.inf], True), ([1.0, 1.0], [1.0, torch.inf], False),
    ],
)  # fmt: skip
@on_ranks(2)
def test_what_is_not_finite_and_whole_numbers_must_be_equal(first, second, alike):
    own = torch.tensor([first, second][bagua.comm.get_rank()])
    assert differ_by_rounding([own], bagua.comm.get_default_group().global_communicator) == alike
