"""What is legal with plain torch, and random programs of it, compared with one process that has all data."""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import make_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua.comm
from bagua.algorithms import registry
from bagua.engine import SWITCH, Reducer
from tests import harness
from tests.harness import State, adam, assert_same_on_all_ranks, batch, loss_of, mean_gradients, mlp, sgd, snapshot
from tests.parallel.wrapping import WRAPS, Branches, Loop, Made, branch_loss, frozen, of_this_rank, on_ranks

STEPS = 4


class Case(NamedTuple):
    """What is trained."""

    make: Callable[[], nn.Module] = mlp
    losses: harness.Losses = loss_of  # Of what is called, on a rank, in a step.
    optimizer: harness.OptimizerMaker = sgd
    options: Mapping[str, Any] = MappingProxyType({})  # Of ``bagua_init``, which is then the only way in.
    tolerance: float = 1e-4  # Largest relative difference from one process.
    hosts: Sequence[int] = (2,)  # Numbers of their ranks.


def made(forward: Callable[..., Any], **parts: Callable[[], nn.Module | nn.Parameter]) -> Case:
    return Case(lambda: Made(forward, **parts))


def linear(inputs: int, outputs: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs, **options)


def tied() -> nn.Module:
    """One weight under two names, as in language models."""
    with harness.seeded():
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    model[1].weight = model[0].weight
    return model


def trainable(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return sgd(parameter for parameter in parameters if parameter.requires_grad)


def channels_last() -> nn.Module:
    with harness.seeded():
        layers = nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 2)
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *layers, nn.Flatten()).to(memory_format=torch.channels_last)


def holds(*parameters: torch.Tensor) -> nn.Module:
    """A model that adds up what it holds."""

    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        return sum((parameter * inputs.sum()).abs().sum() for parameter in self.held).expand(6, 4)

    return Made(forward, held=lambda: nn.ParameterList(nn.Parameter(parameter) for parameter in parameters))


