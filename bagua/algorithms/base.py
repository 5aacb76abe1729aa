"""What an algorithm is: a value that contains exchanges, and the documented form of it that is bound to a group."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

from bagua.algorithms.exchanges.exchange import (
    WHOLE,
    Every,
    Exchange,
    check_exchanges,
    check_phases,
    differ_between_ranks,
)
from bagua.algorithms.exchanges.fields import Model
from bagua.algorithms.exchanges.values import Buffers, Mean, Replace, Weights
from bagua.buckets import Bucket
from bagua.checks import check_kind, did_you_mean, wrong_type
from bagua.comm import Group, ProcessGroup, as_group
from bagua.errors import ConfigurationError, UnsupportedAlgorithmException

__all__ = [
    "Algorithm", "AlgorithmImpl", "ByHost", "DistributedAlgorithm", "Registry", "around", "as_algorithm", "bound_form",
    "registry",
]  # fmt: skip

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


#: Names of wrappers, which users look for among the algorithms.
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


class Algorithm(ABC):
    """What ranks exchange, and when. Subclasses are frozen dataclasses.

    An algorithm can be printed (as its constructor call), compared and pickled, and needs no process group.

    Example:
        >>> Algorithm.init("gradient_allreduce", average=False)
        GradientAllReduceAlgorithm(hierarchical=False, average=False)
    """

    implementation: ClassVar[type[AlgorithmImpl]]

    #: What must step the parameters, made with them and ``lr``; None if any optimizer may.
    optimizer_class: ClassVar[Callable[..., torch.optim.Optimizer] | None] = None

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """All phases, in their order."""
        return (0,)

    def phase(self, step: int, model: Model) -> Hashable:
        """The phase of training step ``step``, from 0: a function of the arguments, equal on all ranks."""
        return self.phases[0]

    @abstractmethod
    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """What ranks exchange in this phase."""

    def closing(self) -> tuple[Exchange, ...]:
        """What makes one model of those of all ranks when training ends: means, where ranks may differ.

        Made once, in the order of the tuple, from the weights of that moment; ``when`` and ``lag`` do not count.
        """
        if not self.ranks_differ:
            return ()
        return tuple(
            Exchange(what, Every(), Mean(), Replace(), parts=WHOLE, label=label)
            for what, label in ((Weights(), "weights"), (Buffers(), "buffers"))
        )

    def check(self, model: Model) -> None:
        """Refuse a model that cannot be trained this way; called when it is wrapped.

        Raises:
            ConfigurationError: it cannot.
        """

    def every_exchange(self) -> tuple[Exchange, ...]:
        """The exchanges of all phases."""
        return tuple(exchange for phase in self.phases for exchange in self.exchanges(phase))

    @cached_property
    def acts_alone(self) -> bool:
        """Whether one rank by itself has something to do. Asked in each pass, so it is found out once."""
        return any(exchange.alone for exchange in self.every_exchange())

    @property
    def in_background(self) -> bool:
        """Whether there is a phase in which ranks exchange between steps, each at its own pace."""
        return any(one.how is not None and not one.how.lockstep for one in self.every_exchange())

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks may hold different weights, by what they exchange."""
        return any(differ_between_ranks(self.exchanges(phase)) for phase in self.phases)

    @property
    def is_hierarchical(self) -> bool | None:
        """Whether hosts exchange in place of ranks; None if it has no such form, as all but ``ByHost``."""
        return None

    def in_form(self, *, hierarchical: bool) -> Algorithm:
        """The same algorithm, hierarchical or flat.

        Raises:
            ConfigurationError: it has no such form.
        """
        raise ConfigurationError(
            f"{self!r} has no hierarchical form", argument="hierarchical_reduce", expected=None, seen=hierarchical
        )

    def reify(self, process_group: Group | None) -> AlgorithmImpl:
        """The algorithm bound to ``process_group``.

        Raises:
            ConfigurationError: it cannot run there.
        """
        kind = type(self)
        implementation = vars(kind).get("implementation") or bound_form(kind)
        bound = implementation(process_group, **{name: getattr(self, name) for name in _option_names(kind)})
        if self.in_background and type(bound).attach is AlgorithmImpl.attach:
            raise ConfigurationError(
                "nothing runs these exchanges between steps, and no other ones can be put around such",
                argument="algorithm",
                expected="AsyncModelAverageAlgorithm by itself",
                seen=repr(self),
            )
        return bound

    @staticmethod
    def of(*exchanges: Exchange) -> Algorithm:
        """The algorithm that consists of ``exchanges``.

        Raises:
            ConfigurationError: exchanges that contradict each other.

        Example:
            >>> from bagua.algorithms import Every, Mean, Replace, Weights
            >>> Algorithm.of(Exchange(Weights(), Every(8), Mean(), Replace())).exchanges()[0].when
            Every(steps=8, offset=0)
        """
        return Composed(exchanges)

    @classmethod
    def init(cls, name: str | DistributedAlgorithm, **options: Any) -> Algorithm:
        """The algorithm registered as ``name``.

        Args:
            name: ``gradient_allreduce``, for example.
            options: its constructor's arguments.

        Raises:
            UnsupportedAlgorithmException: there is none of that name.
            TypeError: it does not have one of the options.
        """
        declaration = registry.get(name)
        known = _option_names(declaration)
        unknown = [option for option in options if option not in known]
        if unknown:
            raise _no_option(declaration, unknown, known)
        return declaration(**options)


