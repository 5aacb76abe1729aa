"""Declarations and the registry: values that can be printed, compared and pickled, and that refuse wrong options."""

import inspect
import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

import bagua.comm
from bagua import algorithms, optim, primitives
from bagua.algorithms import Algorithm, DistributedAlgorithm, Registry, as_algorithm, registry
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


@pytest.mark.parametrize("value", [None, 3, algorithms.GradientAllReduceAlgorithm])
def test_what_is_no_algorithm_is_a_type_error(value):
    with pytest.raises(TypeError, match="algorithm"):
        as_algorithm(value)


def test_a_name_is_text_and_belongs_to_one_declaration():
    with pytest.raises(InvalidTypeError, match="the name of an algorithm"):
        Registry().get(["allreduce"])
    with pytest.raises(InvalidTypeError, match="the name of a codec"):
        Codec.init(["sign"])
    own: Registry[type] = Registry()
    own.register("a", int)
    own.register("a", int)
    with pytest.raises(ConfigurationError, match="name"):
        own.register("a", str)
    assert (list(own), len(own)) == (["a"], 1)


@pytest.mark.parametrize("name", list(registry))
def test_an_option_for_hosts_says_that_there_are_two_forms(name):
    declaration = registry.get(name)()
    assert isinstance(declaration, algorithms.ByHost) == hasattr(declaration, "hierarchical")
    if isinstance(declaration, algorithms.ByHost):
        forms = [declaration.in_form(hierarchical=one) for one in (False, True)]
        assert [one.is_hierarchical for one in forms] == [one.hierarchical for one in forms] == [False, True]
    else:
        assert declaration.is_hierarchical is None
        with pytest.raises(ConfigurationError, match="no hierarchical form"):
            declaration.in_form(hierarchical=True)


def test_there_is_no_hierarchical_form_where_hosts_train_or_the_option_is_a_namesake():
    with pytest.raises(ConfigurationError, match="no hierarchical form"):
        Algorithm.init("diloco", inner="gradient_allreduce").in_form(hierarchical=False)

    @dataclass(frozen=True)
    class Namesake(Algorithm):
        hierarchical: str = "yes"

        def exchanges(self, phase=0):
            return algorithms.GradientAllReduceAlgorithm().exchanges()

    assert Namesake().is_hierarchical is None


def test_the_constructor_of_an_implementation_shows_its_arguments():
    signature = inspect.signature(algorithms.AsyncModelAverageAlgorithmImpl)
    positional = [parameter for parameter in signature.parameters.values() if parameter.kind.name != "KEYWORD_ONLY"]
    names = ["process_group", "peer_selection_mode", "sync_interval_ms", "warmup_steps"]
    assert [one.name for one in positional] == names
    assert [one.default for one in positional] == [inspect.Parameter.empty, "all", 500, 0]
    for declaration in map(registry.get, registry):
        options = inspect.signature(declaration).parameters
        assert list(inspect.signature(declaration.implementation).parameters) == ["process_group", *options]


def test_an_implementation_takes_each_form_of_group(thread_ranks):
    def bind():
        world = bagua.comm.get_default_group()
        return [algorithms.AsyncModelAverageAlgorithmImpl(group).process_group is world for group in (world, None)]

    assert thread_ranks(2, bind) == [[True, True]] * 2
    with pytest.raises(NotInitializedError):
        algorithms.AsyncModelAverageAlgorithmImpl(None)
    with pytest.raises(InvalidTypeError, match="argument process_group"):
        algorithms.AsyncModelAverageAlgorithmImpl("all")


MUON = needs("torch.optim.Muon", hasattr(torch.optim, "Muon"))
GATHERED = primitives.AllGatherReducer(TopK())
#: For each option that is true or false, what is neither.
NO_FLAGS = {
    name: {one.name: ["no", 1, None] for one in fields(registry.get(name)) if isinstance(one.default, bool)}
    for name in registry
}
#: Values that an option cannot have, whatever the others are.
REFUSED: dict[Any, dict[str, list[Any]]] = {
    "async": {"peer_selection_mode": ["shift_one", 3], "sync_interval_ms": [-1], "warmup_steps": [1.0]},
    "bytegrad": {"warmup_steps": [-1]},
    "decentralized": {"communication_interval": [0], "peer_selection_mode": ["sideways", 3]},
    "diloco": {
        "anchor_device": ["cuda"], "anchor_dtype": ["float16"], "blend": [0.5], "codec": [4],
        "error_feedback": [True], "fragment_order": ["random"], "outer": ["adam"], "outer_lr": [0.0],
        "outer_momentum": [1.0], "sync_every": [None],
    },
    "dion": {"matrix_rank": [0], "momentum": [1.0]},
    "local_sgd": {"overlap": [-1], "start_after": [-1], "sync_every": [0]},
    "loco": {"averaging": [0.0], "block_numel": [12], "reset_every": [0]},
    "low_precision_decentralized": {
        "codec": ["minmax_uint8", "sign"], "communication_interval": [True], "topology": ["sideways"],
    },
    "one_bit_adam": {"block_numel": [12]}, "one_bit_lamb": {"block_numel": [12]},
    "power_sgd": {"matrix_rank": [0], "momentum": [1.0]},
    "qadam": {"q_adam_optimizer": [3]},
    "sign_sgd": {"block_numel": [12], "warmup_steps": [1.5]},
    "slowmo": {"alpha": [0.0], "beta": [1.0], "inner": [3]},
    "sparse_loco": {"average": ["some"], "error_feedback": [0.0], "kept": [0], "outer_lr": [0.0]},
    "top_k": {"clip_norm": [1.0], "density_steps": [-1], "momentum": [1.0], "ratio": [0, 1.5]},
}  # fmt: skip


