"""What counts as a step, what happens to gradients in it, and updates that are skipped."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, DifferenceMix, Flight, LowPrecisionDecentralizedAlgorithm, TopKAlgorithm
from bagua.comm import ProcessGroup
from bagua.engine.gradients import has_finite_gradients
from bagua.errors import BaguaError, ConfigurationError
from bagua.parallel import with_bagua
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    gradients,
    loss_of,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.test_models import ALGORITHMS, OPTIONS, optimizer_maker
from tests.parallel.wrapping import (
    WRAPS,
    Branches,
    Loop,
    assert_trained,
    branch_loss,
    by_bagua_init,
    by_with_bagua,
    on_ranks,
)

BY_WEIGHTS = ["local_sgd", "slowmo", "diloco", "sparse_loco", "decentralized", "low_precision_decentralized"]
STEPS = 8


class Heads(nn.Module):
    """The head that is registered last is trained later, if ever."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.last = mlp(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(inputs))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return nn.functional.mse_loss(self.first(self.body(inputs)), targets)


def by_a_method(model: Any, rank: int, step: int) -> None:
    model.loss(rank, step).backward()


def by_parts(model: Any, rank: int, step: int) -> None:
    inputs, targets = batch(rank, step)
    nn.functional.mse_loss(model.first(model.body(inputs)), targets).backward()


def by_assigning(model: Any, rank: int, step: int) -> None:
    parameters = [*model.body.parameters(), *model.first.parameters()]
    for one, gradient in zip(parameters, torch.autograd.grad(model.loss(rank, step), parameters), strict=True):
        one.grad = gradient


class Steps(Loop):
    """Each of its steps makes gradients in some way."""

    def __init__(self, name: str, way: Callable[..., None] = by_a_method) -> None:
        algorithm, self.way = Algorithm.init(name, **OPTIONS.get(name, {})), way
        options = {"algorithm": algorithm, "find_unused_parameters": True}
        super().__init__("with_bagua", constant_heads, optimizer_maker(algorithm), **options)

    def backward(self) -> None:
        self.step += 1
        self.way(self.model, self.rank, self.step - 1)


def constant_heads() -> nn.Module:
    model = Heads()
    for parameter in model.parameters():  # Threads share the generator.
        nn.init.constant_(parameter, 0.1)
    return model


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, way) for name in ALGORITHMS for way in (by_a_method, by_parts)),
     *((name, by_assigning) for name in BY_WEIGHTS)],
)  # fmt: skip
@on_ranks(2, assert_same_on_all_ranks)
def test_every_step_of_an_optimizer_counts(name, way: Callable[..., None]) -> State:
    loop = Steps(name, way)
    state = loop.train(STEPS)
    assert loop.wrapped.bagua_step == STEPS
    if name in ("local_sgd", "slowmo", "diloco", "sparse_loco"):
        return state  # The last exchange was due after the last step.
    loop.wrapped.bagua_finish()
    return snapshot(loop.model)


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "gradient_allreduce"])
@pytest.mark.parametrize("trained", [["first"], ["last"], ["first", "last"]])
@on_ranks(2, assert_same_on_all_ranks)
def test_parts_of_a_container_train_in_turns(name, trained) -> State:
    """As the two networks of a GAN, which have an optimizer each."""
    rank = bagua.comm.get_rank()
    parts = nn.ModuleDict({"first": mlp(1), "last": mlp(2)})
    optimizers = {key: sgd(part.parameters()) for key, part in parts.items()}
    algorithm = Algorithm.init(name, **OPTIONS.get(name, {}))
    model: Any = by_with_bagua(parts, list(optimizers.values()), algorithm=algorithm, find_unused_parameters=True)
    for step in range(STEPS):
        for key in trained:
            optimizers[key].zero_grad()
            inputs, targets = batch(rank, step)
            nn.functional.mse_loss(parts[key](inputs), targets).backward()
            optimizers[key].step()
    assert model.bagua_step == STEPS * len(trained)
    return snapshot(model)


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
@on_ranks(2, assert_same_on_all_ranks)
def test_an_update_that_one_rank_skips_is_a_step_also_by_a_method(name) -> State:
    loop = Steps(name)
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        loop.backward()
        if loop.rank or step:  # As a GradScaler after an overflow.
            loop.optimizer.step()
        else:
            loop.model.first.weight.grad.fill_(torch.inf)
    assert loop.wrapped.bagua_step == STEPS
    return snapshot(loop.model)


