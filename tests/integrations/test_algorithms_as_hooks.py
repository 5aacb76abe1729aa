"""Algorithms as communication hooks of torch's DDP: the same steps as through the engine, and which cannot be hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.comm
from bagua.algorithms import Algorithm, registry
from bagua.errors import ConfigurationError, UnsupportedAlgorithmException
from bagua.integrations.ddp_comm_hooks import HookState, bagua_hook
from bagua.parallel import with_bagua
from tests.harness import State, assert_close, assert_same_on_all_ranks, snapshot

pytestmark = pytest.mark.gloo

STEPS, HALF = 8, 3
#: All that hooks can do, with options with which so many steps go through all phases.
HOOKS = {
    "gradient_allreduce": {},
    "bytegrad": {"warmup_steps": 2},
    "power_sgd": {"warmup_steps": 2},
    "top_k": {"warmup_steps": 1, "density_steps": 4, "ratio": 0.05},
    "sign_sgd": {"warmup_steps": 2},
    "loco": {"warmup_steps": 2, "reset_every": 5},
}


def _matrix() -> nn.Linear:
    """A model that has one layout, however gradients are put into buckets."""
    torch.manual_seed(0)
    return nn.Linear(24, 16, bias=False)


def _train(trained: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(100 * step + bagua.comm.get_rank())
        optimizer.zero_grad()
        trained(torch.randn(8, 24, generator=random)).square().mean().backward()
        optimizer.step()


def _hooked(state: HookState | None, steps: range, start: State | None = None, saved: object = None) -> nn.Module:
    model = _matrix()
    model.load_state_dict(start or model.state_dict())
    wrapped = DistributedDataParallel(model)
    if state is not None:
        wrapped.register_comm_hook(state, bagua_hook)
        if saved is not None:
            state.load_state_dict(saved, wrapped)
    _train(wrapped, torch.optim.SGD(model.parameters(), lr=0.2), steps)
    return model


def _through_the_engine(algorithm: Algorithm) -> nn.Module:
    model = _matrix()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with_bagua(model, [optimizer], algorithm)
    _train(model, optimizer, range(STEPS))
    return model


def _each_way() -> dict[str, list[State]]:
    """Through the engine, through a hook, and through a hook that is saved and goes on; what plain DDP does."""
    found = {"plain": [snapshot(_hooked(None, range(STEPS)))]}
    for name, options in HOOKS.items():
        algorithm = Algorithm.init(name, hierarchical=False, **options)
        states = [HookState(algorithm) for _ in range(3)]
        whole, half = _hooked(states[0], range(STEPS)), _hooked(states[1], range(HALF))
        saved = states[1].state_dict(half)
        resumed = _hooked(states[2], range(HALF, STEPS), half.state_dict(), saved)
        found[name] = [snapshot(model) for model in (_through_the_engine(algorithm), whole, resumed)]
        for state in states:
            state.close()
    return found


def test_hooks_do_what_the_algorithms_do_in_all_their_phases(process_ranks):
    outcomes = process_ranks(2, _each_way)
    plain = outcomes[0].pop("plain")[0]
    for name, (engine, whole, resumed) in outcomes[0].items():
        assert_same_on_all_ranks([whole, outcomes[1][name][1]])
        assert_close(whole, engine)
        assert_close(resumed, whole)
        if name == "gradient_allreduce":
            assert_close(whole, plain)
        else:
            assert not torch.allclose(whole["weight"], plain["weight"], rtol=1e-3, atol=1e-5), name


def test_what_does_more_than_to_sum_gradients_is_refused():
    for name in registry:
        if name in HOOKS:
            assert repr(HookState(name)) == f"HookState({Algorithm.init(name)})"
        else:
            with pytest.raises(ConfigurationError, match="with_bagua"):
                HookState(name)
    with pytest.raises(ConfigurationError, match="with_bagua"):
        HookState(Algorithm.init("local_sgd", inner="gradient_allreduce"))
    with pytest.raises(UnsupportedAlgorithmException, match="bytegrad"):
        HookState("bytegard")
