"""What the engine owes an algorithm: on toys that use one feature of exchanges each, and the contract for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

import bagua.comm
from bagua import primitives
from bagua.algorithms import (
    Add,
    Algorithm,
    DecentralizedAlgorithm,
    Every,
    Exchange,
    Flight,
    GradientAllReduceAlgorithm,
    Gradients,
    How,
    LocalUpdates,
    LoCoAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    Mean,
    Mix,
    Model,
    OneBitAdamAlgorithm,
    OneBitLambAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    ReducedGradients,
    Replace,
    SignSGDAlgorithm,
    Then,
    TopKAlgorithm,
    Weights,
    registry,
)
from bagua.comm import ProcessGroup, Work
from bagua.compression import BlockTopK
from bagua.errors import ConfigurationError
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer
from bagua.parallel import with_bagua
from bagua.primitives import AllGatherReducer, ErrorFeedback, ReducerMemory
from bagua.torch_api.distributed import ModelSwitchWrapper
from tests.algorithms import stacked
from tests.algorithms.stacked import Replicas, model_of, plain_sgd
from tests.algorithms.test_exchanges import BY_LAYER
from tests.contract.algorithms import ONE_BUCKET_BYTES, AlgorithmContract, resume_and_train, train, train_and_save
from tests.harness import (
    OptimizerMaker,
    State,
    adam,
    assert_close,
    assert_same_on_all_ranks,
    loss_of,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import Loop, assert_trained


@dataclass(frozen=True)
class RoundedMean(How):
    """Mean of what is rounded to multiples of ``grain``; what is cut off comes with the next."""

    grain: float

    contraction: ClassVar[float | None] = None  # type: ignore[misc]

    def state(self) -> tuple[primitives.State, ...]:
        return primitives.State("residual"), primitives.State("committed", _zero, per="flat", scope="shared")

    def scale(self, group: ProcessGroup) -> float:
        return 1.0 / group.size

    def run(self, flight: Flight, group: ProcessGroup) -> Work | None:
        flat, grain = flight.flat, self.grain * flight.loss_scale
        flat.add_(flight.state["residual"], alpha=flight.loss_scale)
        sent = flat.div(grain).round_().mul_(grain)
        flight.memory.propose("residual").copy_(flat - sent).div_(flight.loss_scale)
        flight.memory.propose("committed").copy_(flight.state["committed"] + 1)
        flat.copy_(sent)
        return group.global_communicator.allreduce(flat, async_op=True)


def _zero(_: ReducerMemory) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True)
class Rounded(Algorithm):
    """Gradient allreduce with gradients rounded to multiples of ``grain``; what is cut off comes with the next ones."""

    grain: float = 2.0**-9

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        return (Exchange(Gradients(), Every(), RoundedMean(self.grain), Replace()),)


@dataclass(frozen=True)
class LocalSgd(Algorithm):
    """Average the weights after every ``period``-th update; no communication in between."""

    period: int = 2

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        return (Exchange(Weights(), Every(self.period), Mean(), Replace()),)


@dataclass(frozen=True)
class Descend(Then):
    """A local action: step each bucket with its own gradients."""

    learning_rate: float

    def fold(self, flight: Flight) -> None:
        bucket = flight.bucket
        weights = bucket.read_weights(torch.empty_like(bucket.gradients))
        bucket.write_weights(weights.sub_(bucket.gradients, alpha=self.learning_rate))


@dataclass(frozen=True)
class OwnSgd(Algorithm):
    """Step each bucket with its own gradients during backward, then average the weights."""

    learning_rate: float = 0.1

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        step = Exchange(Gradients(), Every(), None, Descend(self.learning_rate), label="step")
        return step, Exchange(Weights(), Every(), Mean(), Replace(), at="bucket stepped", until="backward ends")


@dataclass(frozen=True)
class ChunkedMean(Mean):
    """A mean that wants its buckets to split evenly over the ranks."""

    chunked: ClassVar[bool] = True


@dataclass(frozen=True)
class Total(Then):
    """The result takes the place of the gradients, and is added up."""

    replaces: ClassVar[bool] = True

    def state(self) -> tuple[primitives.State, ...]:
        return (primitives.State("total", scope="shared"),)

    def fold(self, flight: Flight) -> None:
        flight.state["total"] += flight.flat


@dataclass(frozen=True)
class WarmsUp(Algorithm):
    """Gradient allreduce, in buckets that split evenly over the ranks after ``warmup_steps``."""

    warmup_steps: int = 3

    @property
    def phases(self) -> tuple[Hashable, ...]:
        return "warm-up", "chunked"

    def phase(self, step: int, model: Model) -> Hashable:
        return "warm-up" if step < self.warmup_steps else "chunked"

    def exchanges(self, phase: Hashable = "chunked") -> tuple[Exchange, ...]:
        how = Mean() if phase == "warm-up" else ChunkedMean()
        return (Exchange(Gradients(), Every(), how, Total()),)


class QuickToWarmUp(QAdamOptimizer):
    """Its warm-up ends within a test. What is hardly estimated must not become a divisor, so ``eps`` is large."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr, warmup_steps=2, eps=0.01)


