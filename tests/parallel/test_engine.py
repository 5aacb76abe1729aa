"""The engine by itself, and the parts of it that no model is needed for."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, Every, Exchange, Flight, Gradients, How, Replace, Then, Weights
from bagua.comm import ProcessGroup, solo_group
from bagua.engine.buckets.registration import Registration
from bagua.engine.hooks import tensors_in
from bagua.engine.schedule import lanes
from bagua.errors import (
    BaguaError,
    CollectiveMismatchError,
    CommunicationError,
    ConfigurationError,
    InvalidTensorError,
    PeerLostError,
)
from bagua.parallel import OverlappingWrapper, allreduce_optimizer_state, broadcast_optimizer_state
from tests.harness import mlp, seeded, sgd
from tests.parallel.wrapping import Branches, Loop, branch_loss, on_ranks


@on_ranks(2)
def test_models_that_share_some_parameters_cannot_both_be_wrapped():
    shared = nn.Linear(4, 4)
    first = nn.Sequential(shared, nn.Linear(4, 2))
    kept = OverlappingWrapper(first, sgd(first.parameters()))
    second = nn.Sequential(shared, nn.Linear(4, 3))
    with pytest.raises(ConfigurationError, match=r"0\.weight is exchanged by the engine of another model"):
        OverlappingWrapper(second, sgd(second.parameters()))
    assert shared.weight._post_accumulate_grad_hooks, "the first model lost its hooks"
    del kept


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(16, 8))


def moved(model: nn.Sequential) -> None:
    model[0].bias.data = model[0].bias.data.clone()


def shortened(model: nn.Sequential) -> None:
    """Its memory begins where it did."""
    model[0].bias.data = model[0].bias.data[:1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(shortened, "0.bias had 16 elements and has 1 now", id="shortened"),
        pytest.param(replaced, "0.weight", id="replaced"),
        pytest.param(lambda model: model[2].bias.requires_grad_(True), "2.bias", id="unfrozen"),
        pytest.param(lambda model: model.append(nn.Linear(4, 4)), "added", id="added"),
        pytest.param(nn.Module.double, "0.weight", id="of another type"),
        pytest.param(moved, "0.bias", id="moved"),
        pytest.param(
            lambda model: model.__setitem__(4, nn.Linear(16, 4)), "4 is another module now", id="another module"
        ),
        pytest.param(lambda model: model.append(nn.Identity()), "None", id="added without parameters"),
        pytest.param(lambda model: model.__setitem__(1, nn.Dropout()), "None", id="another without parameters"),
    ],
)
def test_what_is_a_difference_from_the_model_that_was_wrapped(change, told):
    model = mlp()
    model[2].bias.requires_grad_(False)
    registration = Registration(model)
    assert registration.difference() is None
    change(model)
    assert told in str(registration.difference())


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: nn.LazyLinear(3), "no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "no memory"),
        (lambda: nn.Embedding(4, 2, sparse=True), "sparse gradients"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_that_cannot_be_put_into_a_bucket_are_named(make, problem):
    with pytest.raises(InvalidTensorError, match=f"weight .*{problem}"):
        Registration(make())


def test_a_model_that_only_one_rank_cannot_wrap_is_an_error_on_every_rank(thread_ranks):
    def check() -> str:
        rank = bagua.comm.get_rank()
        model = nn.Sequential(nn.Embedding(4, 2, sparse=rank == 1), nn.Linear(2, 2))
        with pytest.raises(BaguaError) as caught:
            OverlappingWrapper(model, sgd(model.parameters()))
        return f"{type(caught.value).__name__}: {caught.value}"

    results = thread_ranks(3, check)
    assert results[1].startswith("InvalidTensorError: 0.weight has sparse gradients")
    for result in (results[0], results[2]):
        assert result.startswith("CollectiveMismatchError")
        assert "0.weight has sparse gradients" in result


@dataclass(frozen=True)
class ManySums(How):
    """Sums that go on for a while."""

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        for _ in range(20):
            group.global_communicator.allreduce(flight.flat)


@dataclass(frozen=True)
class Ignore(Then):
    """Nobody uses the result."""

    def fold(self, flight: Flight) -> None:
        pass


#: Sums of gradients, that nobody uses, in a background thread that goes on until the next step.
IN_BACKGROUND = Algorithm.of(Exchange(Gradients(), Every(), ManySums(), Ignore(), lag=1))


@on_ranks(2)
def test_gradients_that_no_rank_has_stay_none_with_every_lag():
    rank = bagua.comm.get_rank()
    for algorithm in (Algorithm.init("gradient_allreduce"), IN_BACKGROUND):
        loop = Loop(OverlappingWrapper, Branches, algorithm=algorithm, find_unused_parameters=True, bucket_bytes=1)
        for step in range(4):
            loop.model.zero_grad()
            branch_loss(loop.wrapped, rank, step).backward()
        branches = loop.model.left, loop.model.right, loop.model.never
        assert [branch.weight.grad is not None for branch in branches] == [True, True, False]


def test_devices_that_the_group_does_not_serve_are_named():
    registration = Registration(mlp())
    registration.refuse_other_devices({"cpu", "cuda"})
    with pytest.raises(InvalidTensorError, match=r"parameter 0\.weight is on a device"):
        registration.refuse_other_devices({"cuda"})


def dropping(model: nn.Module) -> nn.Module:
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    return model


@on_ranks(2)
def test_a_hook_of_the_user_that_drops_gradients_is_an_error():
    loop = Loop(lambda model, optimizer: OverlappingWrapper(dropping(model), optimizer))
    with pytest.raises(ConfigurationError, match=r"the gradient of 0\.bias cannot be put into a bucket.*seen None"):
        loop.train(2)


@dataclass(frozen=True)
class FailsOnRank1(How):
    """Cannot, in step 1 on rank 1."""

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        if group.rank == 1 and flight.step == 1:
            raise ArithmeticError("no such block")
        group.global_communicator.allreduce(flight.flat)


FAILS_AFTER_STEP = Algorithm.of(Exchange(Weights(), Every(), FailsOnRank1(), Ignore()))


@on_ranks(2)
def test_an_error_in_an_exchange_after_the_optimizer_ends_every_rank():
    loop = Loop(OverlappingWrapper, algorithm=FAILS_AFTER_STEP)
    with pytest.raises(ArithmeticError if loop.rank else PeerLostError, match="no such block"):
        loop.train(5)
    with pytest.raises(CommunicationError):
        loop.train()


#: Exchanges of gradients, and by what they multiply the sum of those of two ranks.
SUMS = [("gradient_allreduce", 0.5), (Algorithm.of(Exchange(Gradients(), Every(), ManySums(), Replace())), 2.0**19)]


@pytest.mark.parametrize(("algorithm", "factor"), SUMS, ids=["scaled", "as they are"])
@on_ranks(2)
def test_gradients_are_put_into_their_bucket_together_and_before_they_take_much_memory(algorithm, factor):
    """The large one brings all that came before it into the bucket; those after it wait for the last one."""

    def made() -> nn.Sequential:
        with seeded():
            return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5000), nn.Linear(5000, 2))

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model.zero_grad()
        model(torch.full((1, 4), 1.0 + rank + step)).square().sum().backward()

    rank = bagua.comm.get_rank()
    model = made()
    wrapped = OverlappingWrapper(model, sgd(model.parameters()), algorithm=algorithm)
    backward(wrapped, rank, 0)
    (bucket,) = wrapped.bagua_buckets
    views = dict(zip(bucket.names, bucket.gradient_views, strict=True))
    gathered = []

    def look(_: nn.Parameter) -> None:
        gathered.append([name for name, one in model.named_parameters() if one.grad is views[name]])

    model[0].bias.register_post_accumulate_grad_hook(look)
    for step in (1, 2):
        backward(wrapped, rank, step)
        alone = [made(), made()]
        for other, one in enumerate(alone):
            backward(one, other, step)
        for name, parameter in model.named_parameters():
            local = [one.get_parameter(name).grad for one in alone]
            torch.testing.assert_close(parameter.grad, factor * (local[0] + local[1]))
            assert parameter.grad is views[name]
    assert gathered == [["1.weight", "1.bias", "2.weight", "2.bias"]] * 2


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
