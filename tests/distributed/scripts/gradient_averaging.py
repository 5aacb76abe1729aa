"""Synchronous SGD: each rank has its part of the data, gradients are averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model):
    size = float(dist.get_world_size())
    works = [dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, async_op=True) for parameter in model.parameters()]
    for work in works:
        work.wait()
    for parameter in model.parameters():
        parameter.grad /= size


def run(rank, size):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(size * 4, 3, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(float(rank + number))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mine = slice(rank * 4, rank * 4 + 4)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
        loss.backward()
        average_gradients(model)
        optimizer.step()
        mean = loss.detach().clone()
        future = dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0] / size)
        losses.append(future.wait())
    assert losses[-1] < losses[0]
    weights = [torch.empty_like(model.weight) for _ in range(size)]
    dist.all_gather(weights, model.weight.detach())
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    return [model.weight.detach(), model.bias.detach(), torch.stack(losses)]