class ByHost(Algorithm):
    """An algorithm with two forms: its option ``hierarchical`` says whether hosts exchange in place of ranks.

    Subclasses are frozen dataclasses that have this option.
    """

    hierarchical: bool

    @property
    def is_hierarchical(self) -> bool | None:
        """The option."""
        return self.hierarchical

    def in_form(self, *, hierarchical: bool) -> Algorithm:
        """The same algorithm, hierarchical or flat, unless its other options leave no choice."""
        if self.is_hierarchical is None:
            return super().in_form(hierarchical=hierarchical)
        return dataclasses.replace(self, hierarchical=hierarchical)  # type: ignore[type-var]


def _no_option(declaration: type[Algorithm], unknown: Sequence[str], known: Sequence[str]) -> TypeError:
    text = f"{declaration.__name__} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
    optimizer = declaration.optimizer_class
    if optimizer is not None and set(unknown) <= set(inspect.signature(optimizer).parameters):
        name = getattr(optimizer, "__name__", repr(optimizer))
        return TypeError(f"{text}. {', '.join(unknown)} is an option of {name}: give it to the optimizer")
    advice = did_you_mean(unknown[0], known)
    return TypeError(f"{text}. {advice}" if advice else text)


def _option_names(kind: type[Algorithm]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]


class AlgorithmImpl:
    """An algorithm bound to a process group: the documented form. What it does is said by its exchanges.

    Args:
        process_group: the ranks that train together; None means all.
        arguments: as for the declaration.
        options: as for the declaration.

    Attributes:
        options: the algorithm.

    Raises:
        ConfigurationError: it cannot run on this group.
    """

    declaration: ClassVar[type[Algorithm]]
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls, declaration: type[Algorithm] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if declaration is not None:
            cls.declaration = declaration
            declaration.implementation = cls
            # What help() shows. The constructor itself leaves the arguments to the declaration.
            group, *_ = list(inspect.signature(AlgorithmImpl.__init__).parameters.values())[1:]
            options = inspect.signature(declaration).parameters.values()
            cls.__signature__ = inspect.Signature([group, *options])

    def __init__(self, process_group: Group | None, *arguments: Any, **options: Any) -> None:
        self.process_group = as_group(process_group, "process_group")
        self.options: Any = self.declaration(*arguments, **options)
        check_phases([self.options.exchanges(phase) for phase in self.options.phases])
        for phase in self.options.phases:
            exchanges = self.options.exchanges(phase)
            check_exchanges(exchanges)
            for exchange in exchanges:
                if exchange.how is not None:
                    exchange.how.check(self.process_group)

    # For algorithms whose ranks exchange between steps, each at its own pace. Those of all others are in the engine.

    def attach(self, buckets: Sequence[Bucket], group: ProcessGroup, step: int) -> None:
        """Buckets were formed, when the model was wrapped or at a new phase. Nothing is under way.

        Args:
            buckets: equal in layout on all ranks.
            group: private to this model; when it is made for the first time, this is collective.
            step: number of the next step.
        """

    def safe_point(self, step: int) -> None:
        """A training forward of ``step`` begins. Weights may change in the first one: no graph of the step exists."""

    def settle(self) -> None:
        """End what goes on between steps, so that buckets can be taken apart; the next step begins anew. Collective."""

    def close(self) -> None:
        """The model is given up on this rank: end what goes on, not waiting for others. Idempotent."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.process_group!r}, {self.options!r})"


def bound_form(declaration: type[Algorithm]) -> type[AlgorithmImpl]:
    """The class of the documented form of ``declaration``: its name followed by ``Impl``."""
    body = {
        "__doc__": f"``{declaration.__name__}`` on a group.",
        "__module__": declaration.__module__,
        "__qualname__": f"{declaration.__qualname__}Impl",
    }
    metaclass: Any = type
    made: type[AlgorithmImpl] = metaclass(
        f"{declaration.__name__}Impl", (AlgorithmImpl,), body, declaration=declaration
    )
    return made


@dataclasses.dataclass(frozen=True, repr=False)
class Composed(Algorithm):
    """Exchanges without a class of their own. Made by ``Algorithm.of``."""

    members: tuple[Exchange, ...]

    def __post_init__(self) -> None:
        for one in self.members:
            check_kind(Exchange, "Exchange(...)", exchanges=one)
        check_exchanges(self.members)

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """The exchanges."""
        return self.members

    def __repr__(self) -> str:
        return f"Algorithm.of({', '.join(map(repr, self.members))})"


@dataclasses.dataclass(frozen=True, repr=False)
class WithInner(Algorithm):
    """An algorithm made of another one, which says how training goes; subclasses say what is exchanged."""

    inner: Algorithm

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """Those of the inner algorithm."""
        return self.inner.phases

    def phase(self, step: int, model: Model) -> Hashable:
        """That of the inner algorithm."""
        return self.inner.phase(step, model)

    @property
    def optimizer_class(self) -> Callable[..., torch.optim.Optimizer] | None:  # type: ignore[override]
        """That of the inner algorithm."""
        return self.inner.optimizer_class

    def check(self, model: Model) -> None:
        """What the inner algorithm refuses."""
        self.inner.check(model)


@dataclasses.dataclass(frozen=True, repr=False)
class Around(WithInner):
    """An algorithm with more exchanges around it. Made by ``around``.

    Args:
        inner: the algorithm.
        outer: exchanges besides those of the algorithm.
    """

    outer: tuple[Exchange, ...]

    def __post_init__(self) -> None:
        check_kind(Algorithm, "an Algorithm", inner=self.inner)
        for phase in self.phases:
            check_exchanges(self.exchanges(phase))

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Those of the inner algorithm, under labels that begin with ``inner``, and those around it."""
        inner = [one.labelled("inner") for one in self.inner.exchanges(phase)]
        return (*inner, *self.outer)

    def __repr__(self) -> str:
        return f"around({', '.join(map(repr, (self.inner, *self.outer)))})"


