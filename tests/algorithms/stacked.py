"""All ranks in one process, in plain torch: what algorithms are written down on.

In double precision, as a rule, so that a sign or a choice never depends on the order of additions. Only the layout of
flat memory is taken from the run that is checked: what is chosen depends on neighbours there.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm
from bagua.compression import Codec, MinMaxUInt8
from tests import harness
from tests.harness import Losses, OptimizerMaker, State, assert_close, assert_same_on_all_ranks, coded, mlp, snapshot
from tests.parallel.wrapping import Loop

Flats = list[torch.Tensor]
#: Name and offset of each parameter in flat memory.
Places = list[tuple[str, int]]
#: For each bucket its size, and its places.
Layout = list[tuple[int, Places]]
#: What the gradients of everyone become: (index of the bucket, flat gradient of each rank) -> gradient for all.
Combine = Callable[[int, Flats], torch.Tensor]
SIZE, STEPS = 4, 30
plain_sgd = functools.partial(torch.optim.SGD, lr=0.1)


def model_of(rank: int = 0) -> torch.nn.Module:
    return mlp(rank).double()


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = harness.batch(rank, step)
    return torch.nn.functional.mse_loss(model(inputs.double()), targets.double())


class Replicas:
    """A model and an optimizer for each rank."""

    def __init__(
        self, size: int, make_optimizer: OptimizerMaker = plain_sgd, make: Callable[[], nn.Module] = mlp,
        losses: Losses = harness.loss_of,
    ) -> None:  # fmt: skip
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

    def states(self) -> list[State]:
        return [snapshot(model) for model in self.models]

    def assert_equals(self, results: Sequence[State]) -> None:
        torch.testing.assert_close(list(results), self.states(), rtol=1e-4, atol=1e-6)


class Anchored(Replicas):
    """Ranks whose weights are put to an anchor that an outer optimizer steps; ``more`` is for ``Replicas``."""

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
    make_model = functools.partial(model_of, bagua.comm.get_rank())
    loop = Loop("with_bagua", make_model, make, loss_of, algorithm=algorithm, bucket_bytes=1500)
    return loop.train(steps), layout_of(loop.wrapped.bagua_buckets)


def train_alike(ranks: Callable[..., list], algorithm: Algorithm, make: OptimizerMaker) -> tuple[State, Layout]:
    results = ranks(SIZE, train, algorithm, make)
    assert_same_on_all_ranks([state for state, _ in results])
    assert len(results[0][1]) > 1, "one bucket hides what is wrong with several"
    return results[0]


def layout_of(buckets) -> Layout:
    return [(one.numel, list(zip(one.names, one.offsets, strict=True))) for one in buckets]


def flatten(tensors: State, numel: int, places: Places) -> torch.Tensor:
    flat = torch.zeros(numel, dtype=next(iter(tensors.values())).dtype)
    for name, offset in places:
        flat[offset : offset + tensors[name].numel()] = tensors[name].flatten()
    return flat


def only_parameters(flat: torch.Tensor, places: Places) -> torch.Tensor:
    """Nothing gathers in the gaps between parameters; ``flat`` may have a row for each rank."""
    return flat * _mask(flat.shape[-1], tuple(places)).to(flat.dtype)


@functools.lru_cache(maxsize=32)
def _mask(numel: int, places: tuple[tuple[str, int], ...]) -> torch.Tensor:
    return flatten({name: torch.ones_like(one) for name, one in model_of().state_dict().items()}, numel, places)


def gradients_of(model: torch.nn.Module, rank: int, step: int, losses: Losses = loss_of) -> State:
    model.zero_grad()
    losses(model, rank, step).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def simulate(
    layout: Layout, combine: Combine, make: OptimizerMaker, steps: int | Sequence[int] = STEPS, *,
    size: int = SIZE, model: nn.Module | None = None, losses: Losses = loss_of,
) -> State:  # fmt: skip
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


def mean(_: int, flats: Flats) -> torch.Tensor:
    return torch.stack(flats).mean(dim=0)


def whole_layout(names: Sequence[str] | None = None) -> tuple[int, Places]:
    """One part of all parameters, or of some, each at a multiple of 64 bytes."""
    places, end = [], 0
    for name, one in model_of().named_parameters():
        if names is None or name in names:
            start = -(-end // 8) * 8
            places.append((name, start))
            end = start + one.numel()
    return end, places


def simulate_local(
    rule: Callable[[Flats], torch.Tensor] | None, every: int, make: OptimizerMaker,
    left: Callable[[], Flats] | None = None,
) -> list[State]:  # fmt: skip
    """Every rank trains alone; every so often a rule makes of all their differences what the anchor loses.

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
def write(model: torch.nn.Module, flat: torch.Tensor, places: Places) -> None:
    for name, offset in places:
        parameter = model.get_parameter(name)
        parameter.copy_(flat[offset : offset + parameter.numel()].view(parameter.shape))


