"""Documented import path of data-parallel modules: one with the arguments of torch's, one that is decentralized."""

from typing import TYPE_CHECKING

from bagua.late import late
from bagua.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from bagua.parallel import DecentralizedDataParallel
    from bagua.parallel import LRSchedulerFunction as LR_SCHEDULER_FN_TYPE  # noqa: N814 - documented
    from bagua.parallel import OptimizerFunction as OPTIM_FN_TYPE  # noqa: N814 - documented

__all__ = ["LR_SCHEDULER_FN_TYPE", "OPTIM_FN_TYPE", "DecentralizedDataParallel", "DistributedDataParallel"]

_LATE = {
    "DecentralizedDataParallel": "bagua.parallel",
    "LR_SCHEDULER_FN_TYPE": "bagua.parallel:LRSchedulerFunction",
    "OPTIM_FN_TYPE": "bagua.parallel:OptimizerFunction",
}
__getattr__, __dir__ = late(__name__, _LATE)