class QuickQAdam(QAdamAlgorithm):
    """QAdam that soon compresses."""

    optimizer_class = QuickToWarmUp


class QuickOneBitAdam(OneBitAdamAlgorithm):
    """One-bit Adam that soon compresses."""

    optimizer_class = QuickToWarmUp


class QuickLamb(OneBitLambOptimizer):
    """Its warm-up ends within a test."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr, warmup_steps=2, eps=0.01)


class QuickOneBitLamb(OneBitLambAlgorithm):
    """One-bit LAMB that soon compresses."""

    optimizer_class = QuickLamb


def _loop(algorithm: Algorithm) -> Loop:
    return Loop("with_bagua", make_optimizer=plain_sgd, algorithm=algorithm)


@pytest.mark.parametrize("completes", ["forward", "state_dict", "bagua_state_dict", "with_bagua"])
def test_what_an_update_that_is_skipped_everywhere_owes_is_exchanged_later(thread_ranks, completes):
    def train() -> list[torch.Tensor]:
        loop = _loop(LocalSgd(period=1))
        weight = loop.model[0].weight
        with torch.no_grad():
            weight += loop.rank  # Something to be averaged.
        loop.backward()
        before = weight.detach().clone()
        {
            "forward": loop.loss,
            "state_dict": loop.wrapped.state_dict,
            "bagua_state_dict": loop.wrapped.bagua_state_dict,
            "with_bagua": lambda: with_bagua(loop.model, [loop.optimizer], GradientAllReduceAlgorithm()),
        }[completes]()
        return [before, weight.detach().clone()]

    first, second = thread_ranks(2, train)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_forwards_for_evaluation_owe_nothing_and_complete_nothing(thread_ranks):
    def train() -> torch.Tensor:
        loop = _loop(LocalSgd(period=1))
        with torch.no_grad():
            loop.model[0].weight += loop.rank
        loop.backward()
        if loop.rank == 0:
            loop.wrapped.eval()
            with torch.no_grad():
                loop.loss()
            loop.wrapped.train()
        return loop.model[0].weight.detach().clone()

    first, second = thread_ranks(2, train)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("size", [1, 3])
def test_an_algorithm_that_owns_the_optimizer_steps_during_backward(thread_ranks, size):
    def train() -> State:
        loop = Loop(lambda model, _: with_bagua(model, [], OwnSgd(), bucket_bytes=1000))
        for _ in range(5):
            loop.model.zero_grad()
            loop.backward()
        return snapshot(loop.model)

    assert_trained(thread_ranks(size, train), reference(mlp(), plain_sgd, size, range(5)))


def test_a_change_of_phase_forms_new_buckets_if_it_must_and_carries_memory_over(thread_ranks):
    def train() -> tuple[list[list[int]], State, State]:
        loop, sizes, totals = Loop("with_bagua", algorithm=WarmsUp(warmup_steps=3)), [], {}
        for _ in range(6):
            loop.train()
            sizes.append([bucket.numel % 6 for bucket in loop.wrapped.bagua_buckets])
            for name, parameter in loop.model.named_parameters():
                totals[name] = totals.get(name, 0) + parameter.grad
        remembered = loop.wrapped.bagua_state_dict()["parameters"]
        saved = {name: state["total"] for name, state in remembered.items()}
        return sizes, saved, totals

    results = thread_ranks(3, train)
    for sizes, saved, totals in results:
        assert sizes[2] != [0, 0], "padded before it is needed"
        assert sizes[3:] == [[0, 0]] * 3, "three ranks, two numbers of eight bytes"
        assert_close(saved, {name: totals[name] for name in saved})


# Algorithms of a user that send more than one tensor, which the engine knows nothing of: push-sum.

SIZE = 4


# Push-sum. Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", 2019.


@dataclass(frozen=True)
class Push(How):
    """Each rank keeps half of its weights and of its mass. Rank 0 gives its other half to all others, these to it."""

    uniform: ClassVar[bool] = False  # type: ignore[misc]

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        message = torch.cat([flight.flat.double(), flight.state["mass"]])
        others = list(range(1, group.size)) if group.rank == 0 else [0]
        if not message.isfinite().all():
            others = []  # Who gives away what is not finite spoils all others.
        shares = torch.zeros(group.size, message.numel(), dtype=message.dtype)
        shares[others] = message / (2 * max(len(others), 1))
        shares[group.rank] = message - shares.sum(dim=0)
        received = torch.empty_like(shares)
        group.global_communicator.alltoall(received.view(-1), shares.view(-1))
        total = received.sum(dim=0)
        flight.flat.copy_(total[:-1])
        flight.memory.propose("mass").copy_(total[-1:])


def _one(_: ReducerMemory) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float64)


@dataclass(frozen=True)
class Weigh(Then):
    """Weights as the model has them, which are divided by the mass, or as they are sent and stepped, which are not."""

    for_model: bool

    def state(self) -> tuple[primitives.State, ...]:
        return (primitives.State("mass", _one, per="flat"),)

    def fold(self, flight: Flight) -> None:
        bucket, mass = flight.bucket, flight.state["mass"].item()
        bucket.write_weights(flight.flat / mass if self.for_model else flight.weights(bucket.empty()) * mass)


PUSH_SUM = (
    Exchange(None, Every(), None, Weigh(for_model=False), at="backward ends"),
    Exchange(Weights(), Every(), Push(), Weigh(for_model=True)),
)


class TestPushSum(AlgorithmContract):
    sizes = (1, 2, 3)

    @pytest.fixture
    def algorithm(self):
        return Algorithm.of(*PUSH_SUM)


def weights_after(algorithm: Algorithm, steps: int) -> torch.Tensor:
    """The weights of this rank."""
    loop = Loop("with_bagua", model_of, plain_sgd, stacked.loss_of, algorithm=algorithm, bucket_bytes=1500)
    loop.train(steps)
    loop.wrapped.bagua_state_dict()
    return torch.nn.utils.parameters_to_vector(loop.model.parameters()).detach()


def push_sum(steps: int, *, steps_what_is_sent: bool = True) -> torch.Tensor:
    """``x <- A (x - lr g(x / w))``, ``w <- A w``; a row for each rank."""
    columns = torch.eye(SIZE, dtype=torch.float64) / 2
    columns[1:, 0] += 1 / 2 / (SIZE - 1)
    columns[0, 1:] += 1 / 2
    ranks = Replicas(SIZE, plain_sgd, model_of, stacked.loss_of)
    sent, mass = ranks.rows, torch.ones(SIZE, 1, dtype=torch.float64)
    for step in range(steps):
        ranks.rows = sent / mass
        updates = -ranks.rows
        ranks.step(step)
        updates += ranks.rows
        sent = columns @ (sent + updates * (1 if steps_what_is_sent else mass))
        mass = columns @ mass
    return sent / mass


def test_push_sum_is_what_the_paper_says(thread_ranks):
    found = torch.stack(thread_ranks(SIZE, weights_after, Algorithm.of(*PUSH_SUM), 12))
    assert torch.allclose(found, push_sum(12), rtol=0, atol=1e-12)
    assert not torch.allclose(found, push_sum(12, steps_what_is_sent=False), rtol=0, atol=1e-4)


def test_exchanges_of_one_label_share_what_both_declare():
    """One of them may remember more."""
    local, sent = PUSH_SUM
    Algorithm.of(local, dataclasses.replace(sent, how=Mindful()))
    with pytest.raises(ConfigurationError, match="different things under the name 'mass'"):
        dataclasses.replace(sent, how=Weighty())
    with pytest.raises(ConfigurationError, match="different things under one name"):
        Algorithm.of(local, dataclasses.replace(sent, how=Weighty(), then=Replace()))


@dataclass(frozen=True)
class Mindful(Push):
    """Remembers more than the mass."""

    def state(self) -> tuple[primitives.State, ...]:
        return (*super().state(), primitives.State("anchors"))


@dataclass(frozen=True)
class Weighty(Push):
    """Remembers something else under the name of the mass."""

    def state(self) -> tuple[primitives.State, ...]:
        return (primitives.State("mass"),)


# Every registered algorithm keeps the contract, also after a switch in the middle of training.

#: Two runs of an algorithm that exchanges in the background are never alike; such have tests of their own.
#: The warm-up of some is longer than a test; quicker ones stand in for them. Ranks that train alone for long have tests
#: of their own, too: test_local_updates.py.
QUICK = {
    "qadam": QuickQAdam,
    "one_bit_adam": QuickOneBitAdam,
    "one_bit_lamb": QuickOneBitLamb,
    "loco": partial(LoCoAlgorithm, warmup_steps=0),
    "sign_sgd": partial(SignSGDAlgorithm, warmup_steps=0),
    "top_k": partial(TopKAlgorithm, warmup_steps=2, density_steps=4),
}
#: Those that step along directions are held to the contract in test_formulas.py.
DIRECTIONS = ("dion",)
SYNCHRONOUS = [
    QUICK[name]() if name in QUICK else Algorithm.init(name)
    for name in registry
    if name not in DIRECTIONS
    and not registry.get(name)().in_background
    and not issubclass(registry.get(name), LocalUpdates)
]


DELAYED_GOSSIP = Algorithm.of(
    Exchange(Weights(), Every(), Mix("alternating_ring"), Add(), at="bucket ready", until="bucket ready", lag=1)
)
#: Those with factors, residuals, estimates, phases and flights.
REMEMBERING = [
    *(one for one in SYNCHRONOUS if isinstance(one, PowerSGDAlgorithm | QuickOneBitLamb)),
    LowPrecisionDecentralizedAlgorithm(),
    WarmsUp(),
    DELAYED_GOSSIP,
]


@pytest.fixture(params=SYNCHRONOUS, ids=repr)
def algorithm(request):
    return request.param


class TestRegisteredAlgorithm(AlgorithmContract):
    #: The test of host layouts trains with four ranks.
    sizes = (1, 2, 3)


@dataclass(frozen=True)
class BlockTopKSgd(ReducedGradients):
    """A composition that is not registered: the largest elements of each block, with error feedback."""

    kept: int = 16

    @property
    def reducer(self) -> ErrorFeedback:
        return ErrorFeedback(AllGatherReducer(BlockTopK(64, self.kept)))


class TestOthers(AlgorithmContract):
    """Toys, compositions, and options beyond the default ones."""

    @pytest.fixture(
        params=[
            DELAYED_GOSSIP,
            Rounded(),
            LocalSgd(),
            WarmsUp(),
            BlockTopKSgd(),
            Algorithm.of(BY_LAYER),
            DecentralizedAlgorithm(peer_selection_mode="shift_one"),
            LowPrecisionDecentralizedAlgorithm(topology="hierarchical_torus", communication_interval=2),
        ],
        ids=repr,
    )
    def algorithm(self, request):
        return request.param


def of_each(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """What this rank gets from each call; one run of processes serves all algorithms."""
    return [function(*arguments) for arguments in calls]


def test_training_resumes_bit_exactly_in_new_processes(process_ranks):
    """Each run has processes of its own; only what was saved passes from one to the next."""
    alone = [(algorithm,) for algorithm in REMEMBERING]
    whole = process_ranks(2, of_each, train, alone)
    saved = process_ranks(2, of_each, train_and_save, alone)
    checkpoints = [[one for (one,) in of_ranks] for of_ranks in zip(*saved, strict=True)]
    calls = [(algorithm, saved, ONE_BUCKET_BYTES) for algorithm, saved in zip(REMEMBERING, checkpoints, strict=True)]
    resumed = process_ranks(2, of_each, resume_and_train, calls)
    for algorithm, *states in zip(REMEMBERING, *whole, *resumed, strict=True):
        for before, after in zip(states[:2], states[2:], strict=True):
            differing = [name for name, value in before.items() if not torch.equal(value, after[name])]
            assert not differing, algorithm


STEPS = 3


def fitting(optimizer: OptimizerMaker) -> list[str]:
    """Algorithms for this optimizer."""
    kinds = (None, QAdamOptimizer if optimizer is QuickToWarmUp else None)
    return [name for name in registry if registry.get(name).optimizer_class in kinds]


def loss(model: torch.nn.Module, size: int) -> float:
    """Of the data of all ranks."""
    with torch.no_grad():
        return float(sum(loss_of(model, rank, step) for rank in range(size) for step in range(STEPS))) / size


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    tensors = [state[key] for state in optimizer.state.values() for key in sorted(state) if key != "step"]
    return {str(number): tensor.detach().clone() for number, tensor in enumerate(tensors)}


def switch_through(names: list[str], make_optimizer: OptimizerMaker) -> list[tuple[State, State, float, float]]:
    """Train with each; after each switch the weights, the optimizer's state, and the loss before and after."""
    rank, size = bagua.comm.get_rank(), bagua.comm.get_world_size()
    model = mlp(seed=rank)
    optimizer = make_optimizer(model.parameters())
    wrapped = ModelSwitchWrapper(model, optimizer, message_size=1000)
    seen = []
    for name in names:
        before = loss(model, size)
        wrapped.switch_to(Algorithm.init(name))
        seen.append((snapshot(model), optimizer_state(optimizer), before, loss(model, size)))
        train_steps(wrapped, optimizer, rank, range(STEPS))
    return seen


@pytest.mark.parametrize(
    ("size", "make_optimizer"), [(2, sgd), (3, adam), (2, QuickToWarmUp)], ids=["momentum", "adam", "qadam"]
)
def test_training_goes_on_through_all_algorithms_and_back(thread_ranks, size, make_optimizer):
    names = fitting(make_optimizer)
    path = [*names, *reversed(names)]
    results = thread_ranks(size, switch_through, path, make_optimizer)
    for of_ranks in zip(*results, strict=True):
        assert_same_on_all_ranks([weights for weights, *_ in of_ranks])
        assert_same_on_all_ranks([state for _, state, *_ in of_ranks])
    first, *others = results[0]
    for name, (_, _, before, after) in zip(path, others, strict=False):
        consensus = registry.get(name)().ranks_differ
        assert after < 1.1 * before if consensus else after == pytest.approx(before, rel=1e-5), f"a jump after {name}"
    assert others[-1][3] < 0.8 * first[3], "nothing was learned"
    assert others[-1][1], "the optimizer remembers nothing"