def rows_of(table: dict[Any, dict[str, list[Any]]], *more: Any) -> list[tuple[Any, ...]]:
    return [(kind, key, wrong, *more) for kind, its in table.items() for key, values in its.items() for wrong in values]


@pytest.mark.parametrize(
    ("name", "option", "wrong", "error"), [*rows_of(REFUSED, ConfigurationError), *rows_of(NO_FLAGS, InvalidTypeError)]
)
def test_options_of_algorithms(name, option, wrong, error):
    facts = option, repr(wrong)
    with pytest.raises(error, match=option, check=lambda error: (error.argument, error.seen) == facts):
        Algorithm.init(name, **{option: wrong})


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("top_k", {"momentum": 0.9, "clip_norm": 0.0}, "clip_norm"),
        ("sparse_loco", {"error_feedback": "buffer", "hierarchical": False}, "error_feedback"),
        ("diloco", {"codec": "int4", "error_feedback": 1.5}, "error_feedback"),
        ("low_precision_decentralized", {"topology": "shift_one"}, "stay the same"),
        ("low_precision_decentralized", {"topology": DRAWN_PAIRS}, "stay the same"),
        ("low_precision_decentralized", {"codec": TopK()}, "drop most of each update.*DiLoCoAlgorithm"),
        ("low_precision_decentralized", {"codec": BlockTopK()}, "drop most of each update.*DiLoCoAlgorithm"),
        ("low_precision_decentralized", {"codec": Int2()}, "drop most of each update.*DiLoCoAlgorithm"),
        ("diloco", {"inner": "decentralized"}, "sums gradients in each step"),
        ("diloco", {"inner": "local_sgd"}, "sums gradients in each step"),
        ("local_sgd", {"inner": "qadam"}, "sums gradients in each step"),
        ("local_sgd", {"inner": Algorithm.init("local_sgd", inner="bytegrad")}, "sums gradients in each step"),
        ("sparse_loco", {"inner": "bytegrad", "hierarchical": False}, "hosts exchange in place of ranks"),
        ("sparse_loco", {"inner": "bytegrad", "error_feedback": "weights"}, "each rank exchanges for itself"),
        ("sparse_loco", {"error_feedback": "weights"}, "argument hierarchical, expected False"),
        ("local_sgd", {"start_with": "bytegrad"}, "no steps begin the training"),
        ("slowmo", {"start_after": 2, "start_with": "qadam"}, "sums gradients in each step"),
        ("diloco", {"start_after": 2, "start_with": "dion"}, "an optimizer of its own"),
        ("diloco", {"start_after": 2, "start_with": None}, "start_with"),
        ("diloco", {"outer": algorithms.Outer(torch.optim.Adam, lr=0.1), "outer_lr": 0.1}, "outer_lr"),
        ("diloco", {"sync_every": 4, "overlap": 4}, "less than sync_every, which is 4"),
        ("local_sgd", {"sync_every": 4, "overlap": 4}, "less than sync_every, which is 4"),
        ("local_sgd", {"codec": "nothing"}, "codec"),
        ("local_sgd", {"codec": "topk"}, "keeps 5%"),
        ("diloco", {"sync_every": 4, "fragments": 5}, "at most sync_every, which is 4"),
        ("diloco", {"overlap": 1, "blend": 1.5}, "blend"),
        ("diloco", {"overlap": 1, "blend": 0.5, "mix": "add"}, "blend"),
        ("diloco", {"eager": True, "overlap": 1}, "overlap"),
        ("diloco", {"eager": True, "mix": "add"}, "mix"),
    ],
)
def test_options_that_cannot_work_together(name, options, said):
    with pytest.raises(ConfigurationError, match=said):
        Algorithm.init(name, **options)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: primitives.AllGatherReducer(3), "codec"),
        (lambda: primitives.ScatterGatherReducer("sign"), "codec"),
        (lambda: primitives.ErrorFeedback(3), "reducer"),
        (lambda: primitives.ErrorFeedback(GATHERED, 0.0), "decay"),
        (lambda: primitives.ErrorFeedback(GATHERED, 1.1), "decay"),
        (lambda: primitives.ErrorFeedback(primitives.EF21(GATHERED)), "reducer"),
        (lambda: primitives.EF21(primitives.ErrorFeedback(GATHERED)), "reducer"),
        (lambda: primitives.EF21(TopK()), "reducer"),
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
    with pytest.raises(ConfigurationError, check=lambda error: error.argument == argument):
        make()


