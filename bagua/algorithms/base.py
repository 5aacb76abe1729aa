"""What an algorithm is: a declaration that can be printed and pickled, and its form bound to a group.

An algorithm answers five questions (what is exchanged, when, how, then what, what it
remembers); the engine in ``bagua.parallel`` does everything else: it finds the
parameters, forms buckets, counts steps, decides who runs an exchange, and saves state.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from bagua.algorithms.registry import DistributedAlgorithm, Registry
from bagua.buckets import Bucket
from bagua.checks import wrong_type
from bagua.comm import Group, ProcessGroup, Work
from bagua.comm.startup.adoption import as_group
from bagua.errors import ConfigurationError

__all__ = ["Algorithm", "AlgorithmImpl", "Bucketing", "Traits", "as_algorithm", "registry"]


@dataclasses.dataclass(frozen=True)
class Traits:
    """What the engine and the contract suite may expect of an algorithm.

    Attributes:
        result: ``exact``: after every step all ranks hold what one process with all the
            data would; ``bounded``: they are equal, and near that; ``consensus``: they
            differ, and come together when gradients vanish.
        even_size: needs an even number of ranks.
        rank_local: ranks may exchange at different times, so ``is_due`` may use the clock.
        background: in some phase, ranks exchange between steps, each at its own pace; see
            ``between_steps``. Nothing that comes of it is the same twice.
        gathers_gradients: ``bucket.gradients`` holds the gradients when ``fill`` is called.
        after_optimizer: exchanges once the optimizers have stepped, instead of when the
            gradients of a bucket are there.
        needs_gradients: what is exchanged depends on the gradients of the step. Otherwise all
            exchanges start with the first gradient.
        exact_mean: by default, each exchange gives all ranks the mean over all ranks; what
            makes them differ comes before or after.
        owns_optimizers: steps by itself, in ``local_step``; the user's ``step()`` is idle.
        active_alone: does something on a group of one rank, too.
        same_order: gradients must appear in the same order on all ranks. Otherwise rank 0's
            order of buckets is everyone's, and a rank may be late for some.
        sends_weights: exchanges weights from where they lie, so that is memory which the
            transport can read without a copy.
    """

    result: Literal["exact", "bounded", "consensus"]
    even_size: bool = False
    rank_local: bool = False
    background: bool = False
    gathers_gradients: bool = True
    after_optimizer: bool = False
    needs_gradients: bool = True
    exact_mean: bool = False
    owns_optimizers: bool = False
    active_alone: bool = False
    same_order: bool = False
    sends_weights: bool = False


@dataclasses.dataclass(frozen=True)
class Bucketing:
    """How an algorithm wants its buckets.

    Attributes:
        one_bucket: all parameters of a dtype and device in one bucket.
        chunked: pad each bucket so that it splits evenly over the ranks.
    """

    one_bucket: bool = False
    chunked: bool = False


class AlgorithmImpl(ABC):
    """An algorithm bound to a process group. Steps are counted by the engine, from 0.

    A step is one synchronized backward pass. For each bucket, as soon as its gradients
    are there, the engine calls: ``apply`` for the exchange that is ``lag`` steps old,
    ``local_step``, and, if ``is_due``, ``fill`` and ``exchange``. With ``lag`` 0,
    ``apply`` is called at the end of the same backward pass.

    A subclass names its declaration, which holds the constructor's arguments:
    ``class MyImpl(AlgorithmImpl, declaration=MyAlgorithm)``.

    Args:
        process_group: the ranks that train together; None means all. ``exchange`` is given a private
            duplicate of it; use this one for its size and hosts only.
        arguments: as for the declaration.
        options: as for the declaration.

    Attributes:
        traits: facts; see ``Traits``.
        options: the declaration.
        lag: steps between an exchange and its ``apply``: 0 or 1. With 1, the exchange goes
            on while the next step's gradients arrive, so ``fill`` must copy what it
            sends to ``bucket.buffer()``.
        loss_scale: what the loss was multiplied by in this step; 1.0 without a
            ``GradScaler``. Set by the engine. State made of gradients is kept in unscaled
            units.
    """

    traits: ClassVar[Traits]
    declaration: ClassVar[type[Algorithm]]
    __signature__: ClassVar[inspect.Signature]
    lag: int = 0
    loss_scale: float = 1.0

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
        self._check_group()

    def _check_group(self) -> None:
        if self.traits.even_size and self.process_group.size % 2 and self.process_group.size > 1:
            raise ConfigurationError(
                f"{self.options} pairs ranks",
                argument="process_group",
                expected="an even number of ranks",
                seen=f"{self.process_group.size} ranks",
            )

    def check_model(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Refuse a model that cannot be trained this way; called when it is wrapped.

        Args:
            parameters: all that will be exchanged, by name.
            optimizers: of the model.

        Raises:
            ConfigurationError: it cannot.
        """
        return

    # When.

    def is_due(self, step: int, bucket: Bucket, now: float) -> bool:
        """Whether ``bucket`` is exchanged in this step.

        A pure function of its arguments, equal on all ranks unless ``traits.rank_local``.

        Args:
            step: number of this step.
            bucket: the bucket.
            now: seconds on a clock of this rank; only for ``traits.rank_local``.
        """
        return True

    def phase(self, step: int) -> Hashable:
        """Something that changes when the algorithm changes its ways; buckets are then formed anew."""
        return 0

    def bucketing(self, step: int) -> Bucketing:
        """How buckets are formed in the phase of this step."""
        return Bucketing()

    # What.

    @property
    def gradient_scale(self) -> float:
        """Factor on the gradients of a bucket that is due; costs nothing while they are gathered anyway."""
        return 1.0

    def local_step(self, bucket: Bucket, step: int) -> None:
        """Change the weights from this rank's gradients, if ``traits.owns_optimizers``."""
        return

    def fill(self, bucket: Bucket, step: int) -> None:
        """Write what will be exchanged; gradients lie in ``bucket.gradients`` already."""
        return

    # How.

    @property
    def blocking(self) -> bool:
        """Whether ``exchange`` waits for a call that it starts, instead of returning its ``Work``."""
        return True

    @abstractmethod
    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> Work | None:
        """Communicate, with ``bagua.primitives`` or the communicators of ``group``.

        Runs wherever the transport likes it best: in the thread that computes, in a
        background thread, or on a communication stream. So it touches nothing but the
        bucket's flat memory, its state, and ``group``.

        Returns:
            What the engine waits for before ``apply``; None when there is nothing to wait for.
        """

    # Then what.

    def apply(self, bucket: Bucket, step: int) -> None:
        """Fold in the result of the exchange of ``step`` and commit state. Default: gradients need nothing."""
        return

    # Between steps, for ``traits.background``.

    def between_steps(self, step: int) -> bool:
        """Whether ranks exchange between steps, and not in them, in the phase of ``step``.

        Then the engine leaves gradients alone, and all of the questions above are not asked.
        """
        return False

    def attach(
        self,
        buckets: Sequence[Bucket],
        buffers: Callable[[], Mapping[str, torch.Tensor]],
        group: ProcessGroup,
        step: int,
    ) -> None:
        """Buckets were formed, when the model was wrapped or at a new phase. Nothing is under way.

        Args:
            buckets: equal in layout on all ranks.
            buffers: returns the buffers of the module as they are now, by name.
            group: private to this model. A background thread connects with
                ``group.connect``, and leaves the communicators of the group alone.
            step: number of the next step.
        """
        return

    def safe_point(self, step: int) -> None:
        """A training forward begins: no graph of this step exists yet, so weights may change here, and only here.

        Called once or several times before each step; weights may change in the first call.
        """
        return

    def settle(self) -> None:
        """End what goes on between steps on all ranks, so that buckets can be taken apart. Collective.

        The next ``safe_point`` begins anew.
        """
        return

    def close(self) -> None:
        """The model is given up on this rank: end what goes on between steps, not waiting for others. Idempotent."""
        return

    # What it remembers.

    def init_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """What is remembered of ``bucket`` from step to step, as it is before the first step.

        The engine keeps it in ``bucket.state``, saves, restores, and carries it over when
        buckets are formed anew: a tensor of ``bucket.numel`` elements goes with the
        parameters; any other one goes with the bucket, to where its first parameter goes.
        """
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.process_group!r}, {self.options!r})"


class Algorithm:
    """A declaration: what to run, without saying where. Subclasses are frozen dataclasses.

    It can be printed (as its constructor call), compared and pickled, and needs no process
    group.

    Example:
        >>> Algorithm.init("gradient_allreduce", average=False)
        GradientAllReduceAlgorithm(hierarchical=False, average=False)
    """

    implementation: ClassVar[type[AlgorithmImpl]]

    #: What must step the parameters, made with them and ``lr``; None if any optimizer may.
    optimizer_class: ClassVar[Callable[..., torch.optim.Optimizer] | None] = None

    def reify(self, process_group: Group | None) -> AlgorithmImpl:
        """The algorithm bound to ``process_group``.

        Raises:
            ConfigurationError: it cannot run there.
        """
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return self.implementation(process_group, **options)

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
        known = [field.name for field in dataclasses.fields(declaration)]  # type: ignore[arg-type]
        unknown = [option for option in options if option not in known]
        if unknown:
            raise TypeError(
                f"{declaration.__name__} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
            )
        return declaration(**options)


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
    raise wrong_type("algorithm", "an Algorithm, or the name of one", algorithm)