@on_ranks(2)
def test_a_loss_that_is_a_method_stays_inside_no_sync():
    loop = Steps("gradient_allreduce")
    loop.train()
    calls = bagua.comm.stats()["allreduce"].calls
    with loop.wrapped.no_sync():
        loop.backward()
    assert (bagua.comm.stats()["allreduce"].calls, loop.wrapped.bagua_step) == (calls, 1)


@pytest.mark.parametrize("times", [1, 3])
def test_gradients_that_were_not_exchanged_are_told_at_once(thread_ranks, caplog, times):
    def train() -> None:
        Steps("gradient_allreduce", by_assigning).train(times)

    thread_ranks(2, train)
    assert caplog.text.count("optimizer 0 (SGD) steps with gradients that no backward pass has brought") == 1


def test_steps_with_gradients_that_came_are_not_told_of(thread_ranks, caplog):
    def train() -> None:
        loop = Steps("gradient_allreduce")
        for _ in range(3):
            loop.optimizer.zero_grad()
            with loop.wrapped.no_sync():
                loop.backward()
            loop.backward()
            loop.optimizer.step()

    thread_ranks(2, train)
    assert "no backward pass" not in caplog.text


@on_ranks(2)
def test_a_change_that_no_forward_pass_could_take_in_is_an_error():
    loop = Steps("gradient_allreduce")
    loop.train()
    loop.model.first.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigurationError, match=r"first\.weight is another tensor now.*without a forward pass"):
        loop.backward()


# Sharpness-aware minimization: each rank steps up its own gradient, and down that of all.


@contextlib.contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """A little further uphill than the weights were, and are again afterwards."""
    old = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=0.05)
    yield
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), old, strict=True):
            parameter.copy_(before)


def _sharpness_aware() -> State:
    """What two ranks come to, on one."""
    model = mlp()
    optimizer = sgd(model.parameters())
    for step in range(5):
        total: list[torch.Tensor] = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            with perturbed(model):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
            for mean, parameter in zip(total, model.parameters(), strict=True):
                mean.add_(parameter.grad, alpha=0.5)
        for mean, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = mean
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("check_every", [0, 1, None])
@pytest.mark.parametrize("given", [True, False], ids=["with the optimizer", "without"])
def test_weights_may_differ_until_the_optimizer_has_stepped(thread_ranks, check_every, given):
    def train() -> State:
        rank, model = bagua.comm.get_rank(), mlp()
        optimizer = sgd(model.parameters())
        wrapped: Any = by_with_bagua(model, [optimizer] if given else [], check_every=check_every)
        for step in range(5):
            optimizer.zero_grad()
            with wrapped.no_sync():
                loss_of(wrapped, rank, step).backward()
            with perturbed(model):
                optimizer.zero_grad()
                loss_of(wrapped, rank, step).backward()
            optimizer.step()
        return snapshot(model)

    states = thread_ranks(2, train)
    assert_same_on_all_ranks(states)
    assert_close(states[0], _sharpness_aware())


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "local_sgd"])
@on_ranks(1)
def test_steps_of_one_rank_alone_count(name):
    loop = Steps(name)
    loop.train(3)
    assert loop.wrapped.bagua_step == 3


def test_unused_parameters_are_an_error_that_lists_them_on_every_rank(thread_ranks):
    def train() -> str:
        loop = Loop(make=Branches)
        with pytest.raises(BaguaError, match=r"never\.weight") as caught:
            branch_loss(loop.wrapped, loop.rank).backward()
        return str(caught.value)

    left, right = thread_ranks(2, train)
    assert "right.bias" in left
    assert "left.bias" in right
    assert "find_unused_parameters" in left


