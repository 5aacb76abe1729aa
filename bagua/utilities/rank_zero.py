"""What only rank 0 does."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from bagua.comm.adoption import rank_among_all

__all__ = ["rank_zero_debug", "rank_zero_info", "rank_zero_only", "rank_zero_warn"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_log = logging.getLogger("bagua")


def rank_zero_only(
    fn: Callable[Parameters, Result], default: Result | None = None
) -> Callable[Parameters, Result | None]:
    """Let ``fn`` run on rank 0 only; elsewhere the result is ``default``.

    The rank is asked for at each call, so functions may be decorated before ranks are connected. It is that of
    our group of all ranks, else that of torch's; before both it is what the launcher says.

    Example:
        >>> @rank_zero_only
        ... def report():
        ...     return "written"
        >>> report()
        'written'
    """

    @functools.wraps(fn)
    def on_rank_zero(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result | None:
        return fn(*arguments, **options) if rank_among_all() == 0 else default

    return on_rank_zero


@rank_zero_only
def rank_zero_debug(message: object, *arguments: object, **options: Any) -> None:
    """Log ``message`` at level ``DEBUG`` of the logger ``bagua``, on rank 0."""
    _log.debug(message, *arguments, **options)


@rank_zero_only
def rank_zero_info(message: object, *arguments: object, **options: Any) -> None:
    """Log ``message`` at level ``INFO`` of the logger ``bagua``, on rank 0."""
    _log.info(message, *arguments, **options)


@rank_zero_only
def rank_zero_warn(message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """Warn on rank 0.

    Args:
        message: the text.
        category: of the warning.
        stacklevel: whose line is shown; 2 is the caller's.
    """
    warnings.warn(message, category, stacklevel=stacklevel + 1)
