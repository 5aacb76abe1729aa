"""A module whose gradients torch's ``DistributedDataParallel`` would exchange as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua.comm import solo_group
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained() -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    return with_bagua(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "gradient_allreduce", solo_group())


@pytest.mark.parametrize("nested", [False, True])
def test_a_module_inside_ddp_of_torch_is_refused(gloo: None, nested: bool) -> None:
    module = trained()
    wrapped = DistributedDataParallel(torch.nn.Sequential(module) if nested else module)
    with pytest.raises(ConfigurationError, match=r"both exchange the gradients.*use_comm_hook"):
        wrapped(torch.ones(1, 2))


def test_a_module_beside_ddp_of_torch_is_not(gloo: None) -> None:
    module, other = trained(), torch.nn.Linear(2, 2)

    class Teacher(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = other

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.other(inputs) + module(inputs)

    DistributedDataParallel(Teacher())(torch.ones(1, 2)).sum().backward()
