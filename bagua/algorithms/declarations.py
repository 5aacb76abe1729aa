"""From the name of an algorithm to its declaration."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from enum import Enum
from typing import Generic, TypeVar, cast

from bagua.checks import check_kind, did_you_mean
from bagua.errors import ConfigurationError, UnsupportedAlgorithmException

Declaration = TypeVar("Declaration")


class DistributedAlgorithm(Enum):
    """Algorithms by the names of ``bagua_init`` and ``ModelSwitchWrapper``; strings do as well."""

    GradientAllReduce = "allreduce"
    ScatterGatherAllReduce = "sg-allreduce"
    Decentralize = "decentralize"
    QuantizeAllReduce = "quantize"
    PowerSGD = "power_sgd"
    TopK = "top_k"
    SignSGD = "sign_sgd"
    QAdam = "qadam"
    LowPrecisionDecentralized = "low_precision_decentralized"
    AsyncModelAverage = "async"


#: What the short names stand for.
_SHORT_NAMES = {
    "allreduce": "gradient_allreduce",
    "sg-allreduce": "scatter_gather_allreduce",
    "decentralize": "decentralized",
    "quantize": "bytegrad",
}


#: Names of what is no algorithm, but a wrapper of its own.
_WRAPPERS = ("DecentralizedDataParallel", "decentralized_data_parallel")


def _advice(name: str, known: list[str]) -> str:
    advice = did_you_mean(name, known)
    if any(wrapper in (name, advice.partition("'")[2].partition("'")[0]) for wrapper in _WRAPPERS):
        return (
            "DecentralizedDataParallel is a wrapper that steps your optimizer by itself: "
            "bagua.torch_api.data_parallel.DecentralizedDataParallel(model, optim_fn). "
        )
    return f"{advice} " if advice else ""


class Registry(Generic[Declaration]):
    """Declarations by name, in the order in which they were registered.

    Example:
        >>> registry = Registry()
        >>> registry.register("nothing", object)
        >>> list(registry), registry.get("nothing")
        (['nothing'], <class 'object'>)
    """

    def __init__(self) -> None:
        self._declarations: dict[str, Declaration | str] = {}

    def register(self, name: str, declaration: Declaration | str) -> None:
        """Make ``declaration``, or what ``module:name`` says, known under ``name``.

        Raises:
            ConfigurationError: the name is taken by another declaration.
        """
        known = self._declarations.setdefault(name, declaration)
        if known is not declaration:
            raise ConfigurationError(
                "another algorithm has this name", argument="name", expected="a new name", seen=repr(name)
            )

    def get(self, name: str | DistributedAlgorithm) -> Declaration:
        """The declaration called ``name``.

        Args:
            name: a registered name, a short name of the documented API, or its enum.

        Raises:
            UnsupportedAlgorithmException: there is none; the message names those that exist.
        """
        text = name.value if isinstance(name, DistributedAlgorithm) else name
        check_kind(str, "the name of an algorithm", algorithm=text)
        found = self._declarations.get(_SHORT_NAMES.get(text, text))
        if found is None:
            raise UnsupportedAlgorithmException(
                f"there is no algorithm {text!r}",
                argument="algorithm",
                expected=" or ".join(self._declarations),
                seen=repr(text),
                advice=_advice(text, [*self._declarations, *_SHORT_NAMES, *_WRAPPERS])
                + f"There are {', '.join(self._declarations)}.",
            )
        if isinstance(found, str):
            module, _, kind = found.partition(":")
            return cast("Declaration", getattr(importlib.import_module(module), kind))
        return found

    def name_of(self, kind: type) -> str:
        """The name under which a class is registered; empty if it is not."""
        known = (kind, f"{kind.__module__}:{kind.__name__}")
        return next((name for name, one in self._declarations.items() if one in known), "")

    def __iter__(self) -> Iterator[str]:
        return iter(self._declarations)

    def __len__(self) -> int:
        return len(self._declarations)
