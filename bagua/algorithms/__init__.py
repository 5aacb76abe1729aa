"""Algorithms that say what ranks exchange, and when."""

from typing import TYPE_CHECKING

from bagua.algorithms import base
from bagua.algorithms.base import *
from bagua.algorithms.base import WithInner as WithInner
from bagua.algorithms.base import registry
from bagua.algorithms.exchanges import exchange, fields, outer, values
from bagua.algorithms.exchanges.exchange import *
from bagua.algorithms.exchanges.exchange import differ_between_ranks as differ_between_ranks
from bagua.algorithms.exchanges.fields import *
from bagua.algorithms.exchanges.fields import OF_BUCKETS as OF_BUCKETS
from bagua.algorithms.exchanges.fields import OF_GRADIENTS as OF_GRADIENTS
from bagua.algorithms.exchanges.fields import POINTS as POINTS
from bagua.algorithms.exchanges.fields import Point as Point
from bagua.algorithms.exchanges.outer import *
from bagua.algorithms.exchanges.values import *
from bagua.algorithms.gradients.gradient_allreduce import *
from bagua.algorithms.gradients.gradient_allreduce import ReducedGradients
from bagua.algorithms.local import between_islands
from bagua.algorithms.local.between_islands import *
from bagua.algorithms.local.local_updates import LocalUpdates
from bagua.late import late

if TYPE_CHECKING:
    from bagua.algorithms.async_model_average import *
    from bagua.algorithms.decentralized import *
    from bagua.algorithms.exchanges.gossip import *
    from bagua.algorithms.gradients.low_rank import *
    from bagua.algorithms.gradients.one_bit import *
    from bagua.algorithms.gradients.q_adam import *
    from bagua.algorithms.gradients.quantized import *
    from bagua.algorithms.gradients.scatter_gather import *
    from bagua.algorithms.gradients.top_k import *
    from bagua.algorithms.local.diloco import *
    from bagua.algorithms.local.local_sgd import *
    from bagua.algorithms.local.sparse_loco import *

__all__ = ["LocalUpdates", "ReducedGradients"]
__all__ += base.__all__ + between_islands.__all__ + exchange.__all__ + fields.__all__ + outer.__all__ + values.__all__

#: One line for each algorithm: its name, its module, and what its names begin with; then what else is there. A program
#: imports those that it asks for.
_ALGORITHMS = {
    "gradient_allreduce": ("gradients.gradient_allreduce", "GradientAllReduce"),
    "scatter_gather_allreduce": ("gradients.scatter_gather", "ScatterGatherAllReduce"),
    "bytegrad": ("gradients.quantized", "ByteGrad"),
    "power_sgd": ("gradients.low_rank", "PowerSGD"),
    "top_k": ("gradients.top_k", "TopK"),
    "sign_sgd": ("gradients.quantized", "SignSGD"),
    "decentralized": ("decentralized", "Decentralized"),
    "low_precision_decentralized": ("decentralized", "LowPrecisionDecentralized"),
    "qadam": ("gradients.q_adam", "QAdam"),
    "one_bit_adam": ("gradients.one_bit", "OneBitAdam"),
    "loco": ("gradients.quantized", "LoCo"),
    "dion": ("gradients.low_rank", "Dion"),
    "one_bit_lamb": ("gradients.one_bit", "OneBitLamb"),
    "local_sgd": ("local.local_sgd", "LocalSGD"),
    "slowmo": ("local.local_sgd", "SlowMo", "SlowStep"),
    "diloco": ("local.diloco", "DiLoCo"),
    "sparse_loco": ("local.sparse_loco", "SparseLoCo"),
    "async": ("async_model_average", "AsyncModelAverage"),
}
_places = dict.fromkeys(("DifferenceMix", "Mix"), f"{__name__}.exchanges.gossip")
for _name, (_place, _stem, *_others) in _ALGORITHMS.items():
    registry.register(_name, f"{__name__}.{_place}:{_stem}Algorithm")
    _places |= dict.fromkeys((f"{_stem}Algorithm", f"{_stem}AlgorithmImpl", *_others), f"{__name__}.{_place}")
__all__ += list(_places)
__getattr__, __dir__ = late(__name__, _places)
