"""Declarations and the registry: values that can be printed, compared and pickled, and that refuse wrong options."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
import torch

import bagua.comm
from bagua import algorithms, optim, primitives
from bagua.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithmImpl,
    ByHost,
    DistributedAlgorithm,
    Registry,
    as_algorithm,
    registry,
)
from bagua.algorithms.gradients.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.compression import BlockTopK, Codec, Int2, TopK
from bagua.errors import ConfigurationError, InvalidTypeError, NotInitializedError
from bagua.parallel import with_bagua
from bagua.topology import Hierarchical
from tests.harness import mlp, sgd
from tests.parallel.wrapping import on_ranks
from tests.topologies import DRAWN_PAIRS, ONE_WAY, Matrix, graph
from tests.versions import needs


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gradient_allreduce", algorithms.GradientAllReduceAlgorithm),
        ("allreduce", algorithms.GradientAllReduceAlgorithm),
        (DistributedAlgorithm.GradientAllReduce, algorithms.GradientAllReduceAlgorithm),
        (DistributedAlgorithm.ScatterGatherAllReduce, algorithms.ScatterGatherAllReduceAlgorithm),
        (DistributedAlgorithm.QuantizeAllReduce, algorithms.ByteGradAlgorithm),
        ("bytegrad", algorithms.ByteGradAlgorithm),
        (DistributedAlgorithm.PowerSGD, algorithms.PowerSGDAlgorithm),
        (DistributedAlgorithm.TopK, algorithms.TopKAlgorithm),
        (DistributedAlgorithm.SignSGD, algorithms.SignSGDAlgorithm),
        (DistributedAlgorithm.QAdam, algorithms.QAdamAlgorithm),
    ],
)
def test_names_and_members_lead_to_their_algorithm(name, kind):
    assert Algorithm.init(name) == as_algorithm(name) == as_algorithm(kind()) == kind()
    assert Algorithm.init(name, hierarchical=False) == kind(hierarchical=False)


@pytest.mark.parametrize("value", [None, 3, GradientAllReduceAlgorithm])
def test_what_is_no_algorithm_is_a_type_error(value):
    with pytest.raises(TypeError, match="algorithm"):
        as_algorithm(value)


def test_a_name_belongs_to_one_declaration():
    own: Registry[type] = Registry()
    own.register("a", int)
    own.register("a", int)
    with pytest.raises(ConfigurationError, match="name"):
        own.register("a", str)
    assert list(own) == ["a"]
    assert len(own) == 1


@pytest.mark.parametrize("name", list(registry))
def test_an_option_for_hosts_says_that_there_are_two_forms(name):
    declaration = registry.get(name)()
    assert isinstance(declaration, ByHost) == hasattr(declaration, "hierarchical")
    if isinstance(declaration, ByHost):
        forms = [declaration.in_form(hierarchical=one) for one in (False, True)]
        assert [one.is_hierarchical for one in forms] == [one.hierarchical for one in forms] == [False, True]
    else:
        assert declaration.is_hierarchical is None
        with pytest.raises(ConfigurationError, match="no hierarchical form"):
            declaration.in_form(hierarchical=True)


@dataclasses.dataclass(frozen=True)
class Namesake(Algorithm):
    """Its option has a name that means something else elsewhere."""

    hierarchical: str = "yes"

    def exchanges(self, phase=0):
        return GradientAllReduceAlgorithm().exchanges()


def test_hosts_that_train_have_one_form_only():
    with pytest.raises(ConfigurationError, match="no hierarchical form"):
        Algorithm.init("diloco", inner="gradient_allreduce").in_form(hierarchical=False)


def test_the_name_of_an_option_means_nothing_by_itself():
    assert Namesake().is_hierarchical is None


def test_the_constructor_of_an_implementation_shows_its_arguments():
    signature = inspect.signature(AsyncModelAverageAlgorithmImpl)
    positional = [parameter for parameter in signature.parameters.values() if parameter.kind.name != "KEYWORD_ONLY"]
    assert [(one.name, one.default) for one in positional] == [
        ("process_group", inspect.Parameter.empty),
        ("peer_selection_mode", "all"),
        ("sync_interval_ms", 500),
        ("warmup_steps", 0),
    ]
    for declaration in map(registry.get, registry):
        options = inspect.signature(declaration).parameters
        assert list(inspect.signature(declaration.implementation).parameters) == ["process_group", *options]


def test_an_implementation_takes_each_form_of_group(thread_ranks):
    def bind():
        world = bagua.comm.get_default_group()
        return [AsyncModelAverageAlgorithmImpl(group).process_group is world for group in (world, None)]

    assert thread_ranks(2, bind) == [[True, True]] * 2
    with pytest.raises(NotInitializedError):
        AsyncModelAverageAlgorithmImpl(None)
    with pytest.raises(InvalidTypeError, match="argument process_group"):
        AsyncModelAverageAlgorithmImpl("all")


MUON = needs("torch.optim.Muon", hasattr(torch.optim, "Muon"))

EAGER = algorithms.EagerStep(algorithms.Outer(torch.optim.SGD, lr=0.5))

GATHERED = primitives.AllGatherReducer(TopK())

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


@pytest.mark.parametrize(
    ("name", "option", "wrong"),
    [
        ("decentralized", "communication_interval", 0),
        ("decentralized", "peer_selection_mode", "sideways"),
        ("decentralized", "peer_selection_mode", 3),
        ("low_precision_decentralized", "communication_interval", True),
        ("low_precision_decentralized", "topology", "sideways"),
        ("low_precision_decentralized", "codec", "minmax_uint8"),
        ("qadam", "q_adam_optimizer", 3),
        ("async", "peer_selection_mode", "shift_one"),
        ("async", "peer_selection_mode", 3),
        ("async", "sync_interval_ms", -1),
        ("async", "warmup_steps", 1.0),
    ],
)
def test_other_options_of_algorithms(name, option, wrong):
    with pytest.raises(ConfigurationError) as caught:
        Algorithm.init(name, **{option: wrong})
    assert (caught.value.argument, caught.value.seen) == (option, repr(wrong))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: algorithms.TopKAlgorithm(ratio=0), "ratio"),
        (lambda: algorithms.TopKAlgorithm(ratio=1.5), "ratio"),
        (lambda: algorithms.PowerSGDAlgorithm(matrix_rank=0), "matrix_rank"),
        (lambda: algorithms.ByteGradAlgorithm(warmup_steps=-1), "warmup_steps"),
        (lambda: algorithms.SignSGDAlgorithm(warmup_steps=1.5), "warmup_steps"),
        (lambda: algorithms.SignSGDAlgorithm(block_numel=12), "block_numel"),
        (lambda: algorithms.TopKAlgorithm(clip_norm=1.0), "clip_norm"),
        (lambda: algorithms.TopKAlgorithm(momentum=1.0), "momentum"),
        (lambda: algorithms.TopKAlgorithm(momentum=0.9, clip_norm=0.0), "clip_norm"),
        (lambda: algorithms.TopKAlgorithm(density_steps=-1), "density_steps"),
        (lambda: algorithms.PowerSGDAlgorithm(momentum=1.0), "momentum"),
        (lambda: algorithms.OneBitAdamAlgorithm(block_numel=12), "block_numel"),
        (lambda: algorithms.SparseLoCoAlgorithm(outer_lr=0.0), "outer_lr"),
        (lambda: algorithms.SparseLoCoAlgorithm(error_feedback=0.0), "error_feedback"),
        (lambda: algorithms.SparseLoCoAlgorithm(error_feedback="buffer", hierarchical=False), "error_feedback"),
        (lambda: algorithms.SparseLoCoAlgorithm(average="some"), "average"),
        (lambda: algorithms.SparseLoCoAlgorithm(kept=0), "kept"),
        (lambda: algorithms.DiLoCoAlgorithm(codec="int4", error_feedback=1.5), "error_feedback"),
        (lambda: algorithms.DiLoCoAlgorithm(codec=4), "codec"),
        (lambda: algorithms.OneBitLambAlgorithm(block_numel=12), "block_numel"),
        (lambda: algorithms.LoCoAlgorithm(averaging=0.0), "averaging"),
        (lambda: algorithms.LoCoAlgorithm(reset_every=0), "reset_every"),
        (lambda: algorithms.LoCoAlgorithm(block_numel=12), "block_numel"),
        (lambda: algorithms.DionAlgorithm(matrix_rank=0), "matrix_rank"),
        (lambda: algorithms.DionAlgorithm(momentum=1.0), "momentum"),
        (lambda: algorithms.LowPrecisionDecentralizedAlgorithm(topology="shift_one"), "stay the same"),
        (lambda: algorithms.LowPrecisionDecentralizedAlgorithm(topology=DRAWN_PAIRS), "stay the same"),
        (lambda: algorithms.LowPrecisionDecentralizedAlgorithm(codec="sign"), "argument codec"),
        *(
            (
                lambda codec=codec: algorithms.LowPrecisionDecentralizedAlgorithm(codec=codec),
                r"drop most of each update.*DiLoCoAlgorithm",
            )
            for codec in (TopK(), BlockTopK(), Int2())
        ),
        (lambda: algorithms.DiLoCoAlgorithm(4, inner="decentralized"), "sums gradients in each step"),
        (lambda: algorithms.DiLoCoAlgorithm(4, inner="local_sgd"), "sums gradients in each step"),
        (lambda: algorithms.LocalSGDAlgorithm(4, inner="qadam"), "sums gradients in each step"),
        (
            lambda: algorithms.LocalSGDAlgorithm(4, inner=algorithms.LocalSGDAlgorithm(2, inner="gradient_allreduce")),
            "sums gradients in each step",
        ),
        (
            lambda: algorithms.SparseLoCoAlgorithm(4, inner="gradient_allreduce", hierarchical=False),
            "hosts exchange in place of ranks",
        ),
        (
            lambda: algorithms.SparseLoCoAlgorithm(4, inner="gradient_allreduce", error_feedback="weights"),
            "each rank exchanges for itself",
        ),
        (lambda: algorithms.SparseLoCoAlgorithm(4, error_feedback="weights"), "argument hierarchical, expected False"),
        (lambda: algorithms.SlowMoAlgorithm(4, inner=3), "inner"),
        (lambda: algorithms.Sum(hierarchical=True, over="inside"), "hierarchical"),
        (lambda: algorithms.Sum(over="hosts"), "over"),
        (lambda: algorithms.LocalSGDAlgorithm(0), "sync_every"),
        (lambda: algorithms.DiLoCoAlgorithm(None), "argument sync_every"),
        (lambda: algorithms.LocalSGDAlgorithm(4, start_after=-1), "start_after"),
        (lambda: algorithms.LocalSGDAlgorithm(4, start_with="bytegrad"), "no steps begin the training"),
        (lambda: algorithms.SlowMoAlgorithm(4, start_after=2, start_with="qadam"), "sums gradients in each step"),
        (lambda: algorithms.DiLoCoAlgorithm(4, start_after=2, start_with="dion"), "an optimizer of its own"),
        (lambda: algorithms.DiLoCoAlgorithm(4, start_after=2, start_with=None), "start_with"),
        (lambda: algorithms.SlowMoAlgorithm(4, beta=1.0), "beta"),
        (lambda: algorithms.SlowMoAlgorithm(4, alpha=0.0), "alpha"),
        (lambda: algorithms.DiLoCoAlgorithm(4, outer="adam"), "outer"),
        (lambda: algorithms.DiLoCoAlgorithm(4, outer_lr=0.0), "outer_lr"),
        (lambda: algorithms.DiLoCoAlgorithm(4, outer_momentum=1.0), "outer_momentum"),
        (
            lambda: algorithms.DiLoCoAlgorithm(4, outer=algorithms.Outer(torch.optim.Adam, lr=0.1), outer_lr=0.1),
            "outer_lr",
        ),
        (lambda: algorithms.DiLoCoAlgorithm(4, overlap=4), "less than sync_every, which is 4"),
        (lambda: algorithms.LocalSGDAlgorithm(4, overlap=4), "less than sync_every, which is 4"),
        (lambda: algorithms.LocalSGDAlgorithm(4, overlap=-1), "overlap"),
        (lambda: algorithms.LocalSGDAlgorithm(4, codec="nothing"), "codec"),
        (lambda: algorithms.LocalSGDAlgorithm(4, codec="topk"), "keeps 5%"),
        (lambda: algorithms.DiLoCoAlgorithm(4, fragments=5), "at most sync_every, which is 4"),
        (lambda: algorithms.DiLoCoAlgorithm(4, fragment_order="random"), "fragment_order"),
        (lambda: algorithms.DiLoCoAlgorithm(4, overlap=1, blend=1.5), "blend"),
        (lambda: algorithms.DiLoCoAlgorithm(4, blend=0.5), "blend"),
        (lambda: algorithms.DiLoCoAlgorithm(4, overlap=1, blend=0.5, mix="add"), "blend"),
        (lambda: algorithms.DiLoCoAlgorithm(4, error_feedback=True), "error_feedback"),
        (lambda: algorithms.DiLoCoAlgorithm(4, eager=True, overlap=1), "overlap"),
        (lambda: algorithms.DiLoCoAlgorithm(4, eager=True, mix="add"), "mix"),
        (lambda: algorithms.DiLoCoAlgorithm(4, average_buffers=1), "average_buffers"),
        (lambda: algorithms.DiLoCoAlgorithm(4, anchor_dtype="float16"), "anchor_dtype"),
        (lambda: algorithms.DiLoCoAlgorithm(4, anchor_device="cuda"), "anchor_device"),
        (
            lambda: algorithms.Exchange(algorithms.Difference(), algorithms.Every(4), algorithms.Mean(), EAGER, lag=4),
            "local",
        ),
        (
            lambda: algorithms.Exchange(
                algorithms.Difference(scope="local"), algorithms.Every(4), algorithms.Mean(), EAGER, lag=3
            ),
            "the period, which is 4",
        ),
    ],
)
def test_values_that_cannot_work(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_a_name_is_text():
    with pytest.raises(InvalidTypeError, match="the name of an algorithm"):
        Registry().get(["allreduce"])
    with pytest.raises(InvalidTypeError, match="the name of a codec"):
        Codec.init(["sign"])


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: primitives.AllGatherReducer(3), "codec"),
        (lambda: primitives.ScatterGatherReducer("sign"), "codec"),
        (lambda: primitives.ErrorFeedback(3), "reducer"),
        *((lambda wrong=wrong: primitives.ErrorFeedback(GATHERED, wrong), "decay") for wrong in (0.0, 1.1)),
        (lambda: primitives.ErrorFeedback(primitives.EF21(GATHERED)), "reducer"),
        *(
            (lambda wrong=wrong: primitives.EF21(wrong), "reducer")
            for wrong in (primitives.ErrorFeedback(GATHERED), TopK())
        ),
        (lambda: primitives.EF21(GATHERED, 0.0), "averaging"),
        (lambda: primitives.MomentumCorrection(GATHERED, 1.0), "momentum"),
        (lambda: primitives.MomentumCorrection(GATHERED, 0.9, -1.0), "clip_norm"),
        (lambda: primitives.AveragedFeedback(GATHERED, 0.0), "averaging"),
        (lambda: primitives.AveragedFeedback(GATHERED, reset_every=0), "reset_every"),
        (lambda: primitives.AveragedFeedback(primitives.EF21(GATHERED)), "reducer"),
        (lambda: primitives.ContributorsReducer("topk"), "codec"),
        (lambda: primitives.SparseReducer(None), "codec"),
        (lambda: primitives.SparseReducer(TopK(), gather_ranks=0), "gather_ranks"),
        (lambda: primitives.SparseReducer(TopK(), contributors=1), "contributors"),
        (lambda: primitives.PowerSGDReducer(seed="x"), "seed"),
        *((lambda wrong=wrong: primitives.PowerSGDReducer(wrong), "matrix_rank") for wrong in (0, 1.5, "x")),
        (lambda: primitives.ErrorFeedback(primitives.ErrorFeedback(primitives.PowerSGDReducer(1))), "reducer"),
        (lambda: Hierarchical("ring"), "between_hosts"),
    ],
)
def test_reducers_and_topologies(make, argument):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert caught.value.argument == argument


#: What no optimizer of the family of Adam takes.
WRONG = {
    "lr": ["x", torch.ones(2), None, -1.0, math.nan],
    "betas": [0.9, (0.9,), ("x", "y"), (0.9, 1.0), (1.0, 0.9)],
    "eps": ["x", -1e-8],
    "weight_decay": [math.nan, -0.1],
}


@pytest.mark.parametrize(
    ("kind", "argument", "wrong"),
    [
        *(
            (kind, name, one)
            for kind in (optim.AccumAdam, optim.AccumAdamW, optim.QAdamOptimizer)
            for name in WRONG
            for one in WRONG[name]
        ),
        (optim.AccumAdamW, "accum_iter", 0),
        (optim.QAdamOptimizer, "warmup_steps", 0),
        (optim.QAdamOptimizer, "warmup_steps", 1.5),
        (optim.OneBitLambOptimizer, "ratio_beta", 1.0),
        (optim.OneBitLambOptimizer, "warmup_steps", 0),
    ],
)
def test_optimizers(kind, argument, wrong):
    with pytest.raises(ConfigurationError) as caught:
        kind([torch.nn.Parameter(torch.ones(3, 3))], **{argument: wrong})
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    "function", [optim.optim_fn_accum_adam, optim.optim_fn_accum_adamw, optim.optim_fn_adam, optim.optim_fn_adamw]
)
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
        optim.lr_scheduler_fn_cosine_with_warmup(optimizer, **{"t_max": 2, "t_warmup": 1, argument: wrong})
    assert caught.value.argument == argument


def diloco_with(kind: str) -> Algorithm:
    return algorithms.DiLoCoAlgorithm(2, outer=algorithms.Outer(getattr(torch.optim, kind), lr=0.1))


def mixed_by(matrix: Matrix) -> Algorithm:
    return algorithms.DecentralizedAlgorithm(peer_selection_mode=graph(matrix))


DION = r"DionOptimizer\(model.parameters\(\), matrix_rank=2"


@pytest.mark.parametrize(
    ("algorithm", "optimizers", "said"),
    [
        (algorithms.QAdamAlgorithm(), sgd, "no QAdamOptimizer steps"),
        (
            algorithms.QAdamAlgorithm(),
            lambda own: [optim.QAdamOptimizer(own[1:]), sgd(own[:1])],
            r"no QAdamOptimizer steps 0\.weight",
        ),
        (algorithms.QAdamAlgorithm(optim.QAdamOptimizer(mlp().parameters())), optim.QAdamOptimizer, "q_adam_optimizer"),
        (
            algorithms.QAdamAlgorithm(),
            lambda own: [optim.QAdamOptimizer(own[1:]), optim.QAdamOptimizer(own[:1], warmup_steps=7)],
            "one number of warmup_steps",
        ),
        (algorithms.OneBitLambAlgorithm(), optim.QAdamOptimizer, "OneBitLambOptimizer"),
        (algorithms.DionAlgorithm(matrix_rank=2), sgd, DION),
        (algorithms.DionAlgorithm(matrix_rank=2), lambda own: optim.DionOptimizer(own, matrix_rank=3), DION),
        (
            algorithms.DionAlgorithm(matrix_rank=2),
            lambda own: optim.DionOptimizer(own, matrix_rank=2, momentum=0.5),
            DION,
        ),
        (algorithms.LowPrecisionDecentralizedAlgorithm(), lambda own: sgd(own[:3]), r"2\.bias"),
        (algorithms.LowPrecisionDecentralizedAlgorithm(topology=ONE_WAY), sgd, "same weight"),
        (mixed_by([[0.5, 0.5], [0.5, 0.5]]), sgd, "number of ranks"),
        (mixed_by(torch.ones(3, 3)), sgd, "sum to 1"),
        (diloco_with("Adafactor"), sgd, "'row_var', which is neither|'col_var', which is neither"),
        pytest.param(diloco_with("Muon"), sgd, "only supports 2D parameters", marks=MUON),
        (diloco_with("LBFGS"), sgd, "closure"),
        (diloco_with("SparseAdam"), sgd, "dense gradients"),
    ],
)
@on_ranks(3)
def test_models_that_an_algorithm_cannot_train_are_refused_when_they_are_wrapped(algorithm, optimizers, said):
    model = mlp()
    made = optimizers(list(model.parameters()))
    with pytest.raises(ConfigurationError, match=said):
        with_bagua(model, made if isinstance(made, list) else [made], algorithm)
