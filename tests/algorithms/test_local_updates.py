"""Ranks or hosts that train alone for many steps: local SGD, SlowMo and DiLoCo, against what their papers say."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua.comm
import bagua.torch_api
from bagua import algorithms
from bagua.algorithms import Algorithm, DiLoCoAlgorithm, Every, Exchange, LocalSGDAlgorithm, Mean, Outer, Parts, Weights
from bagua.algorithms.exchanges import outer
from bagua.buckets import Bucket
from bagua.compression import MinMaxUInt8
from bagua.errors import CommunicatorClosedError, ConfigurationError
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer
from bagua.parallel import with_bagua
from bagua.primitives import ErrorFeedback, PowerSGDReducer, ReducerMemory, ScatterGatherReducer, SumReducer
from tests.algorithms.stacked import Anchored, Replicas, loss_of, model_of, plain_sgd
from tests.contract.algorithms import AlgorithmContract, spread
from tests.harness import State, assert_close, assert_same_on_all_ranks, descend, live_bytes, mlp, seeded, sgd, snapshot
from tests.parallel.wrapping import Branches, Loop, Made, Operations, of_this_rank, on_ranks
from tests.versions import needs

STEPS, RATE = 13, 0.1
optimizer_of = functools.partial(torch.optim.SGD, lr=RATE, momentum=0.5)
REPLACE, NESTEROV = algorithms.Replace(), Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
INNER = "gradient_allreduce"  # of hosts
LOCAL_SGD, SLOWMO, DILOCO = LocalSGDAlgorithm(4), algorithms.SlowMoAlgorithm(4), DiLoCoAlgorithm(4)
SHIFTING = algorithms.DecentralizedAlgorithm(peer_selection_mode="shift_one")
EAGER, LATE_PARTS = DiLoCoAlgorithm(4, eager=True), DiLoCoAlgorithm(4, fragments=2, overlap=3)
SPARSE = algorithms.SparseLoCoAlgorithm(4, start_after=0, block_numel=8, kept=4)
IN_WEIGHTS = algorithms.SparseLoCoAlgorithm(4, start_after=0, error_feedback="weights", hierarchical=False)


def each(*kinds: Algorithm | str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("algorithm", [algorithms.as_algorithm(kind) for kind in kinds], ids=repr)


def outer_step(reducer: SumReducer | None = None, land: algorithms.Then = REPLACE, **options: Any) -> Exchange:
    options = {"when": Every(4), "then": algorithms.OuterStep(NESTEROV, land), **options}
    return Exchange(algorithms.Difference(), how=Mean(reducer), **options)


STREAMING = outer_step(land=algorithms.Blend(0.5), when=Every(6, offset=-2), lag=2, parts=Parts(3, "strided"))


class TestLocalUpdates(AlgorithmContract):
    sizes = (2, 3)

    algorithm = pytest.fixture(
        lambda self, request: request.param,
        params=[
            LocalSGDAlgorithm(3),
            algorithms.SlowMoAlgorithm(4),
            DiLoCoAlgorithm(4, fragments=2, overlap=1, codec=MinMaxUInt8(), error_feedback=True),
            DiLoCoAlgorithm(3, eager=True, average_buffers=True),
            # Families that the engine knows nothing of.
            Algorithm.of(Exchange(Weights(), Every(4), Mean(ScatterGatherReducer(MinMaxUInt8())), REPLACE)),
            Algorithm.of(STREAMING),
            algorithms.around("decentralized", outer_step(when=Every(3), then=algorithms.SlowStep(0.5), label="outer")),
        ],
        ids=["local_sgd", "slowmo", "diloco", "eager", "weights in bytes", "streaming", "around gossip"],
    )
    # An outer momentum goes on without gradients, and one rank alone looks ahead: tests of their own are below.
    test_training_gives_what_is_promised = None
    test_host_layouts_work_or_are_refused = None
    test_the_suite_notices_that_nothing_is_exchanged = None


@pytest.mark.parametrize(
    ("algorithm", "hosts"),
    [
        (DiLoCoAlgorithm(4, start_after=3, start_with="power_sgd"), [2]),
        (LocalSGDAlgorithm(3, start_after=4), [2]),
        (Algorithm.of(Exchange(algorithms.Gradients(), Every(), Mean(), REPLACE, lag=2)), [2]),
        (algorithms.SparseLoCoAlgorithm(3, start_after=4, block_numel=8, kept=4), [2]),
        (IN_WEIGHTS, [2]),
        (Algorithm.of(outer_step(ErrorFeedback(PowerSGDReducer(1)), lag=2)), [2]),
        (algorithms.around("decentralized", outer_step(when=Every(6), lag=4, label="outer")), [2]),
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
    assert DiLoCoAlgorithm(6, fragments=3, overlap=2, blend=0.5, **options).outer_exchange == STREAMING
    learned = DiLoCoAlgorithm(6, fragments=2, fragment_order="bytes", mix="add", **options).outer_exchange
    assert learned == outer_step(land=algorithms.Add(), when=Every(6), parts=Parts(2, "bytes"))
    coded = DiLoCoAlgorithm(4, codec="minmax_uint8", error_feedback=0.9, **options).outer_exchange
    reducer = ErrorFeedback(ScatterGatherReducer(MinMaxUInt8()), 0.9)
    assert coded == outer_step(reducer, parts=Parts(1, "strided"))


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


def mean_of(weights: Sequence[State], name: str) -> torch.Tensor:
    return torch.stack([one[name] for one in weights]).mean(dim=0)


@pytest.mark.parametrize(
    ("one", "other", "rtol", "atol"),
    [
        (DiLoCoAlgorithm(4, outer="sgd", outer_lr=1.0, outer_momentum=0.0), LOCAL_SGD, 1e-4, 1e-6),
        (LocalSGDAlgorithm(4, start_after=100, start_with="power_sgd"), Algorithm.init("power_sgd"), 1e-4, 1e-6),
        (DiLoCoAlgorithm(4, anchor_device="cpu", anchor_dtype="weights"), DILOCO, 0.0, 0.0),
    ],
    ids=["a whole step", "never alone", "a narrow anchor on the host"],
)
def test_special_cases_are_equal(thread_ranks, one, other, rtol, atol):
    torch.testing.assert_close(thread_ranks(2, train, one), thread_ranks(2, train, other), rtol=rtol, atol=atol)


@pytest.mark.parametrize(("codec", "overlap"), [("int4", 0), (None, 3), ("int4", 3)])
def test_local_sgd_in_few_bits_or_with_overlap_is_a_whole_step_along_what_was_learned(codec, overlap):
    found = LocalSGDAlgorithm(4, codec=codec, overlap=overlap, inner=INNER).outer_exchange
    options = {"outer_lr": 1.0, "outer_momentum": 0.0, "mix": "add" if overlap else "blend", "inner": INNER}
    assert found == DiLoCoAlgorithm(4, outer="sgd", codec=codec, overlap=overlap, **options).outer_exchange
    flat = LocalSGDAlgorithm(4, codec=codec, overlap=overlap, hierarchical=False).outer_exchange
    assert not flat.how.hierarchical


@each(LocalSGDAlgorithm(1), DiLoCoAlgorithm(2, overlap=1))
def test_no_thread_waits_for_a_thread_that_waits(thread_ranks, algorithm):
    """What is waited for at once is made where that happens: in the thread that trains, or in that of the lane."""
    kind = bagua.comm.Communicator
    with patch.object(kind, "allreduce", autospec=True, side_effect=kind.allreduce) as allreduce:
        thread_ranks(2, train, algorithm)
    assert {call.kwargs.get("async_op", False) for call in allreduce.call_args_list} == {False}


def test_slow_momentum_divides_by_the_learning_rate_of_the_last_step(thread_ranks):
    beta, alpha, every = 0.5, 0.8, 3

    def train_on_a_schedule() -> State:
        loop = loop_of(algorithms.SlowMoAlgorithm(every, beta=beta, alpha=alpha))
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
        loop = loop_of(algorithms.SlowMoAlgorithm(2, beta=0.5))
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


def make_half(name: str) -> nn.Module:
    with seeded(len(name)):
        return nn.Linear(4, 3)


def loss_of_halves(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """They know nothing of each other."""
    return sum(((half(rows) - 1).square().sum() for half in model.children()), start=torch.zeros(()))


@pytest.mark.parametrize("whole", [True, False], ids=["one optimizer", "two optimizers"])
@each(
    "gradient_allreduce", "decentralized", LOCAL_SGD, algorithms.SlowMoAlgorithm(4, beta=0.5), DILOCO, EAGER,
    DiLoCoAlgorithm(4, overlap=1, blend=0.5), DiLoCoAlgorithm(4, overlap=2, mix="add"),
)  # fmt: skip
def test_parameter_groups_of_other_rates_train_as_each_would_alone(thread_ranks, algorithm, whole):
    """Each half of a model is a group, and their learning rates change in each step, not alike."""
    rates = {"left": (0.02, 0.9), "right": (0.003, 1.1)}

    def train_halves(*names: str) -> State:
        model = Made(loss_of_halves, **{name: functools.partial(make_half, name) for name in names})
        groups = [{"params": list(getattr(model, name).parameters()), "lr": rates[name][0]} for name in names]
        optimizers = [torch.optim.SGD(groups)] if whole else [torch.optim.SGD([one]) for one in groups]
        wrapped = with_bagua(model, optimizers, algorithm)
        for number in range(STEPS):
            for one in optimizers:
                one.zero_grad()
            with seeded(10 * number + bagua.comm.get_rank()):
                rows = torch.randn(5, 4)
            wrapped(rows).backward()
            for one in optimizers:
                one.step()
            for name, group in zip(names, (group for one in optimizers for group in one.param_groups), strict=True):
                group["lr"] *= rates[name][1]
        return snapshot(model)

    together = thread_ranks(2, train_halves, *rates)
    for name in rates:
        for both, one in zip(together, thread_ranks(2, train_halves, name), strict=True):
            assert_close({key: value for key, value in both.items() if key.startswith(name)}, one)


@pytest.mark.parametrize("loaded_after", range(5, 10))
@each(
    "decentralized", LOCAL_SGD, SLOWMO, SPARSE, DILOCO, EAGER,
    DiLoCoAlgorithm(4, overlap=2), DiLoCoAlgorithm(4, overlap=2, blend=0.5),
    DiLoCoAlgorithm(4, overlap=3, mix="add"), DiLoCoAlgorithm(4, fragments=2, overlap=1),
)  # fmt: skip
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
    [{}, {"momentum": 0.6, "maximize": True}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    ids=["plain", "momentum", "nesterov"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_outer_sgd_gets_other_pieces_than_parameters(thread_ranks, monkeypatch, options, line_numel, ranks):
    """It treats each element by itself, so its result is the same bit by bit, in one pass or in several."""
    several = DiLoCoAlgorithm(2, outer=Outer(torch.optim.SGD, lr=0.7, foreach=False, **options))
    once = DiLoCoAlgorithm(2, outer=Outer(torch.optim.SGD, lr=0.7, **options))
    monkeypatch.setattr(outer, "_PIECE_NUMEL", 7)
    monkeypatch.setattr(outer, "_LINE_NUMEL", line_numel)
    torch.testing.assert_close(thread_ranks(ranks, train, once), thread_ranks(ranks, train, several), rtol=0, atol=0)


@pytest.mark.parametrize("value", [0.5, 1e25, float("inf"), float("nan")])
def test_one_rank_subtracts_and_steps_in_one_pass(thread_ranks, value):
    """With the same result bit by bit, also where squares overflow, and where a result is dropped."""

    def train_with(**options: Any) -> State:
        """Three outer steps; one weight is ``value`` before the second."""
        torch.manual_seed(0)
        # A parameter of no elements, one that is not stored row by row, and one with something left over at its end.
        model = nn.Sequential(nn.Conv2d(3, 8, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(8, 9))
        model.register_parameter("nothing", nn.Parameter(torch.empty(0, 4)))
        optimizer, outer_sgd = optimizer_of(model.parameters()), Outer(torch.optim.SGD, **options)
        wrapped = with_bagua(model, [optimizer], DiLoCoAlgorithm(2, outer=outer_sgd))
        for number in range(6):
            optimizer.zero_grad()
            wrapped(torch.randn(2, 3, 2, 2)).square().mean().backward()
            if number == 3:
                with torch.no_grad():
                    model[2].weight[0, 0] = value
            optimizer.step()
        return snapshot(model)

    nesterov = functools.partial(train_with, lr=0.7, momentum=0.6, nesterov=True)
    with patch.object(Bucket, "subtract_weights", autospec=True, side_effect=Bucket.subtract_weights) as subtract:
        found = thread_ranks(1, nesterov)
    assert subtract.call_count == (0 if value == 0.5 else 1 if not math.isfinite(value) else 2)
    expected = thread_ranks(1, functools.partial(nesterov, foreach=False))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(1)
def test_an_outer_sgd_steps_an_anchor_of_16_bits(dtype):
    """The fused SGD of torch 2.13 leaves it as it is."""
    model, outer_sgd = nn.Linear(8, 8, bias=False).to(dtype), Outer(torch.optim.SGD, lr=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = with_bagua(model, [optimizer], DiLoCoAlgorithm(1, outer=outer_sgd, anchor_dtype="weights"))
    before = model.weight.detach().clone()
    wrapped(torch.ones(1, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.5, rtol=0.05, atol=0.05)


@on_ranks(1)
def test_an_outer_step_takes_the_memory_of_the_one_before(monkeypatch):
    def is_large_and_new(function: Any, made: Any) -> bool:
        # What writes where it is told to, or returns a view, says so in its schema.
        is_new = isinstance(made, torch.Tensor) and function._schema.returns[0].alias_info is None
        return is_new and made.numel() >= 96 * 96 and made.device.type != "meta"

    def made_in_outer_steps(dtype: torch.dtype, **options: Any) -> list[list[str]]:
        diloco = DiLoCoAlgorithm(1, anchor_dtype="weights", **options)
        loop = loop_of(diloco, lambda: nn.Linear(96, 96, bias=False).to(dtype), bucket_bytes=10**6)
        made = []
        for _ in range(2):
            loop.optimizer.zero_grad()
            loop.wrapped(torch.ones(2, 96, dtype=dtype)).square().mean().backward()
            with Operations() as operations:
                loop.optimizer.step()
            made.append([one[0].overloadpacket.__name__ for one in operations.noted if is_large_and_new(*one)])
        return made

    # At first the momentum of both optimizers and the memory of a flight.
    first, second = made_in_outer_steps(torch.float32)
    assert (len(first), second) == (3, [])
    # Adagrad makes tensors of its own, and its state is not copied.
    assert "clone" not in made_in_outer_steps(torch.float32, outer=Outer(torch.optim.Adagrad))[1]
    monkeypatch.setattr(outer, "_PIECE_NUMEL", 64)
    first, second = made_in_outer_steps(torch.bfloat16)
    assert (len(first), second) == (3, [])


def step_with_nan(loop: Loop, spoilt: int | None = 1) -> None:
    loop.optimizer.zero_grad()
    loop.backward()
    if loop.rank == spoilt:
        with torch.no_grad():
            next(loop.model.parameters())[0, 0] = float("nan")
    loop.optimizer.step()


def train_with_nan(algorithm: algorithms.LocalUpdates) -> tuple[State, State, State]:
    """The weights before, after the exchange of what one rank has spoilt, and a period later."""
    loop = loop_of(algorithm)
    before = snapshot(loop.model)
    loop.train(3)
    step_with_nan(loop)
    loop.reducer.formation.flush()  # What is under way comes in.
    return before, snapshot(loop.model), loop.train(algorithm.sync_every)


@each(SLOWMO, DILOCO, EAGER)
def test_a_rank_that_diverged_is_named_on_all_and_goes_back_to_the_anchor(thread_ranks, caplog, algorithm):
    (_, well, end), (anchor, diverged, same) = thread_ranks(2, train_with_nan, algorithm)
    said = [one for one in caplog.messages if "not finite" in one]
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


def test_what_lies_between_parameters_gets_into_none(thread_ranks, uncleared_memory, caplog):
    """Not if a result is dropped: that leaves a rank alone whose weights are finite. Nor if one is blended."""

    def train_with_gaps(algorithm: Algorithm, spoilt: int | None = None) -> State:
        with seeded():
            model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 4))
        loop = loop_of(algorithm, lambda: model)
        loop.train()
        step_with_nan(loop, spoilt)
        return snapshot(loop.model)

    alone = thread_ranks(2, train_with_gaps, LocalSGDAlgorithm(100))
    well, _ = thread_ranks(2, train_with_gaps, DiLoCoAlgorithm(2), 1)
    assert_close(well, alone[0])
    assert "weights that are not finite on rank 1" in caplog.text
    exchange = Exchange(Weights(), Every(2), Mean(), algorithms.Blend(0.5), parts=Parts(1, "strided"))
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


@each(
    algorithms.SlowMoAlgorithm(2), algorithms.SparseLoCoAlgorithm(2, start_after=0), DiLoCoAlgorithm(2),
    DiLoCoAlgorithm(2, eager=True), DiLoCoAlgorithm(2, overlap=1, mix="add"), DiLoCoAlgorithm(2, overlap=1, blend=0.5),
)  # fmt: skip
@pytest.mark.parametrize("begins", [True, False], ids=["begins", "ends"])
@on_ranks(1)
def test_a_state_that_a_fold_has_left_half_way_cannot_be_saved(algorithm, begins):
    """What the reducer remembers has changed already when it begins."""

    def settle_and_interrupt(memory: ReducerMemory, flat: torch.Tensor) -> None:
        ReducerMemory.settle(memory, flat)
        raise KeyboardInterrupt("stopped")

    loop = loop_of(algorithm)
    loop.train(3)
    assert loop.wrapped.bagua_state_dict()["step"] == 3
    for course in loop.reducer.scheduler.courses:
        if begins:
            course.memory.settle = functools.partial(settle_and_interrupt, course.memory)
        course.bucket.write_weights = Mock(side_effect=RuntimeError("stopped"))
    with pytest.raises((RuntimeError, KeyboardInterrupt), match="stopped"):
        loop.train(3)
    with pytest.raises(CommunicatorClosedError, match=r"half-way, so its state cannot be saved.*stopped"):
        loop.wrapped.bagua_state_dict()


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_slow_momentum_needs_a_learning_rate(size):
    """The error comes before anything has changed."""
    loop = loop_of(algorithms.SlowMoAlgorithm(2))
    loop.train(3)
    loop.optimizer.param_groups[0]["lr"] = 0.0
    before = loop.wrapped.bagua_state_dict()["parameters"]
    with pytest.raises(ConfigurationError, match=r"divides by the learning rate.*which is 0"):
        loop.train()
    torch.testing.assert_close(loop.wrapped.bagua_state_dict()["parameters"], before, rtol=0, atol=0)


@needs("torch.optim.Muon", hasattr(torch.optim, "Muon"))
def test_an_outer_optimizer_has_to_step_the_selected_parameters_only():
    parameters, step = list(mlp().parameters()), algorithms.OuterStep(Outer(torch.optim.Muon, lr=0.1))
    step.check_parameters([one for one in parameters if one.dim() == 2])
    with pytest.raises(ConfigurationError, match="only supports 2D parameters"):
        step.check_parameters(parameters)


@each(LOCAL_SGD, SLOWMO, DILOCO, "decentralized")
def test_parameters_may_be_unused_where_no_gradients_are_exchanged(thread_ranks, algorithm):
    """Rank 1 never uses the right half, and has no gradient of it."""

    def train_branches() -> State:
        loop = loop_of(algorithm, Branches)
        for number in range(8):
            left = loop.rank == 1 or number % 2 == 0
            output = loop.wrapped(torch.full((2, 8), 1.0 + loop.rank), "left" if left else "right")
            descend(loop.optimizer, output.square().mean())
            assert (loop.model.right.weight.grad is None) == left
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
        descend(loop.optimizer, forward(rows).square().mean())
    loop.optimizer.zero_grad()
    if loop.rank == 0:  # No steps: what is asked for is added to no gradient.
        for wanted in (rows, list(wrapped.parameters())):
            torch.autograd.grad(wrapped(rows).sum(), wanted)
    wrapped(rows).square().mean().backward(create_graph=True)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    wrapped(rows).square().mean().backward()
    loop.optimizer.step()
    return snapshot(loop.model)


@pytest.mark.parametrize("every", [1, 4])
def test_who_spoils_a_mean_of_weights_is_named_on_all_ranks(thread_ranks, caplog, every):
    (_, first, _), (_, spoilt, _), (_, third, _) = thread_ranks(3, train_with_nan, LocalSGDAlgorithm(every))
    said = [one for one in caplog.messages if "not finite" in one]
    assert len(said) >= 3
    assert all("not finite on rank 1" in one and "Go on from a checkpoint" in one for one in said)
    assert all(torch.isfinite(value).all() for state in (first, third) for value in state.values())
    assert not all(torch.isfinite(value).all() for value in spoilt.values())


def test_the_outer_optimizer_follows_the_period_unless_it_is_given():
    def assert_steps_with(algorithm: DiLoCoAlgorithm, rate: float, momentum: float) -> None:
        expected = Outer(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=momentum > 0)
        assert algorithm.outer_exchange.then == algorithms.OuterStep(expected)

    for period, rate, momentum in ((1, 0.7, 0.6), (31, 0.7, 0.6), (32, 1.0, 0.6), (499, 1.0, 0.6), (500, 0.7, 0.9)):
        assert_steps_with(DiLoCoAlgorithm(period), rate, momentum)
    assert_steps_with(DiLoCoAlgorithm(500, outer_lr=0.4), 0.4, 0.9)
    assert_steps_with(DiLoCoAlgorithm(20, outer_momentum=0.0), 0.7, 0.0)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_eager_steps_take_the_others_in_a_period_later(thread_ranks, momentum):
    """The closing exchange takes in what is left of the last period: here without a momentum of it."""
    algorithm = DiLoCoAlgorithm(4, outer="sgd", outer_lr=0.7, outer_momentum=momentum, eager=True)
    *watched, ends = zip(*thread_ranks(3, train_and_watch, algorithm, 12, True), strict=True)
    expected = Replicas(3, optimizer_of)
    anchors, of_others = nn.Parameter(expected.rows), torch.tensor(0.0)  # What they had in the last period.
    outer_sgd = torch.optim.SGD([anchors], lr=0.7, momentum=momentum)
    for number, states in enumerate(watched):
        expected.step(number)
        if number % 4 == 3:
            now = anchors.detach() - expected.rows
            anchors.grad = now / 3 + of_others
            outer_sgd.step()
            expected.rows, of_others = anchors.detach(), now.mean(dim=0) - now / 3
        expected.assert_equals(states)
    assert_same_on_all_ranks(ends)
    if not momentum:
        expected.rows = anchors.detach() - 0.7 * of_others
        expected.assert_equals(ends)


@each(LOCAL_SGD, LATE_PARTS, EAGER, IN_WEIGHTS, SHIFTING, INNER, DiLoCoAlgorithm(12, outer="sgd", outer_lr=1e-9))
def test_finish_makes_one_model_with_which_training_goes_on(thread_ranks, algorithm):
    def finish_and_go_on() -> tuple[State, State, State]:
        loop = loop_of(algorithm)
        before = loop.train(7)
        loop.wrapped.bagua_finish()
        return before, snapshot(loop.model), loop.train(5)

    before, after, later = zip(*thread_ranks(2, finish_and_go_on), strict=True)
    assert_same_on_all_ranks(after)
    assert_close(after[0], later[0] if "1e-09" in repr(algorithm) else after[0])  # An outer step that leads nowhere.
    if not algorithm.ranks_differ:
        assert all(torch.equal(one, after[0][name]) for name, one in before[0].items())
    if isinstance(algorithm, LocalSGDAlgorithm):
        assert_close(after[0], {name: mean_of(before, name) for name in before[0]})
        assert_same_on_all_ranks(later)  # The twelfth step is one with an exchange.


@each(LOCAL_SGD, LATE_PARTS, EAGER)
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
    torch.testing.assert_close([end for _, end in looked], [steps[-1] for steps in watched], rtol=0, atol=0)


def test_running_means_become_the_mean_of_all_ranks_if_wanted(thread_ranks):
    def train_normalized(average_buffers: bool) -> list[State]:
        with seeded():
            model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        loop = loop_of(DiLoCoAlgorithm(3, overlap=1, average_buffers=average_buffers), lambda: model)
        watched = []
        for number in range(3):
            if number == 1:
                model[1].running_mean = model[1].running_mean.clone()  # as load_state_dict(assign=True)
            loop.train()
            watched.append({name: one.detach().clone() for name, one in model.named_buffers()})
        loop.wrapped.bagua_finish()
        return [*watched, {name: one.detach().clone() for name, one in model.named_buffers()}]

    apart, together = thread_ranks(2, train_normalized, False), thread_ranks(2, train_normalized, True)
    for states in zip(*apart, strict=True):
        assert (spread(states) > 1e-4) == (states[0] is not apart[0][-1])
    assert_same_on_all_ranks([states[2] for states in together])
    for name in ("1.running_mean", "1.running_var"):
        assert_close({name: together[0][2][name]}, {name: mean_of([states[2] for states in apart], name)})
    assert spread([states[1] for states in together]) > 1e-4


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
    digests, ends = zip(*thread_ranks(size, go_on_from, saved), strict=True)
    assert len(set(digests)) == 1
    replicas = Replicas(size, optimizer_of)
    for model in replicas.models:
        model.load_state_dict(saved["model"])
    for number in range(7, 10):  # The flight is gone: nothing is applied after step 8.
        replicas.step(number)
    for name, one in saved["algorithm"]["parameters"].items():
        difference = one["anchor"] - mean_of(replicas.states(), name)
        slow = 0.9 * one["outer.momentum_buffer"] + difference
        expected = one["anchor"] - 0.7 * (difference + 0.9 * slow)
        assert all(torch.allclose(end[name], expected, rtol=1e-4, atol=1e-6) for end in ends)


slow_sgd = functools.partial(torch.optim.SGD, lr=1e-3)
frozen_adam = functools.partial(QAdamOptimizer, lr=1e-4, warmup_steps=1)
frozen_lamb = functools.partial(OneBitLambOptimizer, lr=1e-4, warmup_steps=1)


@pytest.mark.parametrize(
    ("algorithm", "size", "make", "dtype", "expected"),
    [
        (DiLoCoAlgorithm(2), 1, slow_sgd, torch.float32, 3.0),  # the anchor, the momentum, memory for a flight
        (DiLoCoAlgorithm(2, outer="sgd", outer_momentum=0.0), 1, slow_sgd, torch.float32, 2.0),
        (DiLoCoAlgorithm(4, overlap=2, outer="sgd", outer_momentum=0.0), 1, slow_sgd, torch.float32, 2.0),  # under way
        (DiLoCoAlgorithm(2), 1, slow_sgd, torch.bfloat16, 5.0),  # two of them in single precision
        (DiLoCoAlgorithm(2, anchor_dtype="weights", anchor_device="cpu"), 1, slow_sgd, torch.bfloat16, 3.0),
        (algorithms.SlowMoAlgorithm(2), 1, slow_sgd, torch.float32, 3.0),
        (DiLoCoAlgorithm(2, eager=True, outer="sgd", outer_momentum=0.0), 1, slow_sgd, torch.float32, 3.0),  # was sent
        ("gradient_allreduce", 2, frozen_adam, torch.float32, 4.0),  # gradients, two moments, frozen denominators
        ("qadam", 2, frozen_adam, torch.float32, 4.6),  # and messages of a byte for each element, both ways
        ("one_bit_adam", 2, frozen_adam, torch.float32, 6.1),  # residuals, room for the next ones, shorter messages
        ("one_bit_lamb", 2, frozen_lamb, torch.float32, 7.1),  # and the second moment of late
    ],
    ids=["momentum", "plain", "overlap", "bfloat16", "narrow", "slowmo", "eager", "exact", "qadam", "adam", "lamb"],
)
def test_nothing_is_kept_but_what_must_be_and_memory_for_flights(thread_ranks, algorithm, size, make, dtype, expected):
    waits = Barrier(size)

    def live_bytes_of_all() -> int:
        """When all ranks have come to this point, and before one of them goes on."""
        waits.wait(60)
        found = live_bytes()
        waits.wait(60)
        return found

    def copies_of_the_weights() -> float:
        """How much more there is on each rank after some steps, than a model takes."""
        with seeded():
            model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).to(dtype)
        optimizer = make(model.parameters())
        before = live_bytes_of_all()
        wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=600_000)
        for _ in range(6):
            descend(optimizer, wrapped(torch.ones(2, 256, dtype=dtype)).square().mean())
        optimizer.zero_grad()
        return (live_bytes_of_all() - before) / sum(one.nbytes for one in model.parameters()) / size

    assert thread_ranks(size, copies_of_the_weights) == [pytest.approx(expected, abs=0.1)] * size


def adam_on_a_cosine(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """With memory, weight decay, and a learning rate that falls to nearly nothing in 31 steps."""
    optimizer = torch.optim.AdamW(parameters, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 31, eta_min=0.0005)
    return optimizer


def test_diloco_around_adam_is_that_of_the_paper_in_every_step(thread_ranks):
    """Adam's moments, its weight decay and its schedule stay each rank's own, and go on across outer steps."""
    steps, together, every = 31, 7, 4

    def train_on_a_cosine() -> list[State]:
        diloco, watched = DiLoCoAlgorithm(every, start_after=together), []
        loop = Loop("with_bagua", model_of, adam_on_a_cosine, loss_of, algorithm=diloco)
        for _ in range(steps):
            watched.append(loop.train())
            loop.optimizer.schedule.step()
        return watched

    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)
    expected = Anchored(3, outer, make_optimizer=adam_on_a_cosine, make=model_of, losses=loss_of)
    for step, states in enumerate(zip(*thread_ranks(3, train_on_a_cosine), strict=True)):
        expected.backward(step)
        if step < together:
            for same in zip(*(model.parameters() for model in expected.models), strict=True):
                mean = torch.stack([one.grad for one in same]).mean(dim=0)
                for one in same:
                    one.grad = mean.clone()
        expected.update()
        if step == together - 1:
            expected.anchor.data.copy_(expected.mean)
        elif step >= together and (step + 1 - together) % every == 0:
            expected.outer_step()
        for optimizer in expected.optimizers:
            optimizer.schedule.step()
        torch.testing.assert_close(states, expected.states(), rtol=1e-10, atol=1e-12)


# Hosts that train alone, each as one rank would: gradients are exchanged inside them, local updates between them.
def loop_in_double(algorithm: Algorithm | str, losses: Callable[..., Any] = loss_of) -> Loop:
    return Loop("with_bagua", lambda: of_this_rank().double(), sgd, losses, algorithm=algorithm)


def train_in_double(algorithm: Algorithm | str, steps: int = STEPS, share: int | None = None) -> list[State]:
    """The weights after each step. With a ``share``, on that many batches in each step."""

    def losses(model: nn.Module, rank: int, number: int) -> torch.Tensor:
        batches = [rank] if share is None else range(rank * share, (rank + 1) * share)
        return sum(loss_of(model, one, number) for one in batches) / len(batches)

    loop = loop_in_double(algorithm, losses)
    return [loop.train() for _ in range(steps)]


assert_equal_in_double = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-12)


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
    algorithm = DiLoCoAlgorithm(4, outer="sgd", outer_lr=0.5, outer_momentum=0.5, inner=INNER)
    of_host = [host for host, size in enumerate(hosts) for _ in range(size)]
    for number, ends in enumerate(zip(*thread_pool.run(train_in_double, algorithm, hosts=hosts), strict=True)):
        expected.step(number)
        if number % 4 == 3:
            expected.outer_step()
        assert_equal_in_double(ends, [expected.states()[host] for host in of_host])
        for host in range(len(hosts)):
            assert_same_on_all_ranks([end for end, its in zip(ends, of_host, strict=True) if its == host])


@each(
    LOCAL_SGD, SLOWMO, EAGER,
    DiLoCoAlgorithm(4, fragments=2, overlap=1, start_after=2), DiLoCoAlgorithm(4, codec="int4", error_feedback=True),
)  # fmt: skip
def test_a_host_trains_as_one_rank_with_its_data(thread_pool, algorithm: algorithms.LocalUpdates):
    on_hosts = thread_pool.run(train_in_double, dataclasses.replace(algorithm, inner=INNER), hosts=[2, 2])
    one, other = thread_pool.run(train_in_double, algorithm, STEPS, 2, size=2)
    assert_equal_in_double(on_hosts, [one, one, other, other])


def test_one_host_loses_nothing_to_the_codec_between_hosts(thread_pool):
    whole_step = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}
    algorithm = DiLoCoAlgorithm(4, **whole_step, codec="int2", error_feedback=True, inner=INNER)
    runs = (thread_pool.run(train_in_double, one, hosts=[3]) for one in (algorithm, INNER))
    assert_equal_in_double(*runs)


def test_one_rank_of_each_host_talks_between_hosts(thread_pool):
    """In the step after which hosts exchange."""

    def sent_bytes(group: bagua.comm.ProcessGroup) -> list[int]:
        found = group.global_communicator, group.inter_node_communicator
        return [one.statistics.sent_bytes() if one else 0 for one in found]

    def sent_in_an_outer_step() -> list[int]:
        loop = Loop("with_bagua", mlp, sgd, algorithm=DiLoCoAlgorithm(4, inner=INNER), bucket_bytes=10**6)
        loop.train(3)
        before = sent_bytes(loop.reducer.group)
        loop.train()
        return [after - one for after, one in zip(sent_bytes(loop.reducer.group), before, strict=True)]

    to_all, between = zip(*thread_pool.run(sent_in_an_outer_step, hosts=[2, 2]), strict=True)
    weights = sum(one.numel() for one in mlp().parameters()) * 4
    assert [one > 0 for one in between] == [True, False, True, False]
    assert to_all == (0,) * 4
    assert weights <= between[0] <= 3 * weights


@on_ranks(4, assert_same_on_all_ranks, hosts=[2, 2])
def test_the_end_makes_one_model_of_all_hosts() -> State:
    loop = loop_in_double(LocalSGDAlgorithm(100, inner=INNER))
    loop.train()
    loop.wrapped.bagua_finish()
    return snapshot(loop.model)
