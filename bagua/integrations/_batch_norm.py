"""Batch normalization over all ranks on the CPU, where ``torch.nn.SyncBatchNorm`` does not run."""

from __future__ import annotations

from typing import Any

import torch

from bagua.comm import Communicator, get_default_group, is_initialized
from bagua.torch_private import BatchNorm


class _Sum(torch.autograd.Function):
    """The sum over ranks, of values and of gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        ctx.communicator = communicator
        return _summed(tensor, communicator)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], ctx.communicator), None


def _summed(tensor: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    communicator.allreduce(total)
    return total


class SynchronizedBatchNorm(BatchNorm):
    """What a layer becomes as long as it normalizes over the batches of all ranks; the same object as before.

    Attributes:
        plain_class: class of the layer before.
    """

    plain_class: type[BatchNorm]

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - as in torch
        self.plain_class._check_input_dim(self, input)  # type: ignore[no-untyped-call]  # noqa: SLF001 - as it was

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as in torch
        """Normalize; in training by the mean and the variance of all ranks' inputs, which may differ in size."""
        if not self.training or not is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        communicator = get_default_group().global_communicator
        axes = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        values = input if input.dtype == torch.float64 else input.float()
        own_count = torch.tensor([input.numel() // input.shape[1]], dtype=torch.float64)
        totals: torch.Tensor = _Sum.apply(torch.cat([values.sum(axes).double(), own_count]), communicator)  # type: ignore[no-untyped-call]
        count = totals[-1].detach()
        mean = (totals[:-1] / count).to(values.dtype)
        centered = values - mean.view(shape)
        squares: torch.Tensor = _Sum.apply(centered.square().sum(axes), communicator)  # type: ignore[no-untyped-call]
        variance = squares / count.to(values.dtype)
        self._remember(mean.detach(), variance.detach(), float(count))
        output = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    def _remember(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        """Update the running statistics, with the unbiased variance as torch does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)


class SynchronizedBatchNorms:
    """Lightning's ``LayerSync`` for the CPU: turns the layers of a model into synchronized ones, and back."""

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """From now on, layers normalize over all ranks."""
        for layer in model.modules():
            if isinstance(layer, BatchNorm) and not isinstance(layer, SynchronizedBatchNorm):
                layer.plain_class = type(layer)  # type: ignore[assignment]  # no tensor and no module
                layer.__class__ = SynchronizedBatchNorm
        return model

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Each layer is what it was, with what it has learned."""
        for layer in model.modules():
            if isinstance(layer, SynchronizedBatchNorm):
                layer.__class__ = layer.__dict__.pop("plain_class")
        return model
