"""Muon against its formula, and against that of PyTorch."""

from __future__ import annotations

import pytest
import torch

from bagua.errors import ConfigurationError
from bagua.optim import Muon

SHAPES = [(7, 5), (5, 7), (4, 3, 2)]


def of_shapes(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).double()) for shape in SHAPES]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_each_step_is_the_formula(nesterov, scale):
    """Steps have the singular vectors of the momentum, and singular values near one."""
    parameters, momenta = of_shapes(), [torch.zeros(shape).double() for shape in SHAPES]
    optimizer = Muon(parameters, lr=0.1, nesterov=nesterov, weight_decay=0.5, scale=scale)
    for step in range(50):
        before = [one.detach().clone() for one in parameters]
        for parameter, drawn in zip(parameters, of_shapes(step + 1), strict=True):
            parameter.grad = drawn.detach()
        optimizer.step()
        for index, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
            momenta[index] = 0.95 * momenta[index] + parameter.grad
            ahead = (parameter.grad + 0.95 * momenta[index] if nesterov else momenta[index]).flatten(1)
            rows, columns = ahead.shape
            size = (rows / columns) ** 0.5 if scale == "spectral" else 0.2 * max(rows, columns) ** 0.5
            found = ((old * (1 - 0.05) - parameter.detach()) / (0.1 * size)).flatten(1)
            u, s, vh = torch.linalg.svd(ahead, full_matrices=False)
            values = u.t() @ found @ vh.t()
            torch.testing.assert_close(values - values.diag().diag(), torch.zeros_like(values), atol=1e-8, rtol=0)
            assert (values.diag()[s > 0.01 * s[0]] - 1).abs().max() < 0.3
    assert "momentum_buffer" in optimizer.state[parameters[0]]


def test_it_goes_where_that_of_torch_goes():
    theirs = getattr(torch.optim, "Muon", None)
    if theirs is None:
        pytest.skip("this PyTorch has no Muon")
    parameters, others = ([torch.nn.Parameter(torch.ones(6, 4))] for _ in range(2))
    own = Muon(parameters, lr=0.02, weight_decay=0.1)
    other = theirs(others, lr=0.02, weight_decay=0.1, momentum=0.95)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradient = torch.randn(6, 4, generator=generator)
        parameters[0].grad, others[0].grad = gradient.clone(), gradient.clone()
        own.step()
        other.step()
    moved, wanted = (one[0].detach() - 1 for one in (parameters, others))
    assert torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0) > 0.98


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ConfigurationError, match="two dimensions"):
        Muon([torch.nn.Parameter(torch.ones(3))])
