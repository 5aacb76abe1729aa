"""Delayed Nesterov against its formula."""

from __future__ import annotations

import pytest
import torch

from bagua.errors import ConfigurationError
from bagua.optim import DelayedNesterov


@pytest.mark.parametrize("delay", [1, 3])
def test_the_momentum_is_refreshed_and_followed_in_every_nth_step(delay):
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, generator=generator).double())
    optimizer = DelayedNesterov([weight], lr=0.3, momentum=0.8, delay=delay)
    expected, momentum, gathered = weight.detach().clone(), torch.zeros(4).double(), []
    for step in range(1, 8):
        weight.grad = torch.randn(4, generator=generator).double()
        gathered.append(weight.grad.clone())
        optimizer.step()
        expected = expected - 0.3 / delay * weight.grad
        if step % delay == 0:
            momentum = 0.8 * momentum + sum(gathered) / delay
            expected = expected - 0.3 * 0.8 * momentum
            gathered = []
        torch.testing.assert_close(weight.detach(), expected)


def test_in_each_step_it_is_that_of_torch():
    own, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    ours = DelayedNesterov([own], lr=0.1, momentum=0.9, delay=1)
    theirs = torch.optim.SGD([other], lr=0.1, momentum=0.9, nesterov=True)
    for step in range(5):
        own.grad = other.grad = torch.full((3,), 1.0 + step)
        ours.step()
        theirs.step()
    torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    ("options", "argument"), [({"delay": 0}, "delay"), ({"momentum": 1.0}, "momentum"), ({"lr": -1.0}, "lr")], ids=str
)
def test_numbers_out_of_their_range_are_refused(options, argument):
    with pytest.raises(ConfigurationError) as caught:
        DelayedNesterov([torch.nn.Parameter(torch.zeros(1))], **options)
    assert caught.value.argument == argument
