"""Models and optimizers that differ between ranks, change while they train, or have nothing in some place."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm, registry
from bagua.errors import BaguaError, CollectiveMismatchError, CommunicatorClosedError, ConfigurationError
from bagua.parallel import broadcast_optimizer_state, with_bagua
from tests.contract.algorithms import optimizer_maker
from tests.harness import Losses, State, assert_same_on_all_ranks, batch, loss_of, mlp, sgd, snapshot, train_steps
from tests.parallel.wrapping import Loop, by_bagua_init, by_with_bagua, of_this_rank, on_ranks

# Found out before the first exchange, and named.

#: What one rank does to its model, or the options with which it wraps it, and what names that.
DIFFERENCES: dict[str, tuple[Callable[[nn.Sequential], object] | dict[str, object], str]] = {
    "shape": (
        lambda model: model[0].register_parameter("weight", nn.Parameter(torch.ones(12, 8))),
        r"^ranks have different models.*0\.weight: shape \[.*0\.weight: shape \[",
    ),
    "name": (lambda model: model.append(nn.Sequential(model.pop(4))), r"4\.(0\.)?weight"),
    "dtype": (lambda model: model[2].to(torch.bfloat16), r"2\.weight"),
    "requires_grad": (lambda model: model[:3].requires_grad_(False), r"0\.weight"),
    "buffer": (lambda model: model.register_buffer("calls", torch.zeros(3)), "calls"),
    "bucket_bytes": ({"bucket_bytes": 77_000}, "bucket"),
    "hierarchical": ({"hierarchical_reduce": True}, "hierarchical"),
    "delay_reduce": ({"delay_reduce": True}, "delay_reduce"),
    "fusion": ({"fusion": False}, "fusion"),
    "algorithm": ({"distributed_algorithm": GradientAllReduceAlgorithm(average=False)}, "average"),
    "find_unused_parameters": ({"find_unused_parameters": True}, "find_unused_parameters"),
}


@pytest.mark.parametrize(("other", "pattern"), DIFFERENCES.values(), ids=DIFFERENCES)
@pytest.mark.parametrize("odd", [0, 2], ids=["rank 0 differs", "last rank differs"])
@on_ranks(3, hosts=[2, 1])
def test_models_that_differ_are_found_before_the_first_exchange(other, pattern, odd):
    rank, model, options = bagua.comm.get_rank(), mlp(), {}
    if rank == odd and callable(other):
        other(model)
    elif rank == odd:
        options = other
    before = snapshot(model)
    with pytest.raises(CollectiveMismatchError, match=pattern):
        wrapped = by_bagua_init(model, sgd(model.parameters()), **options)
        loss_of(wrapped, rank, 0).backward()
    assert_same_on_all_ranks([before, snapshot(model)])


ALGORITHMS = [name for name in sorted(registry) if not Algorithm.init(name).in_background]


def declared(name: str, **options: Any) -> Algorithm:
    """An algorithm that does at once what it does, and whose exchanges become due in a few steps."""
    kind = registry.get(name)
    quick = {"sync_every": 2, "start_after": 0, "average_buffers": True, "warmup_steps": 2}
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in {**quick, **options}.items() if key in known})


def started(name: str) -> Loop:
    """A model that was trained for five steps."""
    algorithm = declared(name)
    loop = Loop("with_bagua", of_this_rank, optimizer_maker(algorithm), algorithm=algorithm)
    loop.train(5)
    return loop


def _stepped(loop: Loop) -> None:
    """Have the optimizer step the parameters that the model has now."""
    for gone in set(loop.optimizer.state).difference(loop.model.parameters()):
        loop.optimizer.state.pop(gone)
    loop.optimizer.param_groups[0]["params"][:] = loop.model.parameters()


def widen(model: nn.Sequential) -> None:
    model[2], model[4] = nn.Linear(16, 20), nn.Linear(20, 4)


#: What becomes of a model of five layers.
CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "new_head": lambda model: model.__setitem__(4, nn.Linear(16, 4)),
    "new_weight": lambda model: setattr(model[2], "weight", nn.Parameter(torch.eye(16))),
    "inserted": lambda model: model.insert(2, nn.Linear(16, 16)),
    "removed": lambda model: model.pop(2),
    "wider": widen,
    "without_a_shape": lambda model: model.__setitem__(2, nn.LazyLinear(16)),
    "frozen_elsewhere": lambda model: model[2 * bagua.comm.get_rank()].requires_grad_(False),  # On each rank another.
}


def assert_sound(states: list[State]) -> None:
    assert_same_on_all_ranks(states)
    assert all(value.isfinite().all() for state in states for value in state.values())


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("change", ["new_head", "new_weight", "inserted", "removed", "wider"])
@on_ranks(2, assert_sound)
def test_a_model_that_changes_on_all_ranks_is_trained_together_on(name, change) -> State:
    loop = started(name)
    if loop.rank == 0:
        torch.manual_seed(7)
    bagua.comm.barrier()
    with torch.no_grad():
        CHANGES[change](loop.model)
        for parameter in loop.model.parameters():  # Threads share the generator.
            bagua.comm.broadcast(parameter.detach())
    _stepped(loop)
    loop.train(4)
    loop.wrapped.bagua_finish()
    return snapshot(loop.model)


@pytest.mark.parametrize("name", ["diloco", "slowmo", "sparse_loco"])
@pytest.mark.parametrize("change", ["new_weight", "inserted", "wider"])
@on_ranks(2)
def test_a_new_parameter_is_not_pulled_to_what_another_one_was(name, change):
    loop = started(name)
    loop.train()
    old = {*loop.model.parameters()}
    CHANGES[change](loop.model)
    new = {*loop.model.parameters()} - old
    assert new
    for parameter in new:
        nn.init.ones_(parameter)
    _stepped(loop)
    loop.optimizer.param_groups[0]["lr"] = 0.0
    loop.train(6)
    assert max(float((parameter.detach() - 1).abs().max()) for parameter in new) < 1e-6


@pytest.mark.parametrize(
    ("name", "change"),
    [*((name, "frozen_elsewhere") for name in ("gradient_allreduce", "bytegrad", "local_sgd")),
     ("gradient_allreduce", "without_a_shape")],
)  # fmt: skip
@on_ranks(2)
def test_after_a_change_that_failed_each_step_says_so(name, change):
    """Who tries again, as cells of a notebook do, is told again."""
    loop = started(name)
    CHANGES[change](loop.model)
    with pytest.raises(BaguaError):
        loop.train()
    for _ in range(3):
        with pytest.raises(CommunicatorClosedError, match="can no longer be synchronized"):
            loop.loss()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "diloco"])
@on_ranks(2)
def test_a_group_that_the_script_holds_is_the_one_that_trains(algorithm):
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[4].parameters()}], lr=0.1)
    head, groups = optimizer.param_groups[1], optimizer.param_groups
    by_with_bagua(model, optimizer, algorithm=algorithm)
    assert optimizer.param_groups is groups
    for step in range(3):
        head["lr"] = 0.1 / (step + 1)
        train_steps(model, optimizer, rank, [step])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1 / 3]


@pytest.mark.parametrize("door", ["wrap", "join"])
@on_ranks(2, assert_same_on_all_ranks)
def test_state_is_written_into_the_tensors_that_are_there(door) -> State:
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (rank + 1))
    train_steps(model, optimizer, rank, [0])  # Not wrapped yet: momenta differ.
    first = next(model.parameters())
    held, state = optimizer.state[first], optimizer.state
    momentum = held["exp_avg"]
    by_with_bagua(model, optimizer)
    if door == "join":
        with model.join():
            train_steps(model, optimizer, rank, range(1, 2 + rank))
    assert optimizer.state is state
    assert optimizer.state[first] is held
    assert held["exp_avg"] is momentum
    return {"momentum": momentum.clone(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


@pytest.mark.parametrize("stepped", [0, 1])
@on_ranks(2, assert_same_on_all_ranks)
def test_state_is_that_of_rank_0_also_where_it_has_none(stepped) -> State:
    """As after loading a checkpoint on one rank only."""
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = torch.optim.Adam(model.parameters())
    if rank == stepped:
        train_steps(model, optimizer, rank, [0])
    by_with_bagua(model, optimizer)
    assert len(optimizer.state) == (6 if stepped == 0 else 0)
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def double(step: int) -> int:
    return 2 * step


class Unknown:
    """What no message can hold."""


OF_A_GROUP: dict[str, Any] = {
    "float64": np.float64(0.25), "float32": np.float32(0.25), "int64": np.int64(3), "bool": np.bool_(True),
    "dtype": torch.bfloat16, "function": double, "deque": deque([1, 2]), "device": torch.device("cpu"),
    "object": Unknown(), "nested": {"a": [1, (2.0, None)], "b": np.float32(0.5)}, "tensor": torch.tensor(0.5),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_A_GROUP)
@on_ranks(2, assert_same_on_all_ranks)
def test_settings_of_any_type_can_be_wrapped_and_trained_with(kind) -> State:
    loop = Loop("with_bagua", mlp, lambda own: torch.optim.SGD([{"params": own, "own": OF_A_GROUP[kind]}], lr=0.1))
    loop.train(3)
    assert loop.optimizer.param_groups[0]["own"] == OF_A_GROUP[kind]
    return snapshot(loop.model)


@on_ranks(2)
def test_settings_that_cannot_be_sent_are_compared_by_name():
    kind = torch.bfloat16 if bagua.comm.get_rank() else torch.float16
    with pytest.raises(CollectiveMismatchError, match=r"parameter group 0, kind: torch\.float16"):
        Loop("with_bagua", mlp, lambda own: torch.optim.SGD([{"params": own, "kind": kind}], lr=0.1))


@on_ranks(2)
def test_tensors_that_would_be_left_out_are_an_error_that_names_where_they_are():
    model = mlp()
    optimizer = sgd(model.parameters())
    error, why = CollectiveMismatchError, None
    if bagua.comm.get_rank() == 0:
        optimizer.state[model[0].bias]["history"] = deque([torch.ones(16)])
        error, why = ConfigurationError, r"optimizer 0 \(SGD\), state of parameter 1, history cannot be sent"
    with pytest.raises(error, match=why):
        broadcast_optimizer_state([optimizer])


# The empty case of each thing that is counted, with every algorithm: parts, gradients, buffers, data, steps.

NAMES = list(registry)
#: What they send is made by an optimizer: all ranks are told so at once.
NEED_OPTIMIZERS = ("low_precision_decentralized", "qadam", "one_bit_adam", "one_bit_lamb", "dion")


class Run(Loop):
    """A model of one rank that an algorithm trains."""

    def __init__(self, name: str, make: Callable[[], nn.Module] = mlp, losses: Losses = loss_of) -> None:
        self.algorithm = declared(name, fragments=2)
        of_list = optimizer_maker(self.algorithm)
        super().__init__("with_bagua", make, lambda own: of_list(list(own)), losses, algorithm=self.algorithm)

    def train_through(self) -> None:
        """As a generator trains through a frozen discriminator: only the inputs get gradients."""
        inputs = batch(self.rank, 0)[0].requires_grad_()
        self.model.requires_grad_(False)
        self.model(inputs).sum().backward()
        assert inputs.grad is not None
        assert inputs.grad.any()
        self.model.requires_grad_(True)

    def end(self, steps: int = 0) -> State:
        """After so many more steps."""
        self.train(steps)
        self.wrapped.bagua_finish()
        found = snapshot(self.model)
        self.wrapped.bagua_close()
        return found


def all_frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def frozen_at_wrapping(name: str) -> State:
    run = Run(name, all_frozen)
    run.train_through()
    run.model.requires_grad_(False)
    run.train_through()
    assert run.model.bagua_step == 0
    run.train(4)
    assert run.model.bagua_step == 4
    return run.end()


def frozen_to_the_end(name: str) -> State:
    run = Run(name, all_frozen)
    run.train_through()
    run.model.requires_grad_(False)
    with run.model.bagua_global_average():
        pass
    run.model.bagua_load_state_dict(run.model.bagua_state_dict())
    return run.end()


def all_but_one_frozen(name: str) -> State:
    run = Run(name)
    run.train()
    run.model.requires_grad_(False)
    run.model[4].bias.requires_grad_(True)
    run.train(3)
    run.model.requires_grad_(True)
    return run.end(3)


def no_gradient(name: str) -> State:
    run = Run(name)
    for _ in range(4):
        run.train()
        inputs = batch(run.rank, 0)[0].requires_grad_()
        (found,) = torch.autograd.grad(run.model(inputs).sum(), inputs)
        assert found.any()
    assert run.model.bagua_step == 4
    return run.end()


def no_step(name: str) -> State:
    """And no data."""
    run = Run(name)
    with joined(run):
        pass
    with run.model.bagua_global_average():
        pass
    run.model.bagua_load_state_dict(run.model.bagua_state_dict())
    return run.end()


def no_optimizer(name: str) -> State:
    if name in NEED_OPTIMIZERS:
        with pytest.raises(ConfigurationError, match="argument optimizers"):
            with_bagua(mlp(), [], declared(name, fragments=2))
        return {}
    loop = Loop(lambda model, _: with_bagua(model, [], declared(name, fragments=2)))
    for _ in range(4):
        loop.model.zero_grad()
        loop.backward()
    loop.wrapped.bagua_finish()
    return snapshot(loop.model)


def joined(run: Run) -> contextlib.AbstractContextManager[None]:
    """Where ranks exchange between steps, nobody waits for data of others."""
    return contextlib.nullcontext() if run.algorithm.in_background else run.model.join()


def no_data_on_one_rank(name: str) -> State:
    """At first; and then less than others have."""
    run = Run(name)
    for batches in ((0, 4), (2, 6)):
        with joined(run):
            run.train(batches[run.rank])
    return run.end()


def no_elements(name: str) -> State:
    """Neither in some tensors, nor in a group of the optimizer."""
    model = mlp()
    model[0].register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    model[2].register_buffer("none", torch.empty(0))
    run = Run(name, lambda: model, lambda called, *at: loss_of(called, *at) + model[0].nothing.sum())
    run.optimizer.add_param_group({"params": []})
    return run.end(4)


def no_rows(name: str) -> State:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step)[0][: 6 * (rank == 0)]).square().sum()

    return Run(name, losses=loss).end(4)


FROZEN = [frozen_at_wrapping, frozen_to_the_end, all_but_one_frozen]
NOTHING = [no_gradient, no_step, no_optimizer, no_data_on_one_rank, no_elements, no_rows]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", FROZEN + NOTHING)
@on_ranks(2, assert_sound)
def test_nothing_is_refused_and_nobody_waits(case, name) -> State:
    return case(name)


@pytest.mark.parametrize("name", [name for name in NAMES if not registry.get(name)().in_background])
@on_ranks(2)
def test_a_model_that_is_frozen_for_a_while_trains_as_if_it_had_not_been(name):
    """As a discriminator in each step: what is remembered, and what is under way, stay."""
    toggled, plain = Run(name), Run(name)
    for _ in range(6):
        toggled.train()
        toggled.train_through()
    assert_same_on_all_ranks([toggled.end(), plain.end(6)])
