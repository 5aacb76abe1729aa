"""Ranks or hosts that train alone for many steps: local SGD, SlowMo and DiLoCo, against what their papers say."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua.comm
import bagua.torch_api
from bagua.algorithms import (
    Add,
    Algorithm,
    Blend,
    Difference,
    DiLoCoAlgorithm,
    Every,
    Exchange,
    Gradients,
    LocalSGDAlgorithm,
    LocalUpdates,
    Mean,
    Outer,
    OuterStep,
    Parts,
    Replace,
    SlowMoAlgorithm,
    SlowStep,
    SparseLoCoAlgorithm,
    Then,
    Weights,
    around,
)
from bagua.algorithms.exchanges import outer
from bagua.compression import MinMaxUInt8
from bagua.errors import CommunicatorClosedError, ConfigurationError
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer
from bagua.parallel import with_bagua
from bagua.primitives import ErrorFeedback, PowerSGDReducer, ReducerMemory, ScatterGatherReducer, SumReducer
from tests.algorithms.stacked import Anchored, Replicas, loss_of, model_of, plain_sgd
from tests.contract.algorithms import AlgorithmContract, spread
from tests.harness import (
    Losses,
    OptimizerMaker,
    State,
    assert_close,
    assert_same_on_all_ranks,
    live_bytes,
    mlp,
    seeded,
    sgd,
    snapshot,
)
from tests.parallel.wrapping import Branches, Loop, Operations, of_this_rank, on_ranks
from tests.versions import needs

STEPS = 13
RATE = 0.1
NESTEROV = Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
MUON = needs("torch.optim.Muon", hasattr(torch.optim, "Muon"))


def outer_step(reducer: SumReducer | None = None, land: Then = Replace(), **options: Any) -> Exchange:  # noqa: B008 - a value
    options = {"when": Every(4), "then": OuterStep(NESTEROV, land), **options}
    return Exchange(Difference(), how=Mean(reducer), **options)


class TestLocalUpdates(AlgorithmContract):
    sizes = (2, 3)

    @pytest.fixture(
        params=[
            LocalSGDAlgorithm(3),
            SlowMoAlgorithm(4),
            DiLoCoAlgorithm(4, fragments=2, overlap=1, codec=MinMaxUInt8(), error_feedback=True),
            DiLoCoAlgorithm(3, eager=True, average_buffers=True),
            # Families that the engine knows nothing of.
            Algorithm.of(Exchange(Weights(), Every(4), Mean(ScatterGatherReducer(MinMaxUInt8())), Replace())),
            Algorithm.of(outer_step(land=Blend(0.5), when=Every(6, offset=-2), lag=2, parts=Parts(3, "strided"))),
            around("decentralized", outer_step(when=Every(3), then=SlowStep(0.5), label="outer")),
        ],
        ids=["local_sgd", "slowmo", "diloco", "eager", "weights in bytes", "streaming", "around gossip"],
    )
    def algorithm(self, request):
        return request.param

    # An outer momentum goes on without gradients, and one rank alone looks ahead: tests of their own are below.
    test_training_gives_what_is_promised = None
    test_host_layouts_work_or_are_refused = None
    test_the_suite_notices_that_nothing_is_exchanged = None


@pytest.mark.parametrize(
    ("algorithm", "hosts"),
    [
        (DiLoCoAlgorithm(4, start_after=3, start_with="power_sgd"), [2]),
        (LocalSGDAlgorithm(3, start_after=4), [2]),
        (Algorithm.of(Exchange(Gradients(), Every(), Mean(), Replace(), lag=2)), [2]),
        (SparseLoCoAlgorithm(3, start_after=4, block_numel=8, kept=4), [2]),
        (SparseLoCoAlgorithm(4, start_after=0, error_feedback="weights", hierarchical=False), [2]),
        (Algorithm.of(outer_step(ErrorFeedback(PowerSGDReducer(1)), lag=2)), [2]),
        (around("decentralized", outer_step(when=Every(6), lag=4, label="outer")), [2]),
        (DiLoCoAlgorithm(4, fragments=2, overlap=2, codec="int4", error_feedback=True, inner="bytegrad"), [2, 2]),
    ],
    ids=["power_sgd", "local_sgd", "late gradients", "sparse_loco", "in weights", "factors", "gossip", "hosts"],
)
def test_what_has_phases_or_a_delay_resumes_at_each_step_and_knows_no_scale(algorithm, hosts, pool):
    contract = AlgorithmContract()
    on_hosts = SimpleNamespace(run=lambda *arguments, size: pool.run(*arguments, hosts=hosts))
    contract.test_training_resumes_bit_exactly_with_the_saved_buckets(algorithm, on_hosts)
    contract.test_the_scale_of_the_loss_changes_nothing(algorithm, on_hosts)


def test_streaming_is_an_exchange_of_parts_that_starts_earlier():
    """test_pairs.py trains with such exchanges of any parts and lag, and says what has to come of it."""
    options = {"outer_lr": 0.7, "outer_momentum": 0.9, "hierarchical": False}
    blended = DiLoCoAlgorithm(6, fragments=3, overlap=2, blend=0.5, **options).outer_exchange
    parts = Parts(3, "strided")
    assert blended == outer_step(land=Blend(0.5), when=Every(6, offset=-2), lag=2, parts=parts)
    learned = DiLoCoAlgorithm(6, fragments=2, fragment_order="bytes", mix="add", **options).outer_exchange
    assert learned == outer_step(land=Add(), when=Every(6), parts=Parts(2, "bytes"))
    coded = DiLoCoAlgorithm(4, codec="minmax_uint8", error_feedback=0.9, **options).outer_exchange
    reducer = ErrorFeedback(ScatterGatherReducer(MinMaxUInt8()), 0.9)
    assert coded == outer_step(reducer, parts=Parts(1, "strided"))


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.5)


def train(algorithm: Algorithm | str) -> State:
    return train_and_watch(algorithm)[-1]


def loop_of(algorithm: Algorithm | str, make: Callable[[], nn.Module] = mlp, **options: Any) -> Loop:
    return Loop("with_bagua", make, optimizer_of, algorithm=algorithm, **options)


def train_and_watch(algorithm: Algorithm | str, steps: int = STEPS, finish: bool = False) -> list[State]:
    """The weights when each ``optimizer.step()`` has returned, and after a closing exchange."""
    loop = loop_of(algorithm, of_this_rank)
    watched = [loop.train() for _ in range(steps)]
    if finish:
        loop.wrapped.bagua_finish()
        watched.append(snapshot(loop.model))
    return watched


def mean_of(weights: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.stack([one[name] for one in weights]).mean(dim=0)


# Special cases of each other.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DiLoCoAlgorithm(4, outer="sgd", outer_lr=1.0, outer_momentum=0.0), LocalSGDAlgorithm(4)),
        (LocalSGDAlgorithm(4, start_after=100, start_with="power_sgd"), Algorithm.init("power_sgd")),
    ],
)
def test_special_cases_are_equal(thread_ranks, one, other):
    for state, expected in zip(thread_ranks(2, train, one), thread_ranks(2, train, other), strict=True):
        assert_close(state, expected)


@pytest.mark.parametrize(("codec", "overlap"), [("int4", 0), (None, 3), ("int4", 3)])
def test_local_sgd_in_few_bits_or_with_overlap_is_a_whole_step_along_what_was_learned(codec, overlap):
    found = LocalSGDAlgorithm(4, codec=codec, overlap=overlap, inner="gradient_allreduce").outer_exchange
    mix = "add" if overlap else "blend"
    outer = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}
    options = {"codec": codec, "overlap": overlap, "mix": mix, "inner": "gradient_allreduce"}
    assert found == DiLoCoAlgorithm(4, **outer, **options).outer_exchange
    flat = LocalSGDAlgorithm(4, codec=codec, overlap=overlap, hierarchical=False).outer_exchange
    assert not flat.how.hierarchical


# Against the papers.


@pytest.mark.parametrize("algorithm", [LocalSGDAlgorithm(1), DiLoCoAlgorithm(2, overlap=1)], ids=["here", "beside"])
def test_no_thread_waits_for_a_thread_that_waits(thread_ranks, monkeypatch, algorithm):
    """What is waited for at once is made where that happens: in the thread that trains, or in that of the lane."""
    allreduce, apart = bagua.comm.Communicator.allreduce, set()

    def note(self, tensor, *arguments, async_op=False, **options):
        apart.add(async_op)
        return allreduce(self, tensor, *arguments, async_op=async_op, **options)

    monkeypatch.setattr(bagua.comm.Communicator, "allreduce", note)
    thread_ranks(2, train, algorithm)
    assert apart == {False}


def test_slow_momentum_divides_by_the_learning_rate_of_the_last_step(thread_ranks):
    beta, alpha, every = 0.5, 0.8, 3

    def train_on_a_schedule() -> State:
        loop = loop_of(SlowMoAlgorithm(every, beta=beta, alpha=alpha))
        for number in range(STEPS):
            loop.optimizer.param_groups[0]["lr"] = RATE / (1 + number)
            loop.train()
        return snapshot(loop.model)

    replicas = Replicas(2, optimizer_of)
    anchor, momentum = replicas.mean, torch.zeros_like(replicas.mean)
    for number in range(STEPS):
        rate = RATE / (1 + number)
        for optimizer in replicas.optimizers:
            optimizer.param_groups[0]["lr"] = rate
        replicas.step(number)
        if number % every == every - 1:
            momentum = beta * momentum + (anchor - replicas.mean) / rate
            replicas.rows = anchor = anchor - alpha * rate * momentum
    replicas.assert_equals(thread_ranks(2, train_on_a_schedule))


def test_a_rank_that_skips_an_update_steps_the_anchor_with_the_rate_of_all(thread_ranks):
    """It exchanges in its next forward pass, when its schedule has gone on."""

    def skip() -> tuple[State, str]:
        loop = loop_of(SlowMoAlgorithm(2, beta=0.5))
        schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
        for number in range(4):
            loop.optimizer.zero_grad()
            loop.backward()
            if (loop.rank, number) != (1, 1):
                loop.optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # That the schedule goes on without an update.
                schedule.step()
        return snapshot(loop.model), loop.wrapped.bagua_state_digest()

    (one, digest), (other, same) = thread_ranks(2, skip)
    assert_same_on_all_ranks([one, other])
    assert digest == same


class Halves(nn.Module):
    """Two models that know nothing of each other, or one of them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        for name in names:
            with seeded(len(name)):
                setattr(self, name, nn.Linear(4, 3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return sum(((half(rows) - 1).square().sum() for half in self.children()), start=torch.zeros(()))


#: Learning rates of parameter groups, by the half that each has, and what becomes of them in a step.
RATES = {"left": (0.02, 0.9), "right": (0.003, 1.1)}


def train_halves(algorithm: Algorithm, names: Sequence[str], *, whole: bool) -> State:
    """The weights of the halves ``names``, trained with a group each; their rates change in each step, not alike."""
    model, rank = Halves(names), bagua.comm.get_rank()
    groups = [{"params": list(getattr(model, name).parameters()), "lr": RATES[name][0]} for name in names]
    optimizers = [torch.optim.SGD(groups)] if whole else [torch.optim.SGD([one]) for one in groups]
    wrapped = with_bagua(model, optimizers, algorithm)
    for number in range(STEPS):
        for one in optimizers:
            one.zero_grad()
        with seeded(10 * number + rank):
            rows = torch.randn(5, 4)
        wrapped(rows).backward()
        for one in optimizers:
            one.step()
        for name, group in zip(names, (group for one in optimizers for group in one.param_groups), strict=True):
            group["lr"] *= RATES[name][1]
    return snapshot(model)


@pytest.mark.parametrize("whole", [True, False], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm.init("gradient_allreduce"),
        Algorithm.init("decentralized"),
        LocalSGDAlgorithm(4),
        SlowMoAlgorithm(4, beta=0.5),
        DiLoCoAlgorithm(4),
        DiLoCoAlgorithm(4, overlap=1, blend=0.5),
        DiLoCoAlgorithm(4, overlap=2, mix="add"),
        DiLoCoAlgorithm(4, eager=True),
    ],
    ids=repr,
)
def test_parameter_groups_of_other_rates_train_as_each_would_alone(thread_ranks, algorithm, whole):
    together = thread_ranks(2, functools.partial(train_halves, whole=whole), algorithm, ["left", "right"])
    for name in RATES:
        alone = thread_ranks(2, functools.partial(train_halves, whole=whole), algorithm, [name])
        for both, one in zip(together, alone, strict=True):
            assert_close({key: value for key, value in both.items() if key.startswith(name)}, one)


@pytest.mark.parametrize("loaded_after", range(5, 10))
@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm.init("decentralized"),
        LocalSGDAlgorithm(4),
        SlowMoAlgorithm(4),
        SparseLoCoAlgorithm(4, start_after=0, block_numel=8, kept=4),
        DiLoCoAlgorithm(4),
        DiLoCoAlgorithm(4, overlap=2),
        DiLoCoAlgorithm(4, overlap=2, blend=0.5),
        DiLoCoAlgorithm(4, overlap=3, mix="add"),
        DiLoCoAlgorithm(4, fragments=2, overlap=1),
        DiLoCoAlgorithm(4, eager=True),
    ],
    ids=repr,
)
@on_ranks(2)
def test_nothing_of_before_comes_into_weights_that_are_loaded(algorithm, loaded_after):
    """Nothing is learned after the load, in two periods: any change is a flight, or a momentum, of before."""
    loop = Loop("with_bagua", make_optimizer=plain_sgd, algorithm=algorithm)
    loop.train(loaded_after)
    others = {name: value + 0.5 for name, value in mlp(7).state_dict().items()}
    loop.wrapped.load_state_dict(others)
    loop.optimizer.param_groups[0]["lr"] = 0.0
    assert_close(loop.train(9), others)


