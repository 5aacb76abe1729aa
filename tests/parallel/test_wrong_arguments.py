"""Arguments of wrappers that are of a wrong type: refused where they are given, under the name that they have there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua import parallel
from bagua.comm import solo_group
from bagua.engine.reducer import BucketType, Reducer
from bagua.errors import ConfigurationError, InvalidTypeError
from bagua.parallel.wrappers import DistributedModule, ModelSwitchWrapper, OverlappingWrapper
from bagua.torch_api.data_parallel import DecentralizedDataParallel, DistributedDataParallel


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_bagua(**given):
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
        (with_bagua, ["do_flatten", "broadcast_buffers", "delay_reduce", "find_unused_parameters"]),
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
        (with_bagua, "model", 3),
        (with_bagua, "optimizers", 3),
        (with_bagua, "optimizers", ["sgd"]),
        (with_bagua, "algorithm", 3),
        (with_bagua, "process_group", 3),
        (with_bagua, "grad_scaler", 3),
        (with_bagua, "bucket_bytes", "x"),
        (with_bagua, "align_bytes", "x"),
        *((with_bagua, "check_every", wrong) for wrong in (-1, 2.5)),
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
