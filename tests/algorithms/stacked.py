"""All ranks in one process, in plain torch: what algorithms are written down on.

In double precision, as a rule, so that a sign or a choice never depends on the order of additions. Only the layout of
flat memory is taken from the run that is checked: what is chosen depends on neighbours there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm
from bagua.compression import Codec, MinMaxUInt8
from tests import harness
from tests.harness import (
    Losses,
    OptimizerMaker,
    State,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    coded,
    mlp,
    snapshot,
)
from tests.parallel.wrapping import Loop

Flats = list[torch.Tensor]
#: For each bucket its size, and name and offset of each parameter.
Layout = list[tuple[int, list[tuple[str, int]]]]
#: What the gradients of everyone become: (index of the bucket, flat gradient of each rank) -> gradient for all.
Combine = Callable[[int, Flats], torch.Tensor]
SIZE = 4
STEPS = 30


def model_of(rank: int = 0) -> torch.nn.Module:
    return mlp(rank).double()


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return torch.nn.functional.mse_loss(model(inputs.double()), targets.double())


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Replicas:
    """A model and an optimizer for each rank.

    Args:
        size: number of ranks.
        make_optimizer: makes each optimizer.
        make: makes each model.
        losses: loss of a model, on a rank, in a step.
    """

    def __init__(
        self,
        size: int,
        make_optimizer: OptimizerMaker = plain_sgd,
        make: Callable[[], nn.Module] = mlp,
        losses: Losses = harness.loss_of,
    ) -> None:
        self.models = [make() for _ in range(size)]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]
        self.named = [dict(model.named_parameters()) for model in self.models]
        self.losses = losses

    def backward(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            self.losses(model, rank, number).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def step(self, number: int) -> None:
        """Each rank by itself."""
        self.backward(number)
        self.update()

    @property
    def rows(self) -> torch.Tensor:
        """The weights, a row for each rank."""
        return torch.stack([nn.utils.parameters_to_vector(one.parameters()).detach() for one in self.models])

    @rows.setter
    def rows(self, rows: torch.Tensor) -> None:
        for one, row in zip(self.models, rows.expand(len(self.models), -1), strict=True):
            nn.utils.vector_to_parameters(row.clone(), one.parameters())

    @property
    def mean(self) -> torch.Tensor:
        return self.rows.mean(dim=0)

    def weights(self) -> list[State]:
        return [{name: one.detach().clone() for name, one in named.items()} for named in self.named]

    def states(self) -> list[State]:
        return [snapshot(model) for model in self.models]

    def assert_equals(self, results: Sequence[State]) -> None:
        for result, expected in zip(results, self.states(), strict=True):
            assert_close(result, expected)


class Anchored(Replicas):
    """Ranks whose weights are put to an anchor that an outer optimizer steps.

    Args:
        size: number of ranks.
        outer: makes the outer optimizer.
        more: further arguments of ``Replicas``.
    """

    def __init__(self, size: int, outer: Callable[..., torch.optim.Optimizer], **more) -> None:
        super().__init__(size, **more)
        self.anchor = nn.Parameter(self.rows[0])
        self.outer = outer([self.anchor])

    def average(self, rows: torch.Tensor) -> torch.Tensor:
        """Of what ranks have learned: they count alike."""
        return rows.mean(dim=0)

    def outer_step(self) -> None:
        self.anchor.grad = self.average(self.anchor.detach() - self.rows)
        self.outer.step()
        self.rows = self.anchor.detach()


def train(algorithm: Algorithm, make: OptimizerMaker, steps: int = STEPS) -> tuple[State, Layout]:
    """What a rank ends with, and its buckets."""
    make_model = functools.partial(model_of, bagua.comm.get_rank())
    loop = Loop("with_bagua", make_model, make, loss_of, algorithm=algorithm, bucket_bytes=1500)
    return loop.train(steps), layout_of(loop.wrapped.bagua_buckets)


def train_alike(
    ranks: Callable[..., list[tuple[State, Layout]]], algorithm: Algorithm, make: OptimizerMaker
) -> tuple[State, Layout]:
    """What all ranks end with, and their buckets."""
    results = ranks(SIZE, train, algorithm, make)
    assert_same_on_all_ranks([state for state, _ in results])
    return results[0]


def layout_of(buckets) -> Layout:
    return [(one.numel, list(zip(one.names, one.offsets, strict=True))) for one in buckets]


def flatten(tensors: State, numel: int, places: Sequence[tuple[str, int]]) -> torch.Tensor:
    flat = torch.zeros(numel, dtype=next(iter(tensors.values())).dtype)
    for name, offset in places:
        flat[offset : offset + tensors[name].numel()] = tensors[name].flatten()
    return flat


def only_parameters(flat: torch.Tensor, places: Sequence[tuple[str, int]]) -> torch.Tensor:
    """Nothing gathers in the gaps between parameters."""
    return flat * _mask(len(flat), tuple(places)).to(flat.dtype)


@functools.lru_cache(maxsize=32)
def _mask(numel: int, places: tuple[tuple[str, int], ...]) -> torch.Tensor:
    return flatten({name: torch.ones_like(one) for name, one in model_of().state_dict().items()}, numel, places)


def gradients_of(model: torch.nn.Module, rank: int, step: int, losses: Losses = loss_of) -> State:
    model.zero_grad()
    losses(model, rank, step).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def simulate(
    layout: Layout,
    combine: Combine,
    make: OptimizerMaker,
    steps: int | Sequence[int] = STEPS,
    *,
    size: int = SIZE,
    model: torch.nn.Module | None = None,
    losses: Losses = loss_of,
) -> State:
    """Gradients of everyone, combined for each bucket, and one optimizer for all."""
    model = model or model_of()
    optimizer = make(model.parameters())
    for step in range(steps) if isinstance(steps, int) else steps:
        of_ranks = [gradients_of(model, rank, step, losses) for rank in range(size)]
        for index, (numel, places) in enumerate(layout):
            result = combine(index, [flatten(one, numel, places) for one in of_ranks])
            for name, offset in places:
                parameter = model.get_parameter(name)
                part = result[offset : offset + parameter.numel()]
                parameter.grad = part.view(parameter.shape).to(parameter.dtype, copy=True)
        optimizer.step()
    return snapshot(model)


def of_hosts(combine: Combine, hosts: Sequence[int]) -> Combine:
    """The rule for the sums of hosts, of gradients that are divided by the number of ranks."""

    def combined(index: int, flats: Flats) -> torch.Tensor:
        shares = (torch.stack(flats) / len(flats)).split(list(hosts))
        return combine(index, [share.sum(dim=0) for share in shares])

    return combined


def mean(_: int, flats: Flats) -> torch.Tensor:
    """The mutant that loses nothing."""
    return torch.stack(flats).mean(dim=0)


def whole_layout(names: Sequence[str] | None = None) -> tuple[int, list[tuple[str, int]]]:
    """One part of all parameters, or of some, each at a multiple of 64 bytes."""
    places, end = [], 0
    for name, one in model_of().named_parameters():
        if names is not None and name not in names:
            continue
        start = -(-end // 8) * 8
        places.append((name, start))
        end = start + one.numel()
    return end, places


#: What a rank's difference from the anchor becomes: (differences of all ranks) -> what is subtracted from the anchor.
OuterRule = Callable[[Flats], torch.Tensor]


def simulate_local(
    rule: OuterRule | None, every: int, make: OptimizerMaker, left: Callable[[], Flats] | None = None
) -> list[State]:
    """Every rank trains alone; every so often a rule makes one step of all their differences from the anchor.

    What is ``left`` after it is the difference of each rank from the new anchor; nothing, if that is None.
    """
    ranks = Replicas(SIZE, make, model_of, loss_of)
    numel, places = whole_layout()
    anchor = flatten(snapshot(ranks.models[0]), numel, places)
    for step in range(STEPS):
        ranks.step(step)
        if rule is not None and (step + 1) % every == 0:
            anchor = anchor - rule([anchor - flatten(state, numel, places) for state in ranks.states()])
            for model, lost in zip(ranks.models, left() if left else [torch.zeros_like(anchor)] * SIZE, strict=True):
                write(model, anchor - lost, places)
    return ranks.states()


@torch.no_grad()
def write(model: torch.nn.Module, flat: torch.Tensor, places: Sequence[tuple[str, int]]) -> None:
    for name, offset in places:
        parameter = model.get_parameter(name)
        parameter.copy_(flat[offset : offset + parameter.numel()].view(parameter.shape))


def assert_only(state: State, right: State, mutants: Mapping[str, State]) -> None:
    """It is what is right, and none of what must not pass for it."""
    assert_close(state, right)
    for name, mutant in mutants.items():
        assert differs(state, mutant), name


def differs(state: State, other: State) -> bool:
    try:
        assert_close(state, other)
    except AssertionError:
        return True
    return False


class CodedSlices:
    """Each rank codes its slices, one for each rank adds up, and codes the sum; what both lose is that rank's."""

    def __init__(self, codec: Codec, places: Sequence[tuple[str, int]]) -> None:
        self.codec, self.places = codec, places

    def __call__(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum that all end with, and what each rank lost; ``given`` has a row for each rank."""
        ranks, numel = given.shape
        length = -(-numel // ranks)
        whole, last = length * (ranks - 1), slice(length * (ranks - 1), numel)

        def in_slices(rows: torch.Tensor) -> torch.Tensor:
            first = coded(self.codec, rows[:, :whole].reshape(-1, length)).reshape(len(rows), -1)
            return torch.cat([first, coded(self.codec, rows[:, last])], dim=1)

        sent = in_slices(given)
        total = sent.sum(dim=0)
        result = in_slices(total.unsqueeze(0)).squeeze(0)
        lost = given - sent
        for rank in range(ranks):
            mine = slice(rank * length, min((rank + 1) * length, numel))
            lost[rank, mine] += (total - result)[mine]
        mask = only_parameters(torch.ones(numel, dtype=given.dtype), self.places)
        return result, lost * mask


class MeanOfSlices:
    """The mean of what everyone has, in coded slices, with a residual for what either coding loses."""

    def __init__(
        self, codec: Codec, places: Sequence[tuple[str, int]], *, feedback: bool = True, exact: bool = False
    ) -> None:
        self.exchange = CodedSlices(codec, places)
        self.feedback, self.exact, self.residuals = feedback, exact, torch.zeros(SIZE, 1, dtype=torch.float64)

    def __call__(self, flats: Flats) -> torch.Tensor:
        if self.exact:
            return torch.stack(flats).mean(dim=0)
        result, lost = self.exchange(torch.stack(flats) / SIZE + self.residuals)
        self.residuals = lost if self.feedback else self.residuals
        return only_parameters(result, self.exchange.places)


# Rules of sums that lose something. Codecs are taken as they are: they have tests of their own.


def exact(_: int, flats: Flats) -> torch.Tensor:
    """No loss at all."""
    return torch.stack(flats).sum(dim=0)


def byte_grad(index: int, flats: Flats) -> torch.Tensor:
    """Each slice rounded by everyone, summed, and rounded again."""
    return CodedSlices(MinMaxUInt8(), [])(torch.stack(flats))[0]


@dataclass
class WithFeedback:
    """Error feedback: everyone's gradient plus residual as ``codec`` codes it, summed."""

    layout: Layout
    codec: Codec
    residuals: dict[int, Flats] = field(default_factory=dict)

    def __call__(self, index: int, flats: Flats) -> torch.Tensor:
        before = self.residuals.get(index, [torch.zeros_like(flats[0]) for _ in flats])
        given = [flat + residual for flat, residual in zip(flats, before, strict=True)]
        sent = [coded(self.codec, x) for x in given]
        lost = [x - y for x, y in zip(given, sent, strict=True)]
        self.residuals[index] = [only_parameters(x, self.layout[index][1]) for x in lost]
        return torch.stack(sent).sum(dim=0)


class PowerSgd:
    """Projections of summed matrices on the span of what a power iteration found, with error feedback.

    Bases come from a singular value decomposition, and everything is in double precision.

    Args:
        layout: of the buckets.
        rank: of the approximations.
        dtype: in which the first factors are drawn.
    """

    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> None:
        self.layout = layout
        self.rank = rank
        self.residuals: dict[int, list[torch.Tensor]] = {}
        self.right: dict[str, torch.Tensor] = {}
        for _, places in layout:
            matrices = [name for name, _ in places if self._compressed(name)]
            columns = [_shape(name)[1] for name in matrices]
            start = torch.randn(sum(columns), rank, generator=torch.Generator().manual_seed(0), dtype=dtype).double()
            self.right.update(zip(matrices, start.split(columns), strict=True))

    def _compressed(self, name: str) -> bool:
        shape = _shape(name)
        return len(shape) == 2 and sum(shape) * self.rank < shape.numel()

    def __call__(self, index: int, flats: list[torch.Tensor]) -> torch.Tensor:
        before = self.residuals.get(index, [torch.zeros(flats[0].numel()).double() for _ in flats])
        given = [flat.double() + residual for flat, residual in zip(flats, before, strict=True)]
        result = torch.stack(given).sum(dim=0)
        self.residuals[index] = [torch.zeros_like(x) for x in given]
        for name, offset in self.layout[index][1]:
            if self._compressed(name):
                part = slice(offset, offset + _shape(name).numel())
                total = result[part].view(_shape(name)).clone()
                basis = torch.linalg.svd(total @ self.right[name], full_matrices=False).U
                self.right[name] = total.t() @ basis
                result[part] = (basis @ basis.t() @ total).flatten()
                for x, residual in zip(given, self.residuals[index], strict=True):
                    own = x[part].view(_shape(name))
                    residual[part] = (own - basis @ (basis.t() @ own)).flatten()
        return result


def _shape(name: str) -> torch.Size:
    return mlp().get_parameter(name).shape