@pytest.mark.parametrize("line_numel", [16, 16 * 12, 10**6], ids=["nearly all fused", "a part", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.7},
        {"lr": 0.7, "momentum": 0.6, "maximize": True},
        {"lr": 0.7, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=["plain", "momentum", "nesterov"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_outer_sgd_gets_other_pieces_than_parameters(thread_ranks, monkeypatch, options, line_numel, ranks):
    """It treats each element by itself, so its result is the same bit by bit, in one pass or in several."""
    several = DiLoCoAlgorithm(2, outer=Outer(torch.optim.SGD, foreach=False, **options))
    once = DiLoCoAlgorithm(2, outer=Outer(torch.optim.SGD, **options))
    monkeypatch.setattr(outer, "_PIECE_NUMEL", 7)
    monkeypatch.setattr(outer, "_LINE_NUMEL", line_numel)
    for state, expected in zip(thread_ranks(ranks, train, once), thread_ranks(ranks, train, several), strict=True):
        assert all(torch.equal(one, expected[name]) for name, one in state.items())


#: The passes over memory of an outer step that subtracts the weights first, and a value of one weight.
SEVERAL, ONCE = {"foreach": False}, {"lr": 0.7, "momentum": 0.6, "nesterov": True}


def outer_step_alone(algorithm: Algorithm, value: float) -> State:
    """The weights after three outer steps, one weight of which was ``value`` before the second."""
    torch.manual_seed(0)
    # A parameter of no elements, one that is not stored row by row, and one with something left over at its end.
    model = nn.Sequential(nn.Conv2d(3, 8, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(8, 9))
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 4)))
    optimizer = optimizer_of(model.parameters())
    wrapped = with_bagua(model, [optimizer], algorithm)
    for number in range(6):
        optimizer.zero_grad()
        wrapped(torch.randn(2, 3, 2, 2)).square().mean().backward()
        if number == 3:
            with torch.no_grad():
                model[2].weight[0, 0] = value
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("value", [0.5, 1e25, float("inf"), float("nan")])
def test_one_rank_subtracts_and_steps_in_one_pass(thread_ranks, monkeypatch, value):
    """With the same result bit by bit, also where squares overflow, and where a result is dropped."""
    filled = []
    subtract = bagua.buckets.Bucket.subtract_weights
    monkeypatch.setattr(
        bagua.buckets.Bucket, "subtract_weights", lambda *args, **named: filled.append(1) or subtract(*args, **named)
    )
    algorithms = [DiLoCoAlgorithm(2, outer=Outer(torch.optim.SGD, **ONCE, **more)) for more in ({}, SEVERAL)]
    (state,) = thread_ranks(1, outer_step_alone, algorithms[0], value)
    assert len(filled) == (0 if value == 0.5 else 1 if not math.isfinite(value) else 2)
    (expected,) = thread_ranks(1, outer_step_alone, algorithms[1], value)
    torch.testing.assert_close(state, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_outer_sgd_steps_an_anchor_of_16_bits(thread_ranks, dtype):
    """The fused SGD of torch 2.13 leaves it as it is."""

    def train_one_step() -> tuple[torch.Tensor, torch.Tensor]:
        model = nn.Linear(8, 8, bias=False).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        outer_sgd = Outer(torch.optim.SGD, lr=0.5)
        wrapped = with_bagua(model, [optimizer], DiLoCoAlgorithm(1, outer=outer_sgd, anchor_dtype="weights"))
        before = model.weight.detach().clone()
        wrapped(torch.ones(1, 8, dtype=dtype)).sum().backward()
        optimizer.step()
        return before, model.weight.detach().clone()

    ((before, after),) = thread_ranks(1, train_one_step)
    torch.testing.assert_close(after, before - 0.5, rtol=0.05, atol=0.05)


def makes_a_tensor(function: Any, made: Any, least: int) -> bool:
    """Whether an operation has made a new tensor of at least so many elements."""
    # What writes where it is told to, or returns a view, says so in its schema.
    is_new = isinstance(made, torch.Tensor) and function._schema.returns[0].alias_info is None
    return is_new and made.numel() >= least and made.device.type != "meta"


def test_an_outer_step_takes_the_memory_of_the_one_before(thread_ranks, monkeypatch):
    def made_in_outer_steps(dtype: torch.dtype, **options: Any) -> list[list[str]]:
        diloco = DiLoCoAlgorithm(1, anchor_dtype="weights", **options)
        loop = loop_of(diloco, lambda: nn.Linear(96, 96, bias=False).to(dtype), bucket_bytes=10**6)
        made = []
        for _ in range(2):
            loop.optimizer.zero_grad()
            loop.wrapped(torch.ones(2, 96, dtype=dtype)).square().mean().backward()
            with Operations() as operations:
                loop.optimizer.step()
            found = [one for one, result in operations.noted if makes_a_tensor(one, result, 96 * 96)]
            made.append([one.overloadpacket.__name__ for one in found])
        return made

    # At first the momentum of both optimizers and the memory of a flight.
    ((first, second),) = thread_ranks(1, made_in_outer_steps, torch.float32)
    assert (len(first), second) == (3, [])
    # Adagrad makes tensors of its own, and its state is not copied.
    ((_, second),) = thread_ranks(
        1, functools.partial(made_in_outer_steps, outer=Outer(torch.optim.Adagrad)), torch.float32
    )
    assert "clone" not in second
    monkeypatch.setattr(outer, "_PIECE_NUMEL", 64)
    ((first, second),) = thread_ranks(1, made_in_outer_steps, torch.bfloat16)
    assert (len(first), second) == (3, [])


# What users meet.


def step_with_nan(loop: Loop, spoilt: int | None = 1) -> None:
    loop.optimizer.zero_grad()
    loop.backward()
    if loop.rank == spoilt:
        with torch.no_grad():
            next(loop.model.parameters())[0, 0] = float("nan")
    loop.optimizer.step()


def train_with_nan(algorithm: LocalUpdates) -> tuple[State, State, State]:
    """The weights before, after the exchange of what one rank has spoilt, and a period later."""
    loop = loop_of(algorithm)
    before = snapshot(loop.model)
    loop.train(3)
    step_with_nan(loop)
    loop.reducer.formation.flush()  # What is under way comes in.
    return before, snapshot(loop.model), loop.train(algorithm.sync_every)


@pytest.mark.parametrize(
    "algorithm",
    [SlowMoAlgorithm(4), DiLoCoAlgorithm(4), DiLoCoAlgorithm(4, eager=True)],
    ids=["slowmo", "diloco", "eager"],
)
def test_a_rank_that_diverged_is_named_on_all_and_goes_back_to_the_anchor(thread_ranks, caplog, algorithm):
    (_, well, end), (anchor, diverged, same) = thread_ranks(2, train_with_nan, algorithm)
    said = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert len(said) == 2
    assert all("not finite on rank 1" in one and "dropped on all ranks" in one for one in said)
    assert all(torch.isfinite(value).all() for state in (well, end) for value in state.values())
    if not algorithm.outer_exchange.lag:
        assert_close(diverged, anchor)
        assert_same_on_all_ranks([end, same])


@pytest.fixture
def uncleared_memory():
    """New memory is full of NaN. Torch can fill it like that to show which code relies on its contents."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train_with_gaps(algorithm: Algorithm, *, spoilt: int | None = None) -> State:
    """There are gaps between the parameters."""
    with seeded():
        model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 4))
    loop = loop_of(algorithm, lambda: model)
    loop.train()
    step_with_nan(loop, spoilt)
    return snapshot(loop.model)


def test_a_dropped_result_leaves_a_rank_alone_whose_weights_are_finite(thread_ranks, uncleared_memory, caplog):
    alone = thread_ranks(2, train_with_gaps, LocalSGDAlgorithm(100))
    well, _ = thread_ranks(2, functools.partial(train_with_gaps, spoilt=1), DiLoCoAlgorithm(2))
    assert_close(well, alone[0])
    assert "weights that are not finite on rank 1" in caplog.text


def test_weights_are_blended_whatever_lies_between_them(thread_ranks, uncleared_memory):
    alone = thread_ranks(2, train_with_gaps, LocalSGDAlgorithm(100))
    exchange = Exchange(Weights(), Every(2), Mean(), Blend(0.5), parts=Parts(1, "strided"))
    for state, own in zip(thread_ranks(2, train_with_gaps, Algorithm.of(exchange)), alone, strict=True):
        assert_close(state, {name: (one + mean_of(alone, name)) / 2 for name, one in own.items()})


@pytest.mark.parametrize(
    "outer",
    [NESTEROV, *(Outer(getattr(torch.optim, name), lr=0.1) for name in ("Adagrad", "NAdam", "Rprop", "ASGD"))],
    ids=repr,
)
@pytest.mark.parametrize("size", [1, 2])
def test_outer_optimizers_step_the_anchor(thread_ranks, outer, size):
    expected = Anchored(size, outer.make, make_optimizer=optimizer_of)
    for number in range(STEPS):
        expected.step(number)
        if number % 4 == 3:
            expected.outer_step()
    expected.assert_equals(thread_ranks(size, train, DiLoCoAlgorithm(4, outer=outer)))


def settle_and_interrupt(memory: ReducerMemory, flat: torch.Tensor) -> None:
    ReducerMemory.settle(memory, flat)
    raise KeyboardInterrupt("stopped")


def fail(*_: Any) -> None:
    raise RuntimeError("stopped")


@pytest.mark.parametrize(
    "algorithm",
    [
        SlowMoAlgorithm(2),
        SparseLoCoAlgorithm(2, start_after=0),
        DiLoCoAlgorithm(2),
        DiLoCoAlgorithm(2, overlap=1, mix="add"),
        DiLoCoAlgorithm(2, overlap=1, blend=0.5),
        DiLoCoAlgorithm(2, eager=True),
    ],
    ids=["slowmo", "sparse_loco", "diloco", "add", "blend", "eager"],
)
@pytest.mark.parametrize("begins", [True, False], ids=["begins", "ends"])
@on_ranks(1)
def test_a_state_that_a_fold_has_left_half_way_cannot_be_saved(algorithm, begins):
    """What the reducer remembers has changed already when it begins."""
    loop = loop_of(algorithm)
    loop.train(3)
    assert loop.wrapped.bagua_state_dict()["step"] == 3
    for course in loop.reducer.scheduler.courses:
        if begins:
            course.memory.settle = functools.partial(settle_and_interrupt, course.memory)
        course.bucket.write_weights = fail
    with pytest.raises((RuntimeError, KeyboardInterrupt), match="stopped"):
        loop.train(3)
    with pytest.raises(CommunicatorClosedError, match=r"half-way, so its state cannot be saved.*stopped"):
        loop.wrapped.bagua_state_dict()


def test_slow_momentum_needs_a_learning_rate(thread_ranks):
    """The error comes before anything has changed."""

    def train_without_a_rate() -> None:
        loop = loop_of(SlowMoAlgorithm(2))
        loop.train(3)
        loop.optimizer.param_groups[0]["lr"] = 0.0
        anchor = loop.wrapped.bagua_state_dict()
        with pytest.raises(ConfigurationError, match=r"divides by the learning rate.*which is 0"):
            loop.train()
        for name, one in loop.wrapped.bagua_state_dict()["parameters"].items():
            assert all(torch.equal(value, anchor["parameters"][name][key]) for key, value in one.items())

    for size in (1, 2):
        thread_ranks(size, train_without_a_rate)


@MUON
def test_an_outer_optimizer_has_to_step_the_selected_parameters_only():
    parameters, step = list(mlp().parameters()), OuterStep(Outer(torch.optim.Muon, lr=0.1))
    step.check_parameters([one for one in parameters if one.dim() == 2])
    with pytest.raises(ConfigurationError, match="only supports 2D parameters"):
        step.check_parameters(parameters)


@pytest.mark.parametrize(
    "algorithm",
    [LocalSGDAlgorithm(4), SlowMoAlgorithm(4), DiLoCoAlgorithm(4), Algorithm.init("decentralized")],
    ids=["local_sgd", "slowmo", "diloco", "decentralized"],
)
def test_parameters_may_be_unused_where_no_gradients_are_exchanged(thread_ranks, algorithm):
    """Rank 1 never uses the right half, and has no gradient of it."""

    def train_branches() -> State:
        loop = loop_of(algorithm, Branches)
        for number in range(8):
            loop.optimizer.zero_grad()
            left = loop.rank == 1 or number % 2 == 0
            loop.wrapped(torch.full((2, 8), 1.0 + loop.rank), "left" if left else "right").square().mean().backward()
            assert (loop.model.right.weight.grad is None) == left
            loop.optimizer.step()
        assert sum(len(one._post_accumulate_grad_hooks or ()) for one in loop.model.parameters()) == 1
        return snapshot(loop.model)

    states = thread_ranks(2, train_branches)
    if "decentralized" not in repr(algorithm).lower():
        assert_same_on_all_ranks(states)


@pytest.mark.filterwarnings("ignore")  # Torch warns of create_graph, and of reentrant checkpoints.
@on_ranks(2, assert_same_on_all_ranks)
def test_every_pass_that_brings_a_gradient_is_one_step() -> State:
    """Four steps: by a part, in a reentrant checkpoint, through ``autograd.grad`` besides, and by two passes."""
    loop = loop_of(LocalSGDAlgorithm(4), lambda: nn.Sequential(mlp()))
    wrapped, rows = loop.wrapped, torch.full((2, 8), 1.0 + loop.rank)
    for forward in (wrapped[0], lambda rows: checkpoint(wrapped, rows.requires_grad_(), use_reentrant=True)):
        loop.optimizer.zero_grad()
        forward(rows).square().mean().backward()
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    if loop.rank == 0:  # No step: the penalty has no gradient of a parameter.
        torch.autograd.grad(wrapped(rows).sum(), rows)
    wrapped(rows).square().mean().backward(create_graph=True)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    wrapped(rows).square().mean().backward()
    loop.optimizer.step()
    return snapshot(loop.model)


@pytest.mark.parametrize("every", [1, 4])
def test_who_spoils_a_mean_of_weights_is_named_on_all_ranks(thread_ranks, caplog, every):
    (_, first, _), (_, spoilt, _), (_, third, _) = thread_ranks(3, train_with_nan, LocalSGDAlgorithm(every))
    said = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert len(said) >= 3
    assert all("not finite on rank 1" in one and "Go on from a checkpoint" in one for one in said)
    assert all(torch.isfinite(value).all() for state in (first, third) for value in state.values())
    assert not all(torch.isfinite(value).all() for value in spoilt.values())


def test_the_outer_optimizer_follows_the_period_unless_it_is_given():
    def optimizer(*arguments: Any, **options: Any) -> Outer:
        step = DiLoCoAlgorithm(*arguments, **options).outer_exchange.then
        assert isinstance(step, OuterStep)
        return step.optimizer

    for period, rate, momentum in ((1, 0.7, 0.6), (31, 0.7, 0.6), (32, 1.0, 0.6), (499, 1.0, 0.6), (500, 0.7, 0.9)):
        assert optimizer(period) == Outer(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=True)
    assert optimizer(500, outer_lr=0.4) == Outer(torch.optim.SGD, lr=0.4, momentum=0.9, nesterov=True)
    assert optimizer(20, outer_momentum=0.0) == Outer(torch.optim.SGD, lr=0.7, momentum=0.0, nesterov=False)


# Eager.


class Eager(Replicas):
    """R5 on all ranks in one process, with an anchor and an outer optimizer for each."""

    def __init__(self, size: int, momentum: float) -> None:
        super().__init__(size, optimizer_of)
        self.anchors = nn.Parameter(self.rows)
        self.outer = torch.optim.SGD([self.anchors], lr=0.7, momentum=momentum)
        self.last: torch.Tensor | None = None

    def late(self) -> torch.Tensor:
        """What the others had in the last period."""
        return self.last.mean(dim=0) - self.last / len(self.models)

    def end_period(self) -> None:
        now = self.anchors.detach() - self.rows
        self.anchors.grad = now / len(self.models) + (0.0 if self.last is None else self.late())
        self.outer.step()
        self.rows, self.last = self.anchors.detach(), now


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_eager_steps_take_the_others_in_a_period_later(thread_ranks, momentum):
    """The closing exchange takes in what is left of the last period: here without a momentum of it."""
    expected = Eager(3, momentum)
    algorithm = DiLoCoAlgorithm(4, outer="sgd", outer_lr=0.7, outer_momentum=momentum, eager=True)
    watched = thread_ranks(3, train_and_watch, algorithm, 12, True)
    for number in range(12):
        expected.step(number)
        if number % 4 == 3:
            expected.end_period()
        expected.assert_equals([one[number] for one in watched])
    assert_same_on_all_ranks([one[-1] for one in watched])
    if not momentum:
        expected.rows = expected.anchors.detach() - 0.7 * expected.late()
        expected.assert_equals([one[-1] for one in watched])


# The end.


@pytest.mark.parametrize(
    "algorithm",
    [
        LocalSGDAlgorithm(4),
        DiLoCoAlgorithm(4, fragments=2, overlap=3),
        DiLoCoAlgorithm(4, eager=True),
        SparseLoCoAlgorithm(4, start_after=0, error_feedback="weights", hierarchical=False),
        Algorithm.init("decentralized", peer_selection_mode="shift_one"),
        Algorithm.init("gradient_allreduce"),
    ],
    ids=["local_sgd", "diloco", "eager", "sparse_loco", "decentralized", "gradient_allreduce"],
)
def test_finish_makes_one_model_with_which_training_goes_on(thread_ranks, algorithm):
    def finish_and_go_on() -> tuple[State, State, State]:
        loop = loop_of(algorithm)
        before = loop.train(7)
        loop.wrapped.bagua_finish()
        return before, snapshot(loop.model), loop.train(5)

    before, after, later = zip(*thread_ranks(2, finish_and_go_on), strict=True)
    assert_same_on_all_ranks(after)
    if not algorithm.ranks_differ:
        assert all(torch.equal(one, after[0][name]) for name, one in before[0].items())
    if isinstance(algorithm, LocalSGDAlgorithm):
        assert_close(after[0], {name: mean_of(list(before), name) for name in before[0]})
        assert_same_on_all_ranks(later)  # The twelfth step is one with an exchange.


@pytest.mark.parametrize(
    "algorithm",
    [LocalSGDAlgorithm(4), DiLoCoAlgorithm(4, fragments=2, overlap=3), DiLoCoAlgorithm(4, eager=True)],
    ids=["local_sgd", "diloco", "eager"],
)
def test_a_look_at_the_mean_of_all_ranks_changes_nothing(thread_ranks, algorithm):
    def look_and_go_on() -> tuple[State, State]:
        loop, inside = loop_of(algorithm, of_this_rank), {}
        for number in range(STEPS):
            loop.train()
            if number in (4, 7, 9):
                with loop.wrapped.bagua_global_average():
                    inside = snapshot(loop.model)
        return inside, snapshot(loop.model)

    watched, looked = thread_ranks(2, train_and_watch, algorithm), thread_ranks(2, look_and_go_on)
    assert_same_on_all_ranks([inside for inside, _ in looked])
    assert_close(looked[0][0], {name: mean_of([one[9] for one in watched], name) for name in watched[0][9]})
    for (_, end), steps in zip(looked, watched, strict=True):
        assert_same_on_all_ranks([steps[-1], end])


def normalized() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))


def test_running_means_become_the_mean_of_all_ranks_if_wanted(thread_ranks):
    def train_normalized(average_buffers: bool) -> list[State]:
        loop, watched = loop_of(DiLoCoAlgorithm(3, overlap=1, average_buffers=average_buffers), normalized), []
        for number in range(3):
            if number == 1:
                loop.model[1].running_mean = loop.model[1].running_mean.clone()  # as load_state_dict(assign=True)
            loop.train()
            watched.append({name: one.detach().clone() for name, one in loop.model.named_buffers()})
        loop.wrapped.bagua_finish()
        return [*watched, {name: one.detach().clone() for name, one in loop.model.named_buffers()}]

    apart, together = thread_ranks(2, train_normalized, False), thread_ranks(2, train_normalized, True)
    for states in zip(*apart, strict=True):
        assert (spread(states) > 1e-4) == (states[0] is not apart[0][-1])
    assert_same_on_all_ranks([states[2] for states in together])
    names = ("1.running_mean", "1.running_var")
    assert_close(
        {name: together[0][2][name] for name in names},
        {name: mean_of([states[2] for states in apart], name) for name in names},
    )
    assert spread([states[1] for states in together]) > 1e-4


# Checkpoints.


@pytest.mark.parametrize("size", [1, 3])
def test_one_file_goes_on_with_any_number_of_ranks(thread_ranks, size):
    """From the anchor and the momentum of the last outer step, and the weights of the rank that saved."""
    # The second exchange started after step 6.
    algorithm = DiLoCoAlgorithm(4, overlap=2, outer_lr=0.7, outer_momentum=0.9)

    def save_on_the_way() -> dict[str, Any]:
        loop = loop_of(algorithm)
        return {"model": loop.train(7), "algorithm": loop.wrapped.bagua_state_dict()}

    def go_on_from(saved: dict[str, Any]) -> tuple[str, State]:
        loop = loop_of(algorithm, functools.partial(mlp, 5))
        loop.wrapped.bagua_load_state_dict(saved["algorithm"])
        loop.model.load_state_dict(saved["model"])
        loop.step = 7
        end = loop.train(5)
        return loop.wrapped.bagua_state_digest(), end

    saved = thread_ranks(2, save_on_the_way)[1]
    assert len(saved["algorithm"]["rank1"]["flights"]) == 1
    anchor = {name: one["anchor"] for name, one in saved["algorithm"]["parameters"].items()}
    momentum = {name: one["outer.momentum_buffer"] for name, one in saved["algorithm"]["parameters"].items()}
    digests, ends = zip(*thread_ranks(size, go_on_from, saved), strict=True)
    assert len(set(digests)) == 1
    replicas = Replicas(size, optimizer_of)
    for model in replicas.models:
        model.load_state_dict(saved["model"])
    for number in range(7, 10):  # The flight is gone: nothing is applied after step 8.
        replicas.step(number)
    sent = replicas.weights()
    for name, value in anchor.items():
        difference = value - mean_of(sent, name)
        slow = 0.9 * momentum[name] + difference
        for end in ends:
            assert torch.allclose(end[name], value - 0.7 * (difference + 0.9 * slow), rtol=1e-4, atol=1e-6)


# Memory.


def copies_of_the_weights(algorithm: Algorithm, make: OptimizerMaker, dtype: torch.dtype, waits: Barrier) -> float:
    """How much more there is on each rank after some steps of ``algorithm``, than a model takes."""
    with seeded():
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).to(dtype)
    optimizer = make(model.parameters())
    waits.wait(60)
    before = live_bytes()
    waits.wait(60)
    wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=600_000)
    for _ in range(6):
        optimizer.zero_grad()
        wrapped(torch.ones(2, 256, dtype=dtype)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    waits.wait(60)
    more = live_bytes() - before
    waits.wait(60)
    return more / sum(one.nbytes for one in model.parameters()) / waits.parties


slow_sgd = functools.partial(torch.optim.SGD, lr=1e-3)
frozen_adam = functools.partial(QAdamOptimizer, lr=1e-4, warmup_steps=1)
frozen_lamb = functools.partial(OneBitLambOptimizer, lr=1e-4, warmup_steps=1)


@pytest.mark.parametrize(
    ("algorithm", "size", "make", "dtype", "expected"),
    [
        (DiLoCoAlgorithm(2), 1, slow_sgd, torch.float32, 3.0),  # the anchor, the momentum, memory for a flight
        (DiLoCoAlgorithm(2, outer="sgd", outer_momentum=0.0), 1, slow_sgd, torch.float32, 2.0),
        # Which is under way.
        (DiLoCoAlgorithm(4, overlap=2, outer="sgd", outer_momentum=0.0), 1, slow_sgd, torch.float32, 2.0),
        (DiLoCoAlgorithm(2), 1, slow_sgd, torch.bfloat16, 5.0),  # two of them in single precision
        (DiLoCoAlgorithm(2, anchor_dtype="weights", anchor_device="cpu"), 1, slow_sgd, torch.bfloat16, 3.0),
        (SlowMoAlgorithm(2), 1, slow_sgd, torch.float32, 3.0),
        # What was sent, and is on its way.
        (DiLoCoAlgorithm(2, eager=True, outer="sgd", outer_momentum=0.0), 1, slow_sgd, torch.float32, 3.0),
        # Gradients, two moments, denominators that do not change any more.
        ("gradient_allreduce", 2, frozen_adam, torch.float32, 4.0),
        ("qadam", 2, frozen_adam, torch.float32, 4.6),  # and messages of a byte for each element, both ways
        ("one_bit_adam", 2, frozen_adam, torch.float32, 6.1),  # residuals, room for the next ones, shorter messages
        ("one_bit_lamb", 2, frozen_lamb, torch.float32, 7.1),  # and the second moment of late
    ],
    ids=["momentum", "plain", "overlap", "bfloat16", "narrow", "slowmo", "eager", "exact", "qadam", "adam", "lamb"],
)
def test_nothing_is_kept_but_what_must_be_and_memory_for_flights(thread_ranks, algorithm, size, make, dtype, expected):
    found = thread_ranks(size, copies_of_the_weights, algorithm, make, dtype, Barrier(size))
    assert found == [pytest.approx(expected, abs=0.1)] * size


def test_the_anchor_may_be_kept_narrow_or_on_the_host(thread_ranks):
    plain = thread_ranks(2, train, DiLoCoAlgorithm(4))
    hosted = thread_ranks(2, train, DiLoCoAlgorithm(4, anchor_device="cpu", anchor_dtype="weights"))
    for state, expected in zip(hosted, plain, strict=True):
        assert all(torch.equal(one, expected[name]) for name, one in state.items())


# Around an optimizer with memory, weight decay and a schedule.


RANKS, LONG, TOGETHER, EVERY = 3, 31, 7, 4


class Inner(torch.optim.AdamW):
    """AdamW whose learning rate falls to nearly nothing."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self, lambda step: 0.505 + 0.495 * math.cos(math.pi * step / LONG)
        )


def train_on_a_cosine() -> list[State]:
    loop = Loop("with_bagua", model_of, Inner, losses=loss_of, algorithm=DiLoCoAlgorithm(EVERY, start_after=TOGETHER))
    watched = []
    for _ in range(LONG):
        watched.append(loop.train())
        loop.optimizer.schedule.step()
    return watched


def test_diloco_around_adam_is_that_of_the_paper_in_every_step(thread_ranks):
    """Adam's moments, its weight decay and its schedule stay each rank's own, and go on across outer steps."""
    watched = thread_ranks(RANKS, train_on_a_cosine)
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)
    expected = Anchored(RANKS, outer, make_optimizer=Inner, make=model_of, losses=loss_of)
    for step in range(LONG):
        expected.backward(step)
        if step < TOGETHER:
            for same in zip(*(model.parameters() for model in expected.models), strict=True):
                mean = torch.stack([one.grad for one in same]).mean(dim=0)
                for one in same:
                    one.grad = mean.clone()
        expected.update()
        if step == TOGETHER - 1:
            expected.anchor.data.copy_(expected.mean)
        elif step >= TOGETHER and (step + 1 - TOGETHER) % EVERY == 0:
            expected.outer_step()
        for optimizer in expected.optimizers:
            optimizer.schedule.step()
        for states, state in zip(watched, expected.states(), strict=True):
            torch.testing.assert_close(states[step], state, rtol=1e-10, atol=1e-12)


