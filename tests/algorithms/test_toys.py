"""What the engine owes an algorithm: on toys that use one feature of exchanges each, and the contract for all."""

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

import bagua.comm
from bagua import algorithms, primitives
from bagua.algorithms import Add, Algorithm, Every, Exchange, Flight, Gradients, How, Mean, Mix, Replace, Then, Weights
from bagua.comm import ProcessGroup, Work
from bagua.compression import BlockTopK
from bagua.errors import ConfigurationError
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer
from bagua.parallel import ModelSwitchWrapper, with_bagua
from bagua.primitives import AllGatherReducer, ErrorFeedback, ReducerMemory
from bagua.testing import RankPool
from tests import harness
from tests.algorithms import stacked
from tests.algorithms.stacked import Replicas, model_of, plain_sgd
from tests.algorithms.test_exchanges import BY_LAYER
from tests.contract.algorithms import ONE_BUCKET_BYTES, AlgorithmContract, resume, train, train_and_save
from tests.harness import State, assert_close, assert_same_on_all_ranks, loss_of, mlp, sgd, snapshot
from tests.parallel.wrapping import Loop, assert_trained, of_this_rank, on_ranks


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

    def phase(self, step: int, model: algorithms.Model) -> Hashable:
        return "warm-up" if step < self.warmup_steps else "chunked"

    def exchanges(self, phase: Hashable = "chunked") -> tuple[Exchange, ...]:
        how = Mean() if phase == "warm-up" else ChunkedMean()
        return (Exchange(Gradients(), Every(), how, Total()),)