def in_float(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Old versions of torch take the loss of one dtype only."""
    return loss_of(lambda inputs: model(inputs).float(), rank, step)


HELD: dict[str, Callable[[], nn.Module]] = {
    "transposed": lambda: holds(torch.arange(12.0).view(3, 4).t(), torch.ones(2)),
    "without elements": lambda: holds(torch.ones(0), torch.ones(3), torch.ones(2, 0)),
    "complex": lambda: holds(torch.ones(3, dtype=torch.complex64), torch.ones(3)),
    "float64": lambda: holds(torch.ones(3, dtype=torch.float64), torch.ones(3)),
    "view of a larger tensor": lambda: holds(torch.ones(100)[::7], torch.ones(3)),
    "channels last": lambda: holds(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(1)),
}
PARAMETERS = {
    "tied": Case(tied, optimizer=trainable),
    "frozen": Case(frozen, optimizer=trainable),
    "on the root, one of them a scalar": made(
        lambda self, inputs: nn.functional.linear(inputs, self.weight) * self.scale,
        weight=lambda: nn.Parameter(torch.randn(4, 8)),
        scale=lambda: nn.Parameter(torch.tensor(2.0)),
    ),
    "of three types": made(
        lambda self, inputs: self.third(self.second(self.first(inputs).double()).bfloat16()).float(),
        first=linear(8, 8), second=linear(8, 8, dtype=torch.float64), third=linear(8, 4, dtype=torch.bfloat16),
    )._replace(tolerance=5e-2),
    "in channels_last": Case(channels_last),
    **{f"{kind}, fusion {fusion}": Case(make, in_float, options={"fusion": fusion})
       for kind, make in HELD.items() for fusion in (True, False)},
}  # fmt: skip


def sequence(make: Callable[[], nn.Module], width: int) -> Case:
    """A layer on 4 steps of 2 features."""

    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        output = self.layer(inputs.view(6, 4, 2))
        return self.last((output[0] if isinstance(output, tuple) else output).flatten(1))

    return made(forward, layer=make, last=linear(4 * width, 4))


def checkpointed(use_reentrant: bool) -> Callable[[], nn.Module]:
    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = checkpoint(nn.Sequential(block, nn.ReLU()), hidden, use_reentrant=use_reentrant)
        return self.last(hidden)

    blocks = lambda: nn.ModuleList(nn.Linear(16, 16) for _ in range(3))  # noqa: E731
    return lambda: Made(forward, first=linear(8, 16), blocks=blocks, last=linear(16, 4))


def hooked() -> nn.Module:
    model = mlp()
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    model[2].register_full_backward_hook(lambda module, before, after: tuple(g * 3 for g in before))
    model.register_full_backward_hook(lambda module, before, after: None)
    return model


def calibrated(self: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Assigns a buffer anew in each forward pass, and lets one grow, as observers of quantization do."""
    self.layers.largest = torch.maximum(self.layers.largest, inputs.detach().abs().max())
    self.layers.seen = torch.cat([self.layers.seen, inputs.detach().mean().view(1)])
    return self.layers(inputs)


def with_buffers() -> nn.Module:
    layers = mlp()
    layers.register_buffer("largest", torch.zeros(()), persistent=False)
    layers.register_buffer("seen", torch.zeros(1), persistent=False)
    return layers


LAYERS = {
    "buffers assigned anew": made(calibrated, layers=with_buffers),
    "low rank beside a frozen layer": made(  # Its first gradient is zero in one of two factors.
        lambda self, inputs: self.base(inputs) + inputs @ self.down @ self.up,
        base=lambda: nn.Linear(8, 4).requires_grad_(False),
        down=lambda: nn.Parameter(torch.randn(8, 2)),
        up=lambda: nn.Parameter(torch.zeros(2, 4)),
    )._replace(optimizer=trainable),
    "lstm": sequence(lambda: nn.LSTM(2, 3, num_layers=2, batch_first=True), 3),
    "gru": sequence(lambda: nn.GRU(2, 3, batch_first=True, bidirectional=True), 6),
    "transformer": sequence(lambda: nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True), 2),
    "weight norm": sequence(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)), 3),
    "orthogonal": sequence(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)), 2),
    "layer norm": sequence(lambda: nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4)), 4),
    "group norm": sequence(lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU(), nn.Linear(2, 3)), 3),
    "hooks": Case(hooked),
    **{f"checkpointed, reentrant {reentrant}, delayed {delay}":
       Case(checkpointed(reentrant), options={"delay_reduce": delay})
       for reentrant in (False, True) for delay in (False, True)},
}  # fmt: skip


class Named(NamedTuple):
    note: str
    value: torch.Tensor


class Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.itself = value, self


class ModelOutput(OrderedDict):
    """Like the ``ModelOutput`` of transformers: a dictionary whose items are attributes, too."""