def assert_only(state: State, right: State, mutants: Mapping[str, State]) -> None:
    """It is what is right, and none of what must not pass for it."""
    assert_close(state, right)
    for name, mutant in mutants.items():
        assert differs(state, mutant), name


def differs(state: State, other: State) -> bool:
    """Whether ``assert_close`` would fail."""
    return not all(torch.allclose(value, other[name], rtol=1e-4, atol=1e-6) for name, value in state.items())


class CodedSlices:
    """Each rank codes its slices, one for each rank adds up, and codes the sum; what both lose is that rank's."""

    def __init__(self, codec: Codec, places: Places) -> None:
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
        return result, only_parameters(lost, self.places)


class MeanOfSlices:
    """The mean of what everyone has, in coded slices, with a residual for what either coding loses."""

    def __init__(self, codec: Codec, places: Places, *, feedback: bool = True, exact: bool = False) -> None:
        self.exchange = CodedSlices(codec, places)
        self.feedback, self.exact, self.residuals = feedback, exact, torch.zeros(SIZE, 1, dtype=torch.float64)

    def __call__(self, flats: Flats) -> torch.Tensor:
        if self.exact:
            return torch.stack(flats).mean(dim=0)
        result, lost = self.exchange(torch.stack(flats) / SIZE + self.residuals)
        self.residuals = lost if self.feedback else self.residuals
        return only_parameters(result, self.exchange.places)


# Rules of sums. Codecs are taken as they are: they have tests of their own.
def exact(_: int, flats: Flats) -> torch.Tensor:
    return torch.stack(flats).sum(dim=0)


def byte_grad(index: int, flats: Flats) -> torch.Tensor:
    """Each slice rounded by everyone, summed, and rounded again."""
    return CodedSlices(MinMaxUInt8(), [])(torch.stack(flats))[0]


@dataclass
class WithFeedback:
    """Error feedback: everyone's gradient plus residual as ``codec`` codes it, summed."""

    layout: Layout
    codec: Codec
    residuals: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, index: int, flats: Flats) -> torch.Tensor:
        given = torch.stack(flats) + self.residuals.get(index, 0)
        sent = coded(self.codec, given)
        self.residuals[index] = only_parameters(given - sent, self.layout[index][1])
        return sent.sum(dim=0)


class PowerSgd:
    """Projections of summed matrices on the span of what a power iteration found, with error feedback, in doubles."""

    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> None:
        self.layout, self.residuals, self.right = layout, dict[int, torch.Tensor](), State()
        shapes = {name: one.shape for name, one in mlp().named_parameters()}
        self.shapes = {name: one for name, one in shapes.items() if len(one) == 2 and sum(one) * rank < one.numel()}
        for _, places in layout:
            matrices = [name for name, _ in places if name in self.shapes]
            columns = [self.shapes[name][1] for name in matrices]
            start = torch.randn(sum(columns), rank, generator=torch.Generator().manual_seed(0), dtype=dtype).double()
            self.right.update(zip(matrices, start.split(columns), strict=True))

    def __call__(self, index: int, flats: Flats) -> torch.Tensor:
        given = torch.stack(flats).double() + self.residuals.get(index, 0)
        sent = given.clone()
        for name, offset in self.layout[index][1]:
            if name in self.shapes:
                part = slice(offset, offset + self.shapes[name].numel())
                own = given[:, part].view(-1, *self.shapes[name])
                total = own.sum(dim=0)
                basis = torch.linalg.svd(total @ self.right[name], full_matrices=False).U
                self.right[name] = total.t() @ basis
                sent[:, part] = (basis @ basis.t() @ own).flatten(1)
        self.residuals[index] = given - sent
        return sent.sum(dim=0)
