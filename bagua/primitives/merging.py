"""One difference made of several that do not count the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from bagua.primitives.memory import summing_dtype


def weighted_mean(differences: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """``sum_m w_m v_m / sum_m w_m``; zeros if all weights are zero.

    Args:
        differences: tensors ``v_m`` of one shape.
        weights: weight of each, from 0.

    Example:
        >>> weighted_mean([torch.tensor([1.0]), torch.tensor([5.0])], [3.0, 1.0])
        tensor([2.])
    """
    total = sum(weights)
    found = torch.zeros_like(differences[0], dtype=summing_dtype(differences[0].dtype))
    for difference, weight in zip(differences, weights, strict=True):
        if weight:
            found.add_(difference, alpha=weight / total)
    return found.to(differences[0].dtype)


def radial_directional_mean(
    differences: Sequence[torch.Tensor],
    weights: Sequence[float],
    views: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    plain: Collection[int] = (),
) -> torch.Tensor:
    """For each tensor the mean length, in the direction of the mean of directions: no mean is short by disagreement.

    ``(sum w |v| / sum w) phi(sum w phi(v) / sum w)`` with ``phi(x) = x / |x|`` and ``phi(0) = 0``. Where the directions
    cancel out, and in ``plain`` tensors, it is the weighted mean.

    Args:
        differences: flat tensors, of one layout.
        weights: weight of each, from 0.
        views: returns the tensors that lie in such a flat tensor.
        plain: numbers of the tensors whose weighted mean is taken, as those of embeddings.

    Example:
        >>> two = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])]
        >>> radial_directional_mean(two, [1.0, 1.0], lambda flat: [flat])
        tensor([1.4142, 1.4142])

    Paper: "Decoupled DiLoCo", 2026, arXiv 2604.21428.
    """
    found = weighted_mean(differences, weights)
    total = sum(weights)
    parts = [list(views(one)) for one in differences]
    for number, target in enumerate(views(found)):
        if number in plain or not total:
            continue
        directions = torch.zeros_like(target, dtype=torch.float64)
        length = 0.0
        for part, weight in zip(parts, weights, strict=True):
            exact = part[number].double()
            own = float(exact.norm())
            length += weight * own / total
            if own:
                directions.add_(exact, alpha=weight / total / own)
        common = float(directions.norm())
        if common:
            target.copy_(directions.mul_(length / common))
    return found
