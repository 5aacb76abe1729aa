"""``bagua.torch_api.distributed_define``: what a bucket holds."""

from __future__ import annotations

import torch

from bagua.parallel import BucketType

__all__ = ["BucketType", "TensorDeclaration"]

#: What ``buckets`` lists: a parameter, or its name.
TensorDeclaration = torch.Tensor | str