# Hosts that train alone, each as one rank would: gradients are exchanged inside them, local updates between them.

INNER = "gradient_allreduce"
OUTER = {"outer": "sgd", "outer_lr": 0.5, "outer_momentum": 0.5}


def loop_in_double(algorithm: Algorithm | str, losses: Losses = loss_of) -> Loop:
    """In double precision."""
    return Loop("with_bagua", lambda: of_this_rank().double(), sgd, losses, algorithm=algorithm)


def train_in_double(algorithm: Algorithm | str, steps: int = STEPS, share: int | None = None) -> list[State]:
    """The weights after each step. With a ``share``, on that many batches in each step."""

    def losses(model: nn.Module, rank: int, number: int) -> torch.Tensor:
        batches = [rank] if share is None else range(rank * share, (rank + 1) * share)
        return sum(loss_of(model, one, number) for one in batches) / len(batches)

    loop = loop_in_double(algorithm, losses)
    return [loop.train() for _ in range(steps)]


def assert_equal_in_double(states: list[State], expected: list[State]) -> None:
    for state, one in zip(states, expected, strict=True):
        for name, value in state.items():
            assert torch.allclose(value, one[name], rtol=0, atol=1e-12), name


class Hosts(Anchored):
    """The same in plain torch: one model for each host, with the mean gradient of its ranks that have data."""

    def __init__(self, sizes: Sequence[int], batches: Sequence[int] = (STEPS,) * 4) -> None:
        def losses(model: nn.Module, host: int, number: int) -> torch.Tensor:
            ranks = range(sum(sizes[:host]), sum(sizes[: host + 1]))
            return sum(loss_of(model, rank, number) * (number < batches[rank]) for rank in ranks) / len(ranks)

        outer = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5)
        super().__init__(len(sizes), outer, make_optimizer=sgd, make=model_of, losses=losses)
        self.parts = torch.tensor(sizes).double() / sum(sizes)

    def average(self, rows: torch.Tensor) -> torch.Tensor:
        return self.parts @ rows