def returns(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Case:
    """A model whose output has another form."""
    case = made(lambda self, inputs: pack(self.layers(inputs)), layers=mlp)
    return case._replace(losses=lambda model, *place: loss_of(lambda inputs: unpack(model(inputs)), *place))


def own_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return model(inputs, targets=targets)


def penalty(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss that contains a gradient: a derivative of a derivative, with the graph kept in between."""
    inputs, targets = batch(rank, step)
    inputs.requires_grad_(True)
    loss = nn.functional.mse_loss(model(inputs), targets)
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + gradient.pow(2).sum()


def adapted(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """As in meta-learning: the gradient arrives through the tensors that took the places of the parameters."""
    plain = getattr(model, "module", model)
    weights = {name: parameter * 0.9 for name, parameter in plain.named_parameters()}
    return loss_of(lambda inputs: torch.func.functional_call(plain, weights, (inputs,)), rank, step)


def summed_passes(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Several forward passes, one of them without gradients, before one backward pass."""
    with torch.no_grad():
        loss_of(model, rank, step)
    return loss_of(model, rank, step) + 0.5 * loss_of(model, rank, step + 100)


def in_bfloat16(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(lambda inputs: model(inputs).float(), rank, step)


def branches(self: Any, inputs: torch.Tensor, place: int) -> torch.Tensor:
    """Each rank runs them in another order in each step; buckets follow the first one of rank 0."""
    first, second = (self.left, self.right) if place % 2 == 0 else (self.right, self.left)
    return first(inputs).tanh() * second(inputs).tanh()


OUTPUTS = {
    "dataclass": returns(make_dataclass("Output", ["value", ("note", str, "text")]), lambda output: output.value),
    "named tuple": returns(lambda value: Named("", value), lambda output: output.value),
    "nested": returns(lambda value: {"a": [None, (value, 3)], "b": "text"}, lambda output: output["a"][1][0]),
    "mapping": returns(lambda value: ModelOutput(value=value), lambda output: output["value"]),
    "object": returns(Plain, lambda output: output.value),
    "function": returns(lambda value: lambda: value, lambda output: output()),
    "several": returns(lambda value: (value, value * 2, value.detach()), lambda output: output[0] + output[1]),
    "changed in place": Case(losses=lambda model, *at: loss_of(lambda inputs: model(inputs).mul_(2).relu_(), *at)),
    "loss": made(
        lambda self, inputs, targets: nn.functional.mse_loss(self.layers(inputs), targets), layers=mlp
    )._replace(losses=own_loss),
    "parameter": made(lambda self, _: self.weight, weight=lambda: nn.Parameter(torch.randn(4, 8)))._replace(
        losses=lambda model, *at: loss_of(lambda inputs: nn.functional.linear(inputs, model(inputs)), *at)
    ),
    "gradient penalty": made(
        lambda self, inputs: self.layers(inputs),
        layers=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)),
    )._replace(losses=penalty),
    "functional call": Case(losses=adapted),
    "autocast": Case(losses=in_bfloat16),
    "several forward passes": Case(losses=summed_passes),
    "branches that one rank uses, or none": Case(Branches, branch_loss, options={"find_unused_parameters": True}),
    **{f"branches in another order, buckets of {nbytes} bytes":
       made(branches, left=linear(8, 4), right=linear(8, 4))._replace(
           losses=lambda model, rank, step: loss_of(lambda inputs: model(inputs, rank + step), rank, step),
           options={"bucket_bytes": nbytes})
       for nbytes in (1, 10**6)},
}  # fmt: skip

OPTIMIZERS = {
    "fused adam": Case(optimizer=partial(torch.optim.AdamW, lr=0.01, fused=True)),
    "foreach sgd": Case(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)),
    "adagrad": Case(optimizer=partial(torch.optim.Adagrad, lr=0.05)),
    "rmsprop": Case(optimizer=partial(torch.optim.RMSprop, lr=0.001, centered=True)),
    "nesterov": Case(optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)),
}
#: Ranks that begin with weights of their own, of which rank 0's must win.
own_weights = partial(Case, of_this_rank)
RANKS = {
    **{f"{size} ranks": own_weights(hosts=[size]) for size in (1, 2, 3)},
    **{f"{make.__name__}, delayed {delay}, fusion {fusion}":
       own_weights(optimizer=make, options={"delay_reduce": delay, "fusion": fusion}, hosts=[3])
       for make in (sgd, adam) for delay in (False, True) for fusion in (False, True)},
    "hosts of [2, 2], whose second ranks lead":
        own_weights(options={"hierarchical_reduce": True, "intra_comm_root_rank": 1}, hosts=[2, 2]),
    **{f"hosts of {hosts}": own_weights(options={"hierarchical_reduce": True}, hosts=hosts)
       for hosts in ([2, 1], [1, 3, 2], [2, 2], [3], [1, 1])},  # Exact on uneven hosts, too.
}  # fmt: skip
CASES = {**PARAMETERS, **LAYERS, **OUTPUTS, **OPTIMIZERS, **RANKS}