class Sides(nn.Module):
    """Two parameters, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(64)) for _ in range(2))

    def forward(self, side: str) -> torch.Tensor:
        return (self.left * torch.arange(1.0, 65.0)).sum() if side == "left" else (self.right * 0.0).sum()


@pytest.mark.parametrize("fusion", [True, False])
@on_ranks(2)
def test_what_error_feedback_brings_for_unused_parameters_is_not_lost(fusion):
    """A quarter of what is left is sent in each step, also when nobody uses the parameter any more."""
    model, algorithm = Sides(), TopKAlgorithm(ratio=0.125, warmup_steps=0, density_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = with_bagua(model, optimizer, algorithm, find_unused_parameters=True, do_flatten=fusion)
    for side in ("left", *("right",) * 4):
        optimizer.zero_grad()
        wrapped(side).backward()
        optimizer.step()
    assert (model.left.tolist(), model.left.grad is None) == ([-float(one) for one in range(1, 65)], True)


@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2, assert_same_on_all_ranks)
def test_lbfgs_calls_its_closure_several_times_in_a_step(wrap) -> State:
    loop = Loop(wrap, make_optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4))

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loss_of(loop.wrapped, loop.rank, loop.step)
        loss.backward()
        mean = loss.detach().clone()
        bagua.comm.allreduce(mean, bagua.comm.ReduceOp.AVG)
        return mean

    for loop.step in range(2):
        loop.optimizer.step(closure)
    return snapshot(loop.model)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@on_ranks(2)
def test_backward_with_create_graph_is_refused():
    loop = Loop()
    with pytest.raises(ConfigurationError, match="create_graph"):
        loop.loss().backward(create_graph=True)


def test_a_gradient_hook_of_the_user_sees_local_gradients(thread_ranks):
    """Hooks on tensors run before the gradient is accumulated, hence before it is exchanged."""

    def train() -> tuple[torch.Tensor, torch.Tensor]:
        loop, seen = Loop(), []
        loop.model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        for _ in range(2):
            loop.model.zero_grad()
            loop.backward()
        return seen[-1], loop.model[0].weight.grad

    (first, mean), (second, _) = thread_ranks(2, train)
    assert not torch.equal(first, second)
    torch.testing.assert_close((first + second) / 2, mean)


def test_a_wrapped_module_inside_another_module(thread_ranks):
    """Only the backbone is wrapped; the head on top of it stays local."""

    def train() -> tuple[State, State]:
        backbone, head = mlp(), nn.Linear(4, 4)
        optimizer = sgd([*backbone.parameters(), *head.parameters()])
        model = nn.Sequential(by_with_bagua(backbone, sgd(backbone.parameters())), head)
        train_steps(model, optimizer, bagua.comm.get_rank(), range(3))
        return snapshot(backbone), snapshot(head)

    results = thread_ranks(2, train)
    assert_same_on_all_ranks([backbone for backbone, _ in results])
    assert not torch.equal(results[0][1]["weight"], results[1][1]["weight"])


def test_several_models_and_optimizers_in_one_process(thread_ranks):
    """Two models trained in turns, one of them with two optimizers, as in adversarial training."""

    def train() -> State:
        rank, first, second = bagua.comm.get_rank(), mlp(1), mlp(2)
        halves, whole = [sgd(first[:2].parameters()), sgd(first[2:].parameters())], sgd(second.parameters())
        one, two = by_with_bagua(first, halves), by_bagua_init(second, whole)
        for step in range(4):
            for optimizer in (*halves, whole):
                optimizer.zero_grad()
            (loss_of(one, rank, step) + loss_of(two, rank, step)).backward()
            for optimizer in (*halves, whole):
                optimizer.step()
        return snapshot(nn.ModuleList([first, second]))

    expected = [reference(mlp(seed), sgd, 2, range(4)) for seed in (1, 2)]
    merged = {f"{number}.{name}": value for number, state in enumerate(expected) for name, value in state.items()}
    assert_trained(thread_ranks(2, train), merged)


@pytest.mark.parametrize("attribute", ["_ddp_params_and_buffers_to_ignore", "_bagua_params_and_buffers_to_ignore"])
def test_ignored_parameters_stay_local(thread_ranks, attribute):
    def make() -> nn.Module:
        model = mlp(seed=bagua.comm.get_rank())
        setattr(model, attribute, ["0.weight"])
        return model

    def train() -> State:
        loop = Loop(make=make)
        loop.backward()
        return snapshot(loop.model) | {f"{name}.grad": one for name, one in gradients(loop.model).items()}

    first, second = thread_ranks(2, train)
    for name in first:
        assert torch.equal(first[name], second[name]) != (name in ("0.weight", "0.weight.grad")), name


FEW_STEPS = 3
#: The rank whose gradients overflow in the last step.
OVERFLOWS = 1


def _train(optimizers_per_model: int, finish: str) -> tuple[State, State, float]:
    """Weights, what neighbours know of them, and the scale at the end."""
    rank, model = bagua.comm.get_rank(), mlp()
    parts = [model] if optimizers_per_model == 1 else [model[0], nn.ModuleList(model[1:])]
    optimizers = [sgd(part.parameters()) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapped = with_bagua(model, optimizers, "low_precision_decentralized", bucket_bytes=1000)
    for step in range(FEW_STEPS):
        if rank == OVERFLOWS and step == FEW_STEPS - 1:
            model[0].weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        model.zero_grad()
        scaler.scale(loss_of(wrapped, rank, step)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    if finish == "something else together":
        bagua.comm.get_default_group().global_communicator.barrier()
    weights = snapshot(model) if finish == "something else together" else wrapped.state_dict()
    known = wrapped.bagua_state_dict()[f"rank{rank}"]["parameters"]
    return weights, {name: state["estimate"] for name, state in known.items()}, scaler.get_scale()


@pytest.mark.parametrize("optimizers_per_model", [1, 2])
def test_ranks_leave_training_for_something_else_together(thread_ranks, optimizers_per_model):
    left = thread_ranks(2, _train, optimizers_per_model, "something else together", timeout_s=20)
    asked = thread_ranks(2, _train, optimizers_per_model, "state_dict")
    assert [scale for *_, scale in left] == [4.0, 2.0], "one update was skipped, on one rank"
    for rank, (weights, known, _) in enumerate(left):
        for name, weight in weights.items():
            assert torch.equal(weight, known[name]), "the last thing that changed weights is the exchange"
            assert torch.equal(weight, asked[rank][0][name])


class Unusual(nn.Module):
    """Has a parameter without elements, and an optimizer that also has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.nothing = mlp(), nn.Parameter(torch.empty(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs) + self.nothing.sum()


@on_ranks(2)
def test_gradients_without_elements_and_sparse_ones_are_looked_at_too():
    table = nn.Embedding(4, 2, sparse=True)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return loss_of(model, rank, step) + table(torch.tensor([rank])).sum()

    def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd([*parameters, *table.parameters()])

    loop = Loop("with_bagua", Unusual, optimizer_of, loss, algorithm="low_precision_decentralized")
    loop.train(FEW_STEPS)
    assert all(weight.isfinite().all() for weight in loop.wrapped.state_dict().values())


@pytest.mark.parametrize(
    ("value", "finite"), [(1.0, True), (3e38, True), (torch.inf, False), (-torch.inf, False), (torch.nan, False)]
)
def test_gradients_whose_norm_overflows_are_finite_all_the_same(value, finite):
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    parameters[0].grad[1:] = value
    assert has_finite_gradients(sgd(parameters)) is finite


def _sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many exchanges each rank has started, of whatever is sent after the optimizers."""
    counted: Counter[int] = Counter()
    run = DifferenceMix.run

    def count(self: DifferenceMix, flight: Flight, group: ProcessGroup) -> None:
        counted[group.rank] += 1
        run(self, flight, group)

    monkeypatch.setattr(DifferenceMix, "run", count)
    return counted


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_what_is_owed_survives_further_backward_passes(thread_ranks, monkeypatch, interval):
    """Two losses, one update: each backward pass is a step, and each update pays what the steps before it owe."""
    counted = _sent(monkeypatch)

    def train() -> None:
        algorithm = LowPrecisionDecentralizedAlgorithm(communication_interval=interval)
        loop = Loop("with_bagua", algorithm=algorithm, bucket_bytes=10**6)
        for step in range(6):
            loop.optimizer.zero_grad()
            output = loop.wrapped(batch(loop.rank, step)[0])
            output.sum().backward(retain_graph=True)
            output.square().sum().backward()
            loop.optimizer.step()
        snapshot(loop.model)

    thread_ranks(2, train)
    due = [t for t in range(1, 13) if (t - 1) % interval == 0]
    assert counted == {rank: len({(t - 1) // 2 for t in due}) for rank in (0, 1)}


def _climb_and_descend(synchronized: bool) -> State:
    """Sharpness-aware minimization: the gradient is that of weights a little further uphill."""
    loop = Loop("with_bagua", algorithm="low_precision_decentralized")
    for step in range(4):
        loop.optimizer.zero_grad()
        with contextlib.nullcontext() if synchronized else loop.wrapped.no_sync():
            loss_of(loop.wrapped, loop.rank, step).backward()
        with perturbed(loop.model):
            loop.optimizer.zero_grad()
            loss_of(loop.wrapped, loop.rank, step).backward()
        loop.optimizer.step()
    return snapshot(loop.model)


def test_weights_that_were_changed_by_no_optimizer_are_not_sent(thread_ranks):
    with pytest.raises(ConfigurationError, match=r"weights were changed.*no_sync"):
        thread_ranks(2, _climb_and_descend, True)
    for state in thread_ranks(2, _climb_and_descend, False):
        assert all(value.isfinite().all() for value in state.values())


@on_ranks(2)
def test_weights_may_be_loaded_in_place_of_an_update():
    loop = Loop("with_bagua", algorithm="low_precision_decentralized")
    before, started = snapshot(loop.wrapped), []
    for step in range(4):
        loop.optimizer.zero_grad()
        loss_of(loop.wrapped, loop.rank, step).backward()
        if step == 2:
            loop.model.load_state_dict(before)
        else:
            loop.optimizer.step()
        started.append(all(torch.equal(one, before[name]) for name, one in loop.model.named_parameters()))
    assert started == [False, False, True, False]
