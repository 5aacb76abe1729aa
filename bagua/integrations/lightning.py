"""``Trainer(strategy="bagua")`` for Lightning 2: importing this module registers the names.

For the package ``lightning``, else ``pytorch_lightning``; where both are used, see
``bagua.integrations.pytorch_lightning``.
"""

from __future__ import annotations

from bagua.checks import install_command
from bagua.integrations._lightning import StrategyMixin, register

try:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError:
    try:
        from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
    except ImportError as error:
        raise ImportError(f"bagua.integrations.lightning needs Lightning 2: {install_command('lightning')}") from error

__all__ = ["BaguaStrategy"]


class BaguaStrategy(StrategyMixin, DDPStrategy):
    """Trains a ``LightningModule`` with an algorithm of bagua, one process for each device.

    ``fit`` goes through the engine; ``validate``, ``test`` and ``predict`` run the plain module on each rank.
    Gradients are not exchanged while they are accumulated. Metrics logged with ``sync_dist=True`` are
    reduced on our communicator. Checkpoints hold what the algorithm remembers on each rank.
    ``AsyncModelAverage`` rests during validation, and ends with equal weights.

    Args:
        algorithm: or the name of one.
        backend: as for ``bagua.comm.init_process_group``; None chooses.
        bucket_bytes: a bucket is closed when it holds so many bytes.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it is an error.
        forward_sync_buffers: take rank 0's buffers before each forward pass; None does so where the algorithm keeps
            weights equal.
        autotune: as for ``with_bagua``.
        strategy_options: options of Lightning's ``DDPStrategy``, except those for torch's DDP: ``accelerator``,
            ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``, ``precision_plugin``,
            ``process_group_backend``, ``timeout``, ``start_method``.

    Raises:
        UnsupportedAlgorithmException: there is no such algorithm.
        TypeError: an unknown keyword.
        ConfigurationError: when training begins: several optimizers, and an algorithm that needs one.

    Example:
        >>> BaguaStrategy("bytegrad").strategy_name
        'bagua'
    """


register(StrategyRegistry, BaguaStrategy)
