"""Every registered algorithm keeps the contract, also after a switch in the middle of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import bagua.comm
from bagua.algorithms import (
    Add,
    Algorithm,
    DecentralizedAlgorithm,
    Every,
    Exchange,
    LocalUpdates,
    LoCoAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    Mix,
    PowerSGDAlgorithm,
    ReducedGradients,
    SignSGDAlgorithm,
    TopKAlgorithm,
    Weights,
    registry,
)
from bagua.compression import BlockTopK
from bagua.optim import QAdamOptimizer
from bagua.primitives import AllGatherReducer, ErrorFeedback
from bagua.torch_api.distributed import ModelSwitchWrapper
from tests.algorithms.test_exchanges import BY_LAYER
from tests.algorithms.test_toys import (
    LocalSgd,
    QuickOneBitAdam,
    QuickOneBitLamb,
    QuickQAdam,
    QuickToWarmUp,
    Rounded,
    WarmsUp,
)
from tests.contract.algorithms import (
    ONE_BUCKET_BYTES,
    AlgorithmContract,
    resume_and_train,
    train,
    train_and_save,
)
from tests.harness import (
    OptimizerMaker,
    State,
    adam,
    assert_same_on_all_ranks,
    loss_of,
    mlp,
    sgd,
    snapshot,
    train_steps,
)

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
#: Those that step along directions are held to the contract in test_lossy.py.
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
