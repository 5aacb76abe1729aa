"""The parts of the engine that no model is needed for: outputs, executors, optimizer state."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.comm import solo_group
from bagua.engine.hooks import tensors_in
from bagua.engine.schedule import lanes
from bagua.errors import CollectiveMismatchError
from bagua.parallel import allreduce_optimizer_state, broadcast_optimizer_state
from tests.parallel.wrapping import on_ranks


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_outputs_that_contain_themselves_or_lead_everywhere_end():
    cyclic: list[Any] = [torch.zeros(1)]
    cyclic.append(cyclic)
    assert len(list(tensors_in(cyclic))) == 1
    model = nn.Linear(2, 2)
    assert list(tensors_in(Opaque([model, torch, Opaque, lambda: model]))) == []
    deep = Opaque(torch.zeros(1))
    for _ in range(5):
        deep = Opaque(deep)
    assert list(tensors_in(deep)) == []


class Device:
    """Stands in for CUDA: notes what is issued on which stream."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.current = Stream(self, "compute")

    @contextlib.contextmanager
    def on(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self.device.notes.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.device.notes.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.device.notes.append(f"{self.name} waits for {event}")


def test_on_a_stream_exchanges_come_after_gradients_and_before_their_use(monkeypatch):
    device = Device()
    exchanges = Stream(device, "exchange")
    monkeypatch.setattr(lanes, "_communication_stream", lambda _: exchanges)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.on)

    class Work:
        def wait(self) -> None:
            device.notes.append(f"{device.current.name} waits for the work")

    def exchange() -> Any:
        device.notes.append(f"exchange on {device.current.name}")
        return Work()

    wait = lanes.StreamLane(solo_group(), torch.device("cuda", 0)).run(exchange)
    assert device.current.name == "compute"
    wait()
    assert device.notes == [
        "exchange waits for compute",
        "exchange on exchange",
        "exchange waits for the work",
        "exchange records",
        "compute waits for event of exchange",
    ]


def test_a_background_thread_works_on_the_stream_of_its_caller(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    background = lanes.ThreadLane(solo_group().duplicate("test-streams"), torch.device("cuda", 0))
    with device.on(Stream(device, "side")):
        wait = background.run(lambda: device.notes.append(f"exchange on {device.current.name}"))
        background.thread.submit(lambda: None).result()
    wait()
    background.close()
    assert device.notes == ["exchange on side", "compute waits for side"]


def _optimizer(rank: int, *, groups: int = 1, steps: int = 1) -> torch.optim.Optimizer:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = [{"params": layer.parameters()} for layer in model] if groups == 2 else model.parameters()
    optimizer = torch.optim.Adam(parameters, lr=0.1 * (rank + 1))
    for _ in range(steps):
        model(torch.ones(1, 2) * (rank + 1)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("exchange", [broadcast_optimizer_state, allreduce_optimizer_state])
@on_ranks(3)
def test_optimizers_that_differ_are_named_on_every_rank(exchange):
    rank = bagua.comm.get_rank()
    with pytest.raises(CollectiveMismatchError, match="parameter groups of"):
        exchange([_optimizer(rank, groups=1 + rank % 2)])


@on_ranks(2)
def test_averaging_needs_the_same_state_on_all_ranks():
    with pytest.raises(CollectiveMismatchError, match="exp_avg of parameter 0"):
        allreduce_optimizer_state([_optimizer(0, steps=bagua.comm.get_rank())])
