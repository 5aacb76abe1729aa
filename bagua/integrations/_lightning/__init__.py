"""What the strategies for both of Lightning's trainers and for Fabric are made of."""

from bagua.integrations._lightning.ranks import KEY, RanksMixin, register
from bagua.integrations._lightning.strategy import StrategyMixin

__all__ = ["KEY", "RanksMixin", "StrategyMixin", "register"]
