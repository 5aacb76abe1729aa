"""The same as ``bagua.integrations.lightning`` for programs that ``import pytorch_lightning``."""

from __future__ import annotations

from bagua.checks import install_command
from bagua.integrations._lightning import StrategyMixin, register

try:
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError(
        f"bagua.integrations.pytorch_lightning needs PyTorch Lightning 2: {install_command('pytorch-lightning')}"
    ) from error

__all__ = ["BaguaStrategy", "PyTorchLightningStrategy"]


class PyTorchLightningStrategy(StrategyMixin, DDPStrategy):
    """``bagua.integrations.lightning.BaguaStrategy`` for the Trainer of ``pytorch_lightning``.

    Example:
        >>> PyTorchLightningStrategy("bytegrad").strategy_name
        'bagua'
    """


#: The name that the strategy has in each of Lightning's packages.
BaguaStrategy = PyTorchLightningStrategy

register(StrategyRegistry, BaguaStrategy)
