"""Every registered algorithm keeps the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

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
from bagua.primitives import AllGatherReducer, ErrorFeedback
from tests.algorithms.test_exchanges import BY_LAYER
from tests.algorithms.toys import (
    LocalSgd,
    QuickOneBitAdam,
    QuickOneBitLamb,
    QuickQAdam,
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
#: Those that step along directions are held to the contract in test_directions.py.
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
