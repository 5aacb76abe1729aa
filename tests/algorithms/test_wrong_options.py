"""Options of a wrong type or out of their range are refused where they are given, and named."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bagua.algorithms import Algorithm, QAdamAlgorithm, Registry, registry
from bagua.compression import BySize, Codec, MinMaxUInt8, Sign, TopK
from bagua.errors import ConfigurationError, InvalidTypeError
from bagua.optim import (
    AccumAdam,
    AccumAdamW,
    QAdamOptimizer,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)
from bagua.primitives import AllGatherReducer, ErrorFeedback, PowerSGDReducer, ScatterGatherReducer
from bagua.topology import Hierarchical

FLAGS = [
    (name, field.name)
    for name in registry
    for field in dataclasses.fields(registry.get(name))
    if isinstance(field.default, bool)
]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_flags_of_algorithms_are_true_or_false(name, flag, wrong):
    with pytest.raises(InvalidTypeError) as caught:
        Algorithm.init(name, **{flag: wrong})
    assert (caught.value.argument, caught.value.seen) == (flag, repr(wrong))


def test_flags_of_algorithms_are_not_overlooked():
    assert {name for name, _ in FLAGS} == set(registry) - {"async"}


@pytest.mark.parametrize(
    ("name", "option", "wrong"),
    [
        ("bytegrad", "warmup_steps", -1),
        ("sign_sgd", "warmup_steps", "x"),
        ("top_k", "ratio", "x"),
        ("top_k", "ratio", math.nan),
        ("power_sgd", "matrix_rank", 1.5),
        ("decentralized", "communication_interval", 0),
        ("decentralized", "communication_interval", "x"),
        ("decentralized", "peer_selection_mode", "sideways"),
        ("decentralized", "peer_selection_mode", 3),
        ("low_precision_decentralized", "communication_interval", True),
        ("low_precision_decentralized", "topology", "sideways"),
        ("low_precision_decentralized", "topology", None),
        ("low_precision_decentralized", "codec", "minmax_uint8"),
        ("qadam", "q_adam_optimizer", 3),
        ("async", "peer_selection_mode", "shift_one"),
        ("async", "peer_selection_mode", 3),
        ("async", "sync_interval_ms", "x"),
        ("async", "sync_interval_ms", -1),
        ("async", "warmup_steps", 1.0),
    ],
)
def test_other_options_of_algorithms(name, option, wrong):
    with pytest.raises(ConfigurationError) as caught:
        Algorithm.init(name, **{option: wrong})
    assert (caught.value.argument, caught.value.seen) == (option, repr(wrong))


@pytest.mark.parametrize("wrong", [3, "gloo"])
def test_an_algorithm_is_bound_to_a_group(wrong):
    with pytest.raises(InvalidTypeError, match="argument process_group"):
        Algorithm.init("gradient_allreduce").reify(wrong)


def test_a_name_is_text():
    with pytest.raises(InvalidTypeError, match="the name of an algorithm"):
        Registry().get(["allreduce"])
    with pytest.raises(InvalidTypeError, match="the name of a codec"):
        Codec.init(["sign"])


def test_an_optimizer_of_another_kind_is_no_qadam():
    with pytest.raises(InvalidTypeError, match="a QAdamOptimizer"):
        QAdamAlgorithm(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: MinMaxUInt8(block_numel="x"), "block_numel"),
        (lambda: MinMaxUInt8(block_numel=0), "block_numel"),
        (lambda: Sign(block_numel=12), "block_numel"),
        (lambda: TopK(ratio=None), "ratio"),
        (lambda: BySize(threshold_bytes="x"), "threshold_bytes"),
        (lambda: BySize(small=3), "small"),
        (lambda: AllGatherReducer(3), "codec"),
        (lambda: ScatterGatherReducer("sign"), "codec"),
        (lambda: ErrorFeedback(3), "reducer"),
        (lambda: PowerSGDReducer(seed="x"), "seed"),
        (lambda: PowerSGDReducer(matrix_rank="x"), "matrix_rank"),
        (lambda: Hierarchical("ring"), "between_hosts"),
    ],
)
def test_codecs_reducers_and_topologies(make, argument):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert caught.value.argument == argument


@pytest.mark.parametrize("kind", [AccumAdam, AccumAdamW, QAdamOptimizer])
@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("lr", "x"),
        ("lr", torch.ones(2)),
        ("lr", None),
        ("lr", -1.0),
        ("betas", 0.9),
        ("betas", (0.9,)),
        ("betas", ("x", "y")),
        ("betas", (0.9, 1.0)),
        ("eps", "x"),
        ("weight_decay", math.nan),
    ],
)
def test_optimizers(kind, argument, wrong):
    with pytest.raises(ConfigurationError) as caught:
        kind([torch.nn.Parameter(torch.ones(1))], **{argument: wrong})
    assert caught.value.argument == argument


@pytest.mark.parametrize("function", [optim_fn_accum_adam, optim_fn_accum_adamw, optim_fn_adam, optim_fn_adamw])
@pytest.mark.parametrize(
    ("argument", "wrong"), [("weight_decay", -1.0), ("weight_decay", "x"), ("lr", "x"), ("beta1", None), ("eps", "x")]
)
def test_makers_of_optimizers(function, argument, wrong):
    with pytest.raises(ConfigurationError) as caught:
        function(list(torch.nn.Linear(1, 1).named_parameters()), **{argument: wrong})
    assert caught.value.argument in (argument, "betas")


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [("t_max", 0), ("t_max", "x"), ("t_warmup", -1), ("cosine_eta_min", "x"), ("warmup_decay", None)],
)
def test_the_maker_of_schedules(argument, wrong):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigurationError) as caught:
        lr_scheduler_fn_cosine_with_warmup(optimizer, **{"t_max": 2, "t_warmup": 1, argument: wrong})
    assert caught.value.argument == argument