@pytest.mark.parametrize("batches", [(2, 6, 4, 3), (0, 4, 4, 4), (4, 0, 4, 4)], ids=str)
def test_a_host_contributes_what_its_ranks_with_data_learn(thread_pool, batches):
    """Also if its first rank has none, or none any more: gradients of such ranks are zero."""

    def train_while_there_is_data() -> State:
        loop = loop_in_double(LocalSGDAlgorithm(2, inner=INNER))
        with loop.wrapped.join():
            loop.train(batches[loop.rank])
        return snapshot(loop.model)

    expected = Hosts([2, 2], batches)
    for number in range(max(batches)):
        expected.step(number)
        if number % 2:
            expected.rows = expected.mean
    ends = thread_pool.run(train_while_there_is_data, hosts=[2, 2])
    assert_equal_in_double(ends, [expected.states()[0]] * 4)


@pytest.mark.parametrize("hosts", [[2, 2], [1, 3], [1, 1, 1], [3]], ids=str)
def test_hosts_train_as_in_plain_torch(thread_pool, hosts):
    expected = Hosts(hosts)
    watched = thread_pool.run(train_in_double, DiLoCoAlgorithm(4, **OUTER, inner=INNER), hosts=hosts)
    of_host = [host for host, size in enumerate(hosts) for _ in range(size)]
    for number in range(STEPS):
        expected.step(number)
        if number % 4 == 3:
            expected.outer_step()
        ends = [states[number] for states in watched]
        assert_equal_in_double(ends, [expected.states()[host] for host in of_host])
        for host in range(len(hosts)):
            assert_same_on_all_ranks([end for end, its in zip(ends, of_host, strict=True) if its == host])


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda inner: LocalSGDAlgorithm(4, inner=inner),
        lambda inner: SlowMoAlgorithm(4, inner=inner),
        lambda inner: DiLoCoAlgorithm(4, fragments=2, overlap=1, start_after=2, inner=inner),
        lambda inner: DiLoCoAlgorithm(4, eager=True, inner=inner),
        lambda inner: DiLoCoAlgorithm(4, codec="int4", error_feedback=True, inner=inner),
    ],
    ids=["local_sgd", "slowmo", "streaming", "eager", "codec"],
)
def test_a_host_trains_as_one_rank_with_its_data(thread_pool, algorithm: Callable[[Any], LocalUpdates]):
    hosts = thread_pool.run(train_in_double, algorithm(INNER), hosts=[2, 2])
    alone = thread_pool.run(train_in_double, algorithm(None), STEPS, 2, size=2)
    for rank, states in enumerate(hosts):
        assert_equal_in_double(states, alone[rank // 2])


def test_one_host_loses_nothing_to_the_codec_between_hosts(thread_pool):
    options = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "int2", "error_feedback": True}
    algorithm = DiLoCoAlgorithm(4, **options, inner=INNER)
    together = thread_pool.run(train_in_double, INNER, hosts=[3])
    for states, expected in zip(thread_pool.run(train_in_double, algorithm, hosts=[3]), together, strict=True):
        assert_equal_in_double(states, expected)


def bytes_of_an_outer_step() -> dict[str, int]:
    """Bytes that this rank sends on each communicator, in the step after which hosts exchange."""
    loop = Loop("with_bagua", mlp, sgd, algorithm=DiLoCoAlgorithm(4, inner=INNER), bucket_bytes=10**6)
    group = loop.reducer.group
    loop.train(3)
    before = {name: one.statistics.sent_bytes() for name, one in communicators(group)}
    loop.train()
    return {name: one.statistics.sent_bytes() - before[name] for name, one in communicators(group)}


def communicators(group: Any) -> list[tuple[str, Any]]:
    found = [("all", group.global_communicator), ("inside", group.intra_node_communicator)]
    return [*found, ("between", group.inter_node_communicator)] if group.inter_node_communicator else found


def test_one_rank_of_each_host_talks_between_hosts(thread_pool):
    found = thread_pool.run(bytes_of_an_outer_step, hosts=[2, 2])
    weights = sum(one.numel() for one in mlp().parameters()) * 4
    assert [one.get("between", 0) > 0 for one in found] == [True, False, True, False]
    assert all(one["all"] == 0 for one in found)
    assert weights <= found[0]["between"] <= 3 * weights


def test_the_end_makes_one_model_of_all_hosts(thread_pool):
    def finish() -> State:
        loop = loop_in_double(LocalSGDAlgorithm(100, inner=INNER))
        loop.train()
        loop.wrapped.bagua_finish()
        return snapshot(loop.model)

    assert_same_on_all_ranks(thread_pool.run(finish, hosts=[2, 2]))
