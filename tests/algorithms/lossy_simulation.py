"""Lossy synchronous training of all ranks in one process, by the textbook, for comparison.

Only the layout of buckets is taken from the run that is checked: what a codec makes of a gradient depends
on its neighbours in flat memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bagua.compression import Metadata, MinMaxUInt8
from tests.harness import State, loss_of, mlp, sgd, snapshot

#: For each bucket its size, and name and offset of each parameter.
Layout = list[tuple[int, list[tuple[str, int]]]]
#: What one bucket of everyone becomes: (index of the bucket, flat gradients of each host) -> flat result.
Combine = Callable[[int, list[torch.Tensor]], torch.Tensor]


def simulate(hosts: Sequence[int], steps: Sequence[int], layout: Layout, combine: Combine) -> State:
    """The weights of everyone after ``steps``, if ``combine`` does what the exchange should.

    Args:
        hosts: ranks on each host; ranks that exchange by themselves are hosts of one.
        steps: numbers of the steps, which choose the batches.
        layout: of the buckets.
        combine: sums the gradients, which are divided by the number of ranks.
    """
    model, size = mlp(), sum(hosts)
    optimizer = sgd(model.parameters())
    for step in steps:
        of_ranks = [_gradients(model, rank, step, size) for rank in range(size)]
        for index, (numel, places) in enumerate(layout):
            flats = [_flatten(gradients, numel, places) for gradients in of_ranks]
            result = combine(index, _by_host(flats, hosts))
            for name, offset in places:
                parameter = model.get_parameter(name)
                parameter.grad = result[offset : offset + parameter.numel()].view(parameter.shape).float()
        optimizer.step()
    return snapshot(model)


def _gradients(model: torch.nn.Module, rank: int, step: int, size: int) -> State:
    model.zero_grad()
    loss_of(model, rank, step).backward()
    return {name: parameter.grad / size for name, parameter in model.named_parameters()}


def _flatten(gradients: State, numel: int, places: list[tuple[str, int]]) -> torch.Tensor:
    flat = torch.zeros(numel)
    for name, offset in places:
        flat[offset : offset + gradients[name].numel()] = gradients[name].flatten()
    return flat


def _by_host(flats: list[torch.Tensor], hosts: Sequence[int]) -> list[torch.Tensor]:
    ends = torch.tensor(hosts).cumsum(0).tolist()
    return [torch.stack(flats[end - n : end]).sum(dim=0) for end, n in zip(ends, hosts, strict=True)]


def exact(_: int, flats: list[torch.Tensor]) -> torch.Tensor:
    """No loss at all."""
    return torch.stack(flats).sum(dim=0)


def sign(flat: torch.Tensor) -> torch.Tensor:
    """Signs times the mean magnitude of each 2048 elements, in bfloat16."""
    return torch.cat([torch.where(part < 0, -1, 1) * part.abs().mean().bfloat16().float() for part in flat.split(2048)])


def top_k(flat: torch.Tensor, ratio: float) -> torch.Tensor:
    """The largest elements; zero elsewhere."""
    kept = -int(-ratio * flat.numel() // 1)
    largest = flat.abs().sort(descending=True).indices[:kept]
    return torch.zeros_like(flat).index_copy(0, largest, flat[largest])


def min_max(flat: torch.Tensor) -> torch.Tensor:
    """What 8 bits leave; the codec has tests of its own, and its exact grid is its own business."""
    return MinMaxUInt8().decompress(MinMaxUInt8().compress(flat), Metadata.of(flat))


def byte_grad(_: int, flats: list[torch.Tensor]) -> torch.Tensor:
    """Each slice rounded by everyone, summed, and rounded again."""
    length = -(-flats[0].numel() // len(flats))
    slices_of_everyone = zip(*(flat.split(length) for flat in flats), strict=True)
    return torch.cat([min_max(torch.stack([*map(min_max, slices)]).sum(dim=0)) for slices in slices_of_everyone])


@dataclass
class WithFeedback:
    """Error feedback: everyone's ``quantize`` of gradient plus residual, summed."""

    layout: Layout
    quantize: Callable[[torch.Tensor], torch.Tensor]
    residuals: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, index: int, flats: list[torch.Tensor]) -> torch.Tensor:
        before = self.residuals.get(index, [torch.zeros_like(flats[0]) for _ in flats])
        given = [flat + residual for flat, residual in zip(flats, before, strict=True)]
        sent = [self.quantize(x) for x in given]
        lost = [x - y for x, y in zip(given, sent, strict=True)]
        self.residuals[index] = [self._only_parameters(index, x) for x in lost]
        return torch.stack(sent).sum(dim=0)

    def _only_parameters(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Nothing gathers in the gaps between parameters."""
        numel, places = self.layout[index]
        parts = {name: flat[offset : offset + _shape(name).numel()] for name, offset in places}
        return _flatten(parts, numel, places)


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
