"""``bagua.torch_api.distributed_define``: what a bucket holds."""

from bagua.parallel import BucketType, TensorDeclaration

__all__ = ["BucketType", "TensorDeclaration"]