class QuickToWarmUp(QAdamOptimizer):
    """Its warm-up ends within a test. What is hardly estimated must not become a divisor, so ``eps`` is large."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr, warmup_steps=2, eps=0.01)


class QuickQAdam(algorithms.QAdamAlgorithm):
    optimizer_class = QuickToWarmUp


class QuickOneBitAdam(algorithms.OneBitAdamAlgorithm):
    optimizer_class = QuickToWarmUp


class QuickLamb(QuickToWarmUp, OneBitLambOptimizer):
    """The same for LAMB."""


class QuickOneBitLamb(algorithms.OneBitLambAlgorithm):
    optimizer_class = QuickLamb


@pytest.mark.parametrize("call", ["forward", "state_dict", "bagua_state_dict", "with_bagua", "evaluation"])
def test_what_an_update_that_is_skipped_everywhere_owes_is_exchanged_later_but_not_by_an_evaluation(thread_ranks, call):
    """An average of weights, which differ: the backward pass is over, and nothing was updated."""

    def train() -> list[torch.Tensor]:
        loop = Loop("with_bagua", make_optimizer=plain_sgd, algorithm=LocalSgd(period=1))
        with torch.no_grad():
            loop.model[0].weight += loop.rank
        loop.backward()
        before = loop.model[0].weight.detach().clone()

        def evaluate() -> None:
            if loop.rank == 0:
                loop.wrapped.eval()
                with torch.no_grad():
                    loop.loss()
                loop.wrapped.train()

        {
            "forward": loop.loss,
            "state_dict": loop.wrapped.state_dict,
            "bagua_state_dict": loop.wrapped.bagua_state_dict,
            "with_bagua": lambda: with_bagua(loop.model, [loop.optimizer], "gradient_allreduce"),
            "evaluation": evaluate,
        }[call]()
        return [before, loop.model[0].weight.detach().clone()]

    first, second = thread_ranks(2, train)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1]) == (call != "evaluation")


@pytest.mark.parametrize("size", [1, 3])
def test_an_algorithm_that_owns_the_optimizer_steps_during_backward(thread_ranks, size):
    step = Exchange(Gradients(), Every(), None, Descend(0.1), label="step")
    mean = Exchange(Weights(), Every(), Mean(), Replace(), at="bucket stepped", until="backward ends")

    def train() -> State:
        loop = Loop(lambda model, _: with_bagua(model, [], Algorithm.of(step, mean), bucket_bytes=1000))
        for _ in range(5):
            loop.model.zero_grad()
            loop.backward()
        return snapshot(loop.model)

    assert_trained(thread_ranks(size, train), harness.reference(mlp(), plain_sgd, size, range(5)))


@on_ranks(3)
def test_a_change_of_phase_forms_new_buckets_if_it_must_and_carries_memory_over():
    loop, sizes, totals = Loop("with_bagua", algorithm=WarmsUp(warmup_steps=3)), [], {}
    for _ in range(6):
        loop.train()
        sizes.append([bucket.numel % 6 for bucket in loop.wrapped.bagua_buckets])
        for name, parameter in loop.model.named_parameters():
            totals[name] = totals.get(name, 0) + parameter.grad
    assert sizes[2] != [0, 0], "padded before it is needed"
    assert sizes[3:] == [[0, 0]] * 3, "three ranks, two numbers of eight bytes"
    saved = {name: state["total"] for name, state in loop.wrapped.bagua_state_dict()["parameters"].items()}
    assert_close(saved, {name: totals[name] for name in saved})


# An algorithm of a user that sends more than one tensor, of which the engine knows nothing: push-sum.
# Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", 2019.

SIZE = 4


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
    states = [state for state, _ in thread_ranks(SIZE, stacked.train, Algorithm.of(*PUSH_SUM), plain_sgd, 12)]
    found = torch.stack([torch.nn.utils.parameters_to_vector(state.values()) for state in states])
    assert torch.allclose(found, push_sum(12), rtol=0, atol=1e-12)
    assert not torch.allclose(found, push_sum(12, steps_what_is_sent=False), rtol=0, atol=1e-4)


def test_exchanges_of_one_label_share_what_both_declare():
    """One of them may remember more, but nothing else under the same name."""

    class Mindful(Push):
        def state(self) -> tuple[primitives.State, ...]:
            return (*super().state(), primitives.State("anchors"))

    class Weighty(Push):
        def state(self) -> tuple[primitives.State, ...]:
            return (primitives.State("mass"),)

    local, sent = PUSH_SUM
    Algorithm.of(local, dataclasses.replace(sent, how=Mindful()))
    with pytest.raises(ConfigurationError, match="different things under the name 'mass'"):
        dataclasses.replace(sent, how=Weighty())
    with pytest.raises(ConfigurationError, match="different things under one name"):
        Algorithm.of(local, dataclasses.replace(sent, how=Weighty(), then=Replace()))


#: Two runs of an algorithm that exchanges in the background are never alike; such have tests of their own.
#: The warm-up of some is longer than a test; quicker ones stand in for them. Ranks that train alone for long have tests
#: of their own, too: test_local_updates.py.
QUICK = {
    "qadam": QuickQAdam, "one_bit_adam": QuickOneBitAdam, "one_bit_lamb": QuickOneBitLamb,
    "loco": partial(Algorithm.init, "loco", warmup_steps=0),
    "sign_sgd": partial(Algorithm.init, "sign_sgd", warmup_steps=0),
    "top_k": partial(Algorithm.init, "top_k", warmup_steps=2, density_steps=4),
}  # fmt: skip
#: One that steps along directions is held to the contract in test_formulas.py.
SYNCHRONOUS = [
    QUICK.get(name, kind)()
    for name, kind in ((name, algorithms.registry.get(name)) for name in algorithms.registry)
    if name != "dion" and not kind().in_background and not issubclass(kind, algorithms.LocalUpdates)
]
DELAYED_GOSSIP = Algorithm.of(
    Exchange(Weights(), Every(), Mix("alternating_ring"), Add(), at="bucket ready", until="bucket ready", lag=1)
)
#: Those with factors, residuals, estimates, phases and flights.
REMEMBERING = [
    Algorithm.init("power_sgd"), QuickOneBitLamb(), Algorithm.init("low_precision_decentralized"), WarmsUp(),
    DELAYED_GOSSIP,
]  # fmt: skip


algorithm = pytest.fixture(lambda request: request.param, params=SYNCHRONOUS, ids=repr)


class TestRegisteredAlgorithm(AlgorithmContract):
    sizes = (1, 2, 3)  # The test of host layouts trains with four ranks.


@dataclass(frozen=True)
class BlockTopKSgd(algorithms.ReducedGradients):
    """A composition that is not registered: the largest elements of each block, with error feedback."""

    kept: int = 16

    @property
    def reducer(self) -> ErrorFeedback:
        return ErrorFeedback(AllGatherReducer(BlockTopK(64, self.kept)))


class TestOthers(AlgorithmContract):
    """Toys, compositions, and options beyond the default ones."""

    algorithm = pytest.fixture(
        lambda self, request: request.param,
        params=[
            DELAYED_GOSSIP, Rounded(), LocalSgd(), WarmsUp(), BlockTopKSgd(), Algorithm.of(BY_LAYER),
            pytest.param(Algorithm.of(*PUSH_SUM), id="push-sum"),
            Algorithm.init("decentralized", peer_selection_mode="shift_one"),
            Algorithm.init("low_precision_decentralized", topology="hierarchical_torus", communication_interval=2),
        ],
        ids=repr,
    )  # fmt: skip


def of_each(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """What this rank gets from each call; one run of processes serves all algorithms."""
    return [function(*arguments) for arguments in calls]


def columns(of_ranks: list[list[Any]]) -> list[tuple[Any, ...]]:
    """What the ranks returned for each call."""
    return list(zip(*of_ranks, strict=True))


def assert_resumes_bit_by_bit(pool: RankPool, calls: list[tuple[Algorithm]]) -> None:
    """Each run has ranks of its own; only what was saved passes from one to the next."""
    whole, saved = (columns(pool.run(of_each, function, calls, size=2)) for function in (train, train_and_save))
    checkpoints = [[one for (one,) in of_ranks] for of_ranks in saved]
    again = [(*call, states, ONE_BUCKET_BYTES) for call, states in zip(calls, checkpoints, strict=True)]
    resumed = columns(pool.run(of_each, resume, again, size=2))
    for (algorithm,), before, after in zip(calls, whole, resumed, strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0, msg=f"{algorithm} goes on otherwise")


def test_training_resumes_bit_exactly_in_new_processes(process_pool):
    assert_resumes_bit_by_bit(process_pool, [(algorithm,) for algorithm in REMEMBERING])


STEPS = 3


def loss(model: torch.nn.Module, size: int) -> float:
    """Of the data of all ranks."""
    with torch.no_grad():
        return float(sum(loss_of(model, rank, step) for rank in range(size) for step in range(STEPS))) / size


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    tensors = [state[key] for state in optimizer.state.values() for key in sorted(state) if key != "step"]
    return {str(number): tensor.detach().clone() for number, tensor in enumerate(tensors)}


def switch_through(names: list[str], make_optimizer: harness.OptimizerMaker) -> list[tuple[State, State, float, float]]:
    """Train with each; after each switch the weights, the optimizer's state, and the loss before and after."""
    loop = Loop(lambda *made: ModelSwitchWrapper(*made, message_size=1000), of_this_rank, make_optimizer)
    size, seen = bagua.comm.get_world_size(), []
    for name in names:
        before, loop.step = loss(loop.model, size), 0
        loop.switch_to(Algorithm.init(name))
        seen.append((snapshot(loop.model), optimizer_state(loop.optimizer), before, loss(loop.model, size)))
        loop.train(STEPS)
    return seen


@pytest.mark.parametrize(
    ("size", "make_optimizer"), [(2, sgd), (3, harness.adam), (2, QuickToWarmUp)], ids=["momentum", "adam", "qadam"]
)
def test_training_goes_on_through_all_algorithms_and_back(thread_ranks, size, make_optimizer):
    kinds = (None, QAdamOptimizer if make_optimizer is QuickToWarmUp else None)
    names = [name for name in algorithms.registry if algorithms.registry.get(name).optimizer_class in kinds]
    path = [*names, *reversed(names)]
    results = thread_ranks(size, switch_through, path, make_optimizer)
    for of_ranks in zip(*results, strict=True):
        assert_same_on_all_ranks([weights for weights, *_ in of_ranks])
        assert_same_on_all_ranks([state for _, state, *_ in of_ranks])
    first, *others = results[0]
    for name, (_, _, before, after) in zip(path, others, strict=False):
        consensus = algorithms.registry.get(name)().ranks_differ
        assert after < 1.1 * before if consensus else after == pytest.approx(before, rel=1e-5), f"a jump after {name}"
    assert others[-1][3] < 0.8 * first[3], "nothing was learned"
    assert others[-1][1], "the optimizer remembers nothing"
