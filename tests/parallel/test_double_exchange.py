"""A module whose gradients torch's ``DistributedDataParallel`` would exchange as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FlatParameter, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bagua.comm import solo_group
from bagua.errors import ConfigurationError, InvalidTensorError
from bagua.parallel import with_bagua
from bagua.testing import ThreadRanks


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
    with pytest.raises(ConfigurationError, match=r"both exchange the gradients.*see attach in"):
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
    for one in (*module.parameters(), *other.parameters()):
        assert torch.equal(one.grad, torch.ones_like(one))


def test_ddp_of_torch_inside_a_module_is_refused(gloo: None) -> None:
    inner = DistributedDataParallel(torch.nn.Linear(2, 2))
    for module in (inner, torch.nn.Sequential(inner)):
        with pytest.raises(ConfigurationError, match=r"already.*its \.module"):
            with_bagua(module, torch.optim.SGD(module.parameters(), lr=0.1), "gradient_allreduce", solo_group())


def test_ddp_of_torch_with_frozen_parameters_is_not(gloo: None) -> None:
    teacher = DistributedDataParallel(torch.nn.Linear(2, 2))
    teacher.requires_grad_(False)
    module = torch.nn.Sequential(teacher, torch.nn.Linear(2, 2))
    student = with_bagua(module, torch.optim.SGD(module[1].parameters(), lr=0.1), "gradient_allreduce", solo_group())
    student(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module[1].bias.grad, torch.ones(2))
    assert [one.grad for one in teacher.parameters()] == [None, None]


def test_fully_shard_around_a_module_is_refused(gloo: None) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))

    def shard() -> None:
        layer = torch.nn.Linear(2, 2)
        module = with_bagua(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "gradient_allreduce")
        fully_shard(module, mesh=mesh)
        with pytest.raises(InvalidTensorError, match=r"fully_shard.*register_fsdp_hook"):
            module(torch.ones(1, 2))

    ThreadRanks(2).run(shard)


def test_a_module_that_is_sharded_is_refused(gloo: None) -> None:
    sharded, flat = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    flat.weight = FlatParameter(flat.weight.detach())  # as FSDP makes them, which needs a GPU
    for module in (sharded, flat):
        with pytest.raises(InvalidTensorError, match="register_fsdp_hook"):
            with_bagua(module, torch.optim.SGD(module.parameters(), lr=0.1), "gradient_allreduce", solo_group())
