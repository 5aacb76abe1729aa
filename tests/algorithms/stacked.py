"""All ranks in one process, in double precision, so that a sign or a choice never depends on the order of additions.

Only the layout of flat memory is taken from the run that is checked: what is chosen depends on neighbours there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

import torch

import bagua.comm
from bagua.algorithms import Algorithm
from bagua.parallel import with_bagua
from tests.algorithms.lossy_simulation import Layout
from tests.harness import OptimizerMaker, State, assert_close, batch, mlp, snapshot

Flats = list[torch.Tensor]
#: What the gradients of everyone become: (index of the bucket, flat gradient of each rank) -> gradient for all.
Combine = Callable[[int, Flats], torch.Tensor]
SIZE = 4
STEPS = 50


def model_of(rank: int = 0) -> torch.nn.Module:
    return mlp(rank).double()


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return torch.nn.functional.mse_loss(model(inputs.double()), targets.double())


def train(algorithm: Algorithm, make: OptimizerMaker, steps: int = STEPS) -> tuple[State, Layout]:
    """What a rank ends with, and its buckets."""
    rank = bagua.comm.get_rank()
    model = model_of(rank)
    optimizer = make(model.parameters())
    wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=1500)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(wrapped, rank, step).backward()
        optimizer.step()
    layout = [(one.numel, list(zip(one.names, one.offsets, strict=True))) for one in wrapped.bagua_buckets]
    return snapshot(model), layout


def flatten(tensors: State, numel: int, places: Sequence[tuple[str, int]]) -> torch.Tensor:
    flat = torch.zeros(numel, dtype=torch.float64)
    for name, offset in places:
        flat[offset : offset + tensors[name].numel()] = tensors[name].flatten()
    return flat


def only_parameters(flat: torch.Tensor, places: Sequence[tuple[str, int]]) -> torch.Tensor:
    """Nothing gathers in the gaps between parameters."""
    return flat * _mask(len(flat), tuple(places))


@functools.lru_cache(maxsize=32)
def _mask(numel: int, places: tuple[tuple[str, int], ...]) -> torch.Tensor:
    return flatten({name: torch.ones_like(one) for name, one in model_of().state_dict().items()}, numel, places)


def gradients_of(model: torch.nn.Module, rank: int, step: int) -> State:
    model.zero_grad()
    loss_of(model, rank, step).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def simulate(layout: Layout, combine: Combine, make: OptimizerMaker, steps: int = STEPS, *, size: int = SIZE) -> State:
    """Gradients of everyone, combined for each bucket, and one optimizer for all."""
    model = model_of()
    optimizer = make(model.parameters())
    for step in range(steps):
        of_ranks = [gradients_of(model, rank, step) for rank in range(size)]
        for index, (numel, places) in enumerate(layout):
            result = combine(index, [flatten(one, numel, places) for one in of_ranks])
            for name, offset in places:
                parameter = model.get_parameter(name)
                parameter.grad = result[offset : offset + parameter.numel()].view(parameter.shape).clone()
        optimizer.step()
    return snapshot(model)


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
    rule: OuterRule | None,
    every: int,
    make: OptimizerMaker,
    steps: int = STEPS,
    left: Callable[[], Flats] | None = None,
) -> list[State]:
    """Every rank trains alone; every so often a rule makes one step of all their differences from the anchor.

    What is ``left`` after it is the difference of each rank from the new anchor; nothing, if that is None.
    """
    models = [model_of() for _ in range(SIZE)]
    optimizers = [make(model.parameters()) for model in models]
    anchor = copy.deepcopy(models[0])
    numel, places = whole_layout()
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if rule is not None and (step + 1) % every == 0:
            start = flatten(snapshot(anchor), numel, places)
            end = start - rule([start - flatten(snapshot(model), numel, places) for model in models])
            write(anchor, end, places)
            for model, lost in zip(models, left() if left else [torch.zeros_like(end)] * SIZE, strict=True):
                write(model, end - lost, places)
    return [snapshot(model) for model in models]


@torch.no_grad()
def write(model: torch.nn.Module, flat: torch.Tensor, places: Sequence[tuple[str, int]]) -> None:
    for name, offset in places:
        parameter = model.get_parameter(name)
        parameter.copy_(flat[offset : offset + parameter.numel()].view(parameter.shape))


def largest_of_blocks(flat: torch.Tensor, block: int, kept: int, bits: int | None = None) -> torch.Tensor:
    """The largest elements of each block, with their values or in two bits; zero elsewhere."""
    result = []
    for part in flat.split(block):
        count = -(-kept * len(part) // block)
        chosen = part.abs().sort(descending=True).indices[:count]
        values = part[chosen]
        if bits == 2:
            high = values.abs() > values.abs().mean()
            for some in (high, ~high):
                if some.any():
                    values[some] = values[some].sign() * values[some].abs().mean()
        result.append(torch.zeros_like(part).index_copy(0, chosen, values))
    return torch.cat(result)


def one_bit(x: torch.Tensor, block: int) -> torch.Tensor:
    return torch.cat([torch.where(part < 0, -1.0, 1.0) * part.abs().mean() for part in x.split(block)])


def differs(state: State, other: State) -> bool:
    try:
        assert_close(state, other)
    except AssertionError:
        return True
    return False


def one_bit_of_rows(rows: torch.Tensor, block: int) -> torch.Tensor:
    """``one_bit`` of each row by itself, whose last block may be shorter."""
    short = -rows.shape[1] % block
    blocks = torch.nn.functional.pad(rows, (0, short)).view(len(rows), -1, block)
    counts = torch.nn.functional.pad(torch.ones_like(rows), (0, short)).view(blocks.shape).sum(dim=2, keepdim=True)
    coded = torch.where(blocks < 0, -1.0, 1.0) * blocks.abs().sum(dim=2, keepdim=True) / counts
    return coded.view(len(rows), -1)[:, : rows.shape[1]]


class CodedSlices:
    """Each rank codes its slices, one for each rank adds up, and codes the sum; what both lose is that rank's.

    Args:
        code: of rows, one for each slice.
        places: of the parameters.
    """

    def __init__(self, code: Callable[[torch.Tensor], torch.Tensor], places: Sequence[tuple[str, int]]) -> None:
        self.code, self.places = code, places

    def __call__(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum that all end with, and what each rank lost; ``given`` has a row for each rank."""
        ranks, numel = given.shape
        length = -(-numel // ranks)
        whole, last = length * (ranks - 1), slice(length * (ranks - 1), numel)

        def coded(rows: torch.Tensor) -> torch.Tensor:
            first = self.code(rows[:, :whole].reshape(-1, length)).reshape(len(rows), -1)
            return torch.cat([first, self.code(rows[:, last])], dim=1)

        sent = coded(given)
        total = sent.sum(dim=0)
        result = coded(total.unsqueeze(0)).squeeze(0)
        lost = given - sent
        for rank in range(ranks):
            mine = slice(rank * length, min((rank + 1) * length, numel))
            lost[rank, mine] += (total - result)[mine]
        mask = only_parameters(torch.ones(numel, dtype=given.dtype), self.places)
        return result, lost * mask
