"""What only rank 0 does."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from bagua import env
from bagua.comm import available, rank_among_all

__all__ = ["rank_zero_debug", "rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_log = logging.getLogger("bagua")


class _RankZeroOnly:
    """Let a function run on rank 0 only; elsewhere the result is ``default``.

    The rank is asked for at each call, so functions may be decorated before ranks are connected. It is what was
    assigned to ``rank_zero_only.rank``, else that of our group of all ranks, else that of torch's; before both it is
    what the launcher says, as Lightning reads it: ``RANK``, else ``LOCAL_RANK``, and so on.

    Example:
        >>> @rank_zero_only
        ... def report():
        ...     return "written"
        >>> report(), rank_zero_only.rank
        ('written', 0)
    """

    def __init__(self) -> None:
        self._assigned: int | None = None

    @property
    def rank(self) -> int:
        """The rank that counts. An assigned one counts from then on; None takes that back."""
        if self._assigned is not None:
            return self._assigned
        return rank_among_all() if available() else env.get_rank_or_local_rank() or 0

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._assigned = rank

    def __call__(
        self, fn: Callable[Parameters, Result], default: Result | None = None
    ) -> Callable[Parameters, Result | None]:
        @functools.wraps(fn)
        def on_rank_zero(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result | None:
            return fn(*arguments, **options) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = _RankZeroOnly()


@rank_zero_only
def rank_zero_debug(message: object, *arguments: object, **options: Any) -> None:
    """Log ``message`` at level ``DEBUG`` of the logger ``bagua``, on rank 0."""
    _log.debug(message, *arguments, **options)


@rank_zero_only
def rank_zero_info(message: object, *arguments: object, **options: Any) -> None:
    """Log ``message`` at level ``INFO`` of the logger ``bagua``, on rank 0."""
    _log.info(message, *arguments, **options)


@rank_zero_only
def rank_zero_warn(message: str | Warning, stacklevel: int = 4, category: type[Warning] = UserWarning) -> None:
    """Warn on rank 0.

    Args:
        message: the text.
        stacklevel: frame whose line is shown, as Lightning counts: 4 is the caller's, 5 that of its caller.
        category: category of the warning.
    """
    warnings.warn(message, category, stacklevel=stacklevel - 1)


@rank_zero_only
def rank_zero_deprecation(message: str | Warning, stacklevel: int = 5) -> None:
    """Warn on rank 0 that something goes away.

    Args:
        message: the text.
        stacklevel: frame whose line is shown, as Lightning counts: 5 is that of the caller's caller.
    """
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel - 1)