#: What no optimizer of the family of Adam takes.
WRONG = {
    "lr": ["x", torch.ones(2), None, -1.0, math.nan],
    "betas": [0.9, (0.9,), ("x", "y"), (0.9, 1.0), (1.0, 0.9)],
    "eps": ["x", -1e-8],
    "weight_decay": [math.nan, -0.1],
}
OPTIMIZERS = {
    optim.AccumAdam: WRONG,
    optim.AccumAdamW: {**WRONG, "accum_iter": [0]},
    optim.QAdamOptimizer: {**WRONG, "warmup_steps": [0, 1.5]},
    optim.OneBitLambOptimizer: {"ratio_beta": [1.0], "warmup_steps": [0]},
}


@pytest.mark.parametrize(("kind", "argument", "wrong"), rows_of(OPTIMIZERS))
def test_optimizers(kind, argument, wrong):
    with pytest.raises(ConfigurationError, check=lambda error: error.argument == argument):
        kind([torch.nn.Parameter(torch.ones(3, 3))], **{argument: wrong})


@pytest.mark.parametrize(
    "function", [optim.optim_fn_accum_adam, optim.optim_fn_accum_adamw, optim.optim_fn_adam, optim.optim_fn_adamw]
)
@pytest.mark.parametrize(
    ("argument", "wrong"), [("weight_decay", -1.0), ("weight_decay", "x"), ("lr", "x"), ("beta1", None), ("eps", "x")]
)
def test_makers_of_optimizers(function, argument, wrong):
    with pytest.raises(ConfigurationError, check=lambda error: error.argument in (argument, "betas")):
        function(list(torch.nn.Linear(1, 1).named_parameters()), **{argument: wrong})


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [("t_max", 0), ("t_max", "x"), ("t_warmup", -1), ("cosine_eta_min", "x"), ("warmup_decay", None)],
)
def test_the_maker_of_schedules(argument, wrong):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigurationError, check=lambda error: error.argument == argument):
        optim.lr_scheduler_fn_cosine_with_warmup(optimizer, **{"t_max": 2, "t_warmup": 1, argument: wrong})


def diloco_with(kind: str) -> Algorithm:
    return algorithms.DiLoCoAlgorithm(2, outer=algorithms.Outer(getattr(torch.optim, kind), lr=0.1))


def mixed_by(matrix: Matrix) -> Algorithm:
    return algorithms.DecentralizedAlgorithm(peer_selection_mode=graph(matrix))


QAdam, DION = optim.QAdamOptimizer, algorithms.DionAlgorithm(matrix_rank=2)
ITS_OPTIMIZER = r"DionOptimizer\(model.parameters\(\), matrix_rank=2"


@pytest.mark.parametrize(
    ("algorithm", "optimizers", "said"),
    [
        ("qadam", sgd, "no QAdamOptimizer steps"),
        ("qadam", lambda own: [QAdam(own[1:]), sgd(own[:1])], r"no QAdamOptimizer steps 0\.weight"),
        (algorithms.QAdamAlgorithm(QAdam(mlp().parameters())), QAdam, "q_adam_optimizer"),
        ("qadam", lambda own: [QAdam(own[1:]), QAdam(own[:1], warmup_steps=7)], "one number of warmup_steps"),
        ("one_bit_lamb", QAdam, "OneBitLambOptimizer"),
        (DION, sgd, ITS_OPTIMIZER),
        (DION, lambda own: optim.DionOptimizer(own, matrix_rank=3), ITS_OPTIMIZER),
        (DION, lambda own: optim.DionOptimizer(own, matrix_rank=2, momentum=0.5), ITS_OPTIMIZER),
        ("low_precision_decentralized", lambda own: sgd(own[:3]), r"2\.bias"),
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