def train(wrap: str, case: Case) -> State:
    loop = Loop(wrap, case.make, case.optimizer, case.losses, **case.options)
    layouts = layouts_of(loop.model)
    state = loop.train(STEPS)
    assert layouts_of(loop.model) == layouts
    return state


def layouts_of(model: nn.Module) -> list[bool]:
    return [one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last) for one in model.parameters()]


@pytest.mark.parametrize(
    ("case", "wrap"),
    [(case, wrap) for case in CASES for wrap in WRAPS if wrap == "bagua_init" or not CASES[case].options],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_ranks_train_as_one_process_that_has_all_data(thread_ranks, wrap, case):
    one = CASES[case]
    results = thread_ranks(sum(one.hosts), train, wrap, one, hosts=list(one.hosts))
    assert_same_on_all_ranks(results)
    model = mlp() if one.make is of_this_rank else one.make()
    expected = harness.reference(model, one.optimizer, sum(one.hosts), range(STEPS), one.losses)
    torch.testing.assert_close(results[0], expected, rtol=one.tolerance, atol=one.tolerance / 100)


def test_anomaly_detection(thread_ranks):
    with torch.autograd.set_detect_anomaly(True):  # Of the process, so not in the ranks that are its threads.
        assert_same_on_all_ranks(thread_ranks(2, lambda: Loop().train(2)))
    assert not torch.is_anomaly_enabled()


def _train_both_every_way() -> list[State]:
    """By optimizer and options: the states that bagua ends with, which are those of torch DDP."""
    results = []
    for make in (sgd, adam):
        theirs = Loop(lambda model, _: nn.parallel.DistributedDataParallel(model), mlp, make).train(20)
        for options in ({}, {"delay_reduce": True}, {"fusion": False}):
            results.append(Loop("bagua_init", of_this_rank, make, **options).train(20))
            harness.assert_close(results[-1], theirs)
    return results


@pytest.mark.parametrize(
    "pool", [pytest.param("process_pool", marks=pytest.mark.gloo), pytest.param("shm_pool", marks=pytest.mark.shm)]
)
@pytest.mark.parametrize("size", [2, 3])
def test_processes_agree_bitwise_and_equal_torch_ddp(request, pool, size):
    ways = list(zip(*request.getfixturevalue(pool).run(_train_both_every_way, size=size), strict=True))
    assert len(ways) == 6
    for states in ways:
        assert_same_on_all_ranks(states)


@pytest.mark.parametrize("root", [0, 1])
@on_ranks(4, hosts=[2, 2])
def test_any_local_rank_that_every_host_has_can_lead_in_a_hierarchical_exchange(root):
    loop = Loop(hierarchical_reduce=True, intra_comm_root_rank=root)
    assert bool(loop.reducer.group.inter_node_communicator) == (loop.rank % 2 == root)


# Random programs: whatever a user does between steps, ranks stay equal to one process with all the data.

#: One action: its name and a number that some of them use.
Action = tuple[str, int]


class Training:
    """A model that is trained on all ranks' data, one after the other; ``Rank`` comes to the same with bagua."""

    def __init__(self, size: int) -> None:
        self.model, self.size, self.step, self.scale = mlp(), size, 0, 2.0**10
        self.renew_optimizer()

    def renew_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def gradients(self, way: str, losses: int) -> None:
        """Leave the mean over ranks of the gradients of some batches in ``.grad``, computed in that way."""
        steps = [*range(self.step, self.step + losses)] * (2 if way == "repeat" else 1)
        self.step += losses
        mean_gradients(self.model, self.size, lambda model, rank: sum(loss_of(model, rank, step) for step in steps))

    def update(self, way: str, losses: int, number: int = 0) -> None:
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        self.gradients(way, losses)
        self.optimizer.step()

    def run(self, program: Iterable[Action]) -> State:
        for name, number in program:
            getattr(self, name)(number)
        return {**snapshot(self.model), "scale": torch.tensor(self.scale)}

    # Actions, in alphabetical order.

    def accumulate(self, number: int) -> None:
        """All but the last of several backward passes in ``no_sync``."""
        self.update("accumulate", 2 + number % 2)

    def add_up(self, number: int) -> None:
        """Each synchronized backward pass averages what is in ``.grad``; averaging an average changes nothing."""
        self.update("add up", 2, number)

    def assign(self, number: int) -> None:
        state = {name: value + 0.01 * number for name, value in snapshot(self.model).items()}
        self.model.load_state_dict(state, assign=True)
        self.renew_optimizer()

    def clip(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.gradients("train", 1)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.optimizer.step()

    def fill(self, number: int) -> None:
        """Each rank begins with gradients of its own: its number."""
        self.gradients("train", 1)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad += (self.size - 1) / 2
        self.optimizer.step()

    def freeze(self, number: int) -> None:
        layer = self.model[(0, 2)[number % 2]]
        layer.requires_grad_(not layer.weight.requires_grad)

    def load(self, number: int) -> None:
        self.model.load_state_dict({name: value * 0.9 for name, value in snapshot(self.model).items()})

    def look(self, number: int) -> None:
        """Evaluate, copy, forget: things that must not matter."""

    def overflow(self, number: int) -> None:
        """The loss of one rank is not finite: no rank makes this update."""
        self.step += 1
        self.scale /= 2

    def repeat(self, number: int) -> None:
        """Two backward passes of one graph."""
        self.update("repeat", 1, number)

    def together(self, number: int) -> None:
        """Two forward passes and one backward pass; one of these may be in ``no_sync``, which the other overrules."""
        self.update(("together", "first in no_sync", "second in no_sync")[number % 3], 2)

    def train(self, number: int) -> None:
        self.update("train", 1, number)

    def wrap_again(self, number: int) -> None:
        """On a rank: another wrapper, with small buckets or large ones."""


class Rank(Training):
    """One of several ranks."""

    def __init__(self, wrap: Callable[..., nn.Module]) -> None:
        super().__init__(bagua.comm.get_world_size())
        self.rank, self.wrap = bagua.comm.get_rank(), wrap
        self.wrap_again(0)

    loss, backward = Loop.loss, Loop.backward
    losses = staticmethod(loss_of)

    def gradients(self, way: str, losses: int) -> None:
        if way == "repeat":
            loss = self.loss()
            loss.backward(retain_graph=True)
            loss.backward()
        elif way in ("together", "first in no_sync", "second in no_sync"):
            first = self.without_sync(self.loss) if way == "first in no_sync" else self.loss()
            second = self.without_sync(self.loss) if way == "second in no_sync" else self.loss()
            (first + second).backward()
        else:
            for _ in range(losses - 1):
                if way == "accumulate" and self.step % 2:
                    self.without_sync(self.backward)
                else:
                    (self.without_sync(self.loss) if way == "accumulate" else self.loss()).backward()
            self.backward()

    def without_sync(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns in a ``no_sync`` block, in which nothing is sent."""
        before = bagua.comm.stats().get("allreduce")
        with mock.patch.object(self.model, SWITCH, False, create=True) if self.step % 2 else self.wrapped.no_sync():
            result = function()
        assert bagua.comm.stats().get("allreduce") == before
        return result

    def clip(self, number: int) -> None:
        if number % 2 == 0:
            super().clip(number)
            return
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        self.optimizer.zero_grad()
        scaler.scale(self.loss()).backward()
        scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        scaler.step(self.optimizer)

    def fill(self, number: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, float(self.rank)) if parameter.requires_grad else None
        self.gradients("train", 1)
        self.optimizer.step()

    def look(self, number: int) -> None:
        if self.rank != number % self.size:
            return  # Nobody waits for a rank that looks.
        inputs, _ = batch(self.rank, number)
        if number == 0:
            self.wrapped.eval()
            with torch.no_grad():
                self.wrapped(inputs)
            self.wrapped.train()
        elif number == 1:
            self.wrapped(inputs)
        elif number == 2:
            with torch.inference_mode():
                self.wrapped(inputs)
        elif number == 3:
            output = self.wrapped(inputs.requires_grad_()).sum()
            assert torch.autograd.grad(output, inputs, retain_graph=True)[0].any()
        elif number == 4:
            doubled = {name: value.detach() * 2 for name, value in self.model.named_parameters()}
            torch.func.functional_call(self.model, doubled, (inputs,))
        else:
            copy.deepcopy(self.wrapped)(inputs).sum().backward()

    def overflow(self, number: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        self.optimizer.zero_grad()
        scaler.scale(self.loss() * (torch.inf if self.rank == number % self.size else 1.0)).backward()
        scaler.step(self.optimizer)
        scaler.update()
        self.scale = scaler.get_scale()

    def wrap_again(self, number: int) -> None:
        self.wrapped = self.wrap(self.model, self.optimizer, bucket_bytes=1000 if number % 2 else 10**6)


ACTIONS = (
    "accumulate", "add_up", "assign", "clip", "fill", "freeze", "load", "look", "overflow", "repeat", "together",
    "train", "train", "wrap_again",
)  # fmt: skip
PROGRAMS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=3, max_size=12)


def _run(wrap: str, program: list[Action]) -> State:
    return Rank(WRAPS[wrap]).run(program)


def _check(per_rank: Sequence[State], program: list[Action]) -> None:
    assert_same_on_all_ranks(per_rank)
    harness.assert_close(per_rank[0], Training(len(per_rank)).run(program))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("action", sorted({*ACTIONS}))
def test_each_action_before_and_between_steps(thread_ranks, wrap, action):
    program = [one for number in range(6) for one in ((action, number), ("train", number))]
    _check(thread_ranks(2, _run, wrap, program), program)


@pytest.mark.parametrize("wrap", WRAPS)
def test_random_programs(thread_pool, wrap):
    @given(program=PROGRAMS.map(lambda program: [*program, ("train", 0)]), size=st.integers(2, 3))
    def check(program: list[Action], size: int) -> None:
        _check(thread_pool.run(_run, wrap, program, size=size, timeout_s=10.0), program)

    check()


@pytest.mark.parametrize("algorithm", [registry.get("local_sgd")(5, start_after=3), registry.get("diloco")(9)])
def test_programs_train_alike_whether_forward_passes_go_by_unseen_or_not(thread_pool, monkeypatch, algorithm):
    # A mean of weights must not care when a layer is unfrozen, or which of two forward passes was seen.
    actions = st.sampled_from([one for one in ACTIONS if one not in ("assign", "freeze", "together")])
    wrap, ways = partial(WRAPS["with_bagua"], algorithm=algorithm), (Reducer.rests, property(lambda _: False))

    @given(program=st.lists(st.tuples(actions, st.integers(0, 5)), min_size=3, max_size=6))
    def check(program: list[Action]) -> None:
        program, runs = [one for action in program for one in (action, *(("train", 0),) * 3)], []
        for rests in ways:
            monkeypatch.setattr(Reducer, "rests", rests)
            runs.append(thread_pool.run(lambda: Rank(wrap).run(program), size=2, timeout_s=10.0))
        for states in zip(*runs, strict=True):
            assert_same_on_all_ranks(states)

    check()


def _run_all(programs: list[list[Action]]) -> list[State]:
    return [_run(list(WRAPS)[number % len(WRAPS)], program) for number, program in enumerate(programs)]


def test_random_programs_on_processes(process_ranks):
    dice = random.Random(0)
    programs = [[(dice.choice(ACTIONS), dice.randrange(6)) for _ in range(8)] + [("train", 0)] for _ in range(12)]
    per_rank = process_ranks(2, _run_all, programs)
    for program, states in zip(programs, zip(*per_rank, strict=True), strict=True):
        _check(states, program)
