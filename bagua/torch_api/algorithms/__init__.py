"""``bagua.torch_api.algorithms``: algorithms under their documented names."""

from __future__ import annotations

from bagua.algorithms import (
    Algorithm,
    AlgorithmImpl,
)
from bagua.algorithms import (
    registry as GlobalAlgorithmRegistry,  # noqa: N812 (documented name)
)
from bagua.torch_api.algorithms import (
    async_model_average,
    base,
    bytegrad,
    choco,
    decentralized,
    demo,
    diloco,
    dion,
    gradient_allreduce,
    local_sgd,
    loco,
    one_bit_adam,
    one_bit_lamb,
    power_sgd,
    q_adam,
    scatter_gather,
    sign_sgd,
    slowmo,
    sparse_loco,
    top_k,
    zero_one_adam,
)

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "base",
    "bytegrad",
    "choco",
    "decentralized",
    "demo",
    "diloco",
    "dion",
    "gradient_allreduce",
    "local_sgd",
    "loco",
    "one_bit_adam",
    "one_bit_lamb",
    "power_sgd",
    "q_adam",
    "scatter_gather",
    "sign_sgd",
    "slowmo",
    "sparse_loco",
    "top_k",
    "zero_one_adam",
]