def around(inner: Algorithm | DistributedAlgorithm | str, *exchanges: Exchange) -> Algorithm:
    """``inner`` with more exchanges around it.

    Args:
        inner: any algorithm, or its name.
        exchanges: exchanges to add, as an outer step every so often.

    Raises:
        ConfigurationError: exchanges that contradict each other.

    Example:
        >>> from bagua.algorithms import Every, Mean, Replace, Weights
        >>> around("gradient_allreduce", Exchange(Weights(), Every(8), Mean(), Replace())).exchanges()[0].label
        'inner'
    """
    return Around(as_algorithm(inner), exchanges)


#: All algorithms by name. ``bagua/algorithms/__init__.py`` has one line for each.
registry: Registry[type[Algorithm]] = Registry()


def as_algorithm(algorithm: Algorithm | DistributedAlgorithm | str) -> Algorithm:
    """A declaration, from itself or from its name with default options.

    Raises:
        UnsupportedAlgorithmException: there is no algorithm of that name.
        InvalidTypeError: ``algorithm`` is neither.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, str | DistributedAlgorithm):
        return Algorithm.init(algorithm)
    error = wrong_type("algorithm", "an Algorithm, or the name of one", algorithm)
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        error.advice = f"Make one: {algorithm.__name__}()."
    raise error
