"""From measured facts to an answer: which algorithm is the fastest on a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua.advise.facts import MachineFacts, ModelFacts, Rehearsal
from bagua.advise.measure import ALONE, measure_model, probe_machine
from bagua.advise.network import Cluster
from bagua.advise.prediction import Prediction, outside_calibration, predict
from bagua.advise.rehearse import rehearse
from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm, registry
from bagua.checks import check_kind
from bagua.errors import BaguaError, ConfigurationError
from bagua.link import hosts_in_words, parse_link

#: Name of torch's DistributedDataParallel in tables, and the size of its buckets.
DDP = "ddp"
_DDP_BUCKET_BYTES = 25 * 1024 * 1024
#: Nobody changes a script for less.
WORTH_IT = 0.95
#: Options with which trainings reached their loss first, on slow and on fast links; see ``benchmarks/time_to_loss``.
RECIPES: dict[str, tuple[dict[str, Any], ...]] = {
    "local_sgd": tuple({"sync_every": 8, "codec": codec} for codec in ("int4", "minmax_uint8"))
}
#: A rehearsal computes what each rank sends: among more ranks it takes minutes.
_MOST_RANKS = 64


@dataclass(frozen=True)
class Advice:
    """Predictions for all algorithms, and which one to take.

    Attributes:
        cluster: hosts and links.
        predictions: predictions, the fastest first.
        optimizer: name of the optimizer that was measured.
        refusals: why there is no prediction for others, by name.
        outside: conditions that were not tried when the model was calibrated, a phrase each.
        others: part of the cores that other processes had while calls were measured.
    """

    cluster: Cluster
    predictions: tuple[Prediction, ...]
    optimizer: str
    refusals: tuple[tuple[str, str], ...] = ()
    outside: tuple[str, ...] = ()
    others: float = 0.0

    @property
    def ddp(self) -> Prediction:
        """The prediction for torch's DistributedDataParallel."""
        return next(one for one in self.predictions if one.name == DDP)

    def eligible(self, one: Prediction, *, may_differ: bool = False) -> bool:
        """Whether the script may take it as it is: same optimizer, and equal weights unless ranks may differ."""
        same = one.needs_optimizer in ("", self.optimizer)
        return same and (one.keeps_equal or may_differ)

    def fastest(self, *, may_differ: bool = False) -> Prediction:
        """The fastest that keeps the loss by its recipe; plain DDP unless another one is 5 % faster.

        Args:
            may_differ: ranks may hold different weights between exchanges, as with local updates, whose loss depends on
                options and learning rate.
        """
        first = next(one for one in self.predictions if self.eligible(one, may_differ=may_differ))
        return first if first.step_s < WORTH_IT * self.ddp.step_s else self.ddp

    def _part(self, one: Prediction) -> str:
        part = one.step_s / self.ddp.step_s
        return f"{part:.2f}" if part >= 0.05 else f"{part:.4f}"

    def table(self) -> str:
        """The answer, then predictions for what keeps the loss by its recipe, then the rest."""
        keep = [one for one in self.predictions if self.eligible(one)]
        rest = [one for one in self.predictions if one not in keep]
        lines = [
            self.answer(),
            "",
            f"{hosts_in_words(self.cluster.hosts, self.cluster.ranks_per_host)}, links of {self.cluster.link}",
            f"{'keeps the loss':<28} {'step':>9} {'90 % within':>19} {'over DDP':>9} {'bytes':>9}",
            *map(self._line, keep),
        ]
        if rest:
            lines += ["", "does not by itself", *map(self._line, rest)]
        if self.refusals:
            lines += ["", *(f"{name}: no prediction: {reason}" for name, reason in self.refusals)]
        return "\n".join(lines)

    def _line(self, one: Prediction) -> str:
        remarks = [] if one.keeps_equal else ["ranks differ"]
        remarks += [_options(one)] if one.options else []
        remarks += [f"needs {one.needs_optimizer}"] if one.needs_optimizer else []
        interval = f"{_seconds(one.low_s)} - {_seconds(one.high_s)}"
        return (
            f"{one.name:<28} {_seconds(one.step_s):>9} {interval:>19} {self._part(one):>8}x "
            f"{_size(one.sent_bytes):>9}  {', '.join(remarks)}".rstrip()
        )

    def answer(self) -> str:
        """The answer in sentences."""
        best, free = self.fastest(), self.fastest(may_differ=True)
        if best is self.ddp:
            text = "Take plain DDP (gradient_allreduce): no algorithm that keeps ranks equal is 5 % faster here."
        else:
            text = f"Take {best.name}: a step takes {self._part(best)} of DDP's time."
        if free not in (best, self.ddp):
            text += (
                f" If ranks may differ between exchanges, {shown(free)} takes {self._part(free)}; "
                "its loss depends on its options, so compare losses before you take it."
            )
        if self.outside:
            text += f" This is outside of what was calibrated: {'; '.join(self.outside)}. Try it with bagua lab."
        if self.others > ALONE:
            text += (
                f" Other processes had {self.others:.0%} of the cores while calls were measured, so predictions may be "
                "far off. Ask again when the machine is idle."
            )
        return text


def shown(one: Prediction) -> str:
    """An algorithm, and the options of its recipe."""
    return f"{one.name} ({_options(one)})" if one.options else one.name


def asked_for(one: Prediction) -> str:
    """How a script asks for it."""
    return f"bagua.algorithms.Algorithm.init({one.name!r}, {_options(one)})" if one.options else repr(one.name)


def _options(one: Prediction) -> str:
    return ", ".join(f"{option}={value!r}" for option, value in one.options.items())


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _size(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.2f} kB"


def rehearse_all(
    facts: ModelFacts,
    cluster: Cluster,
    names: Sequence[str] | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[list[Rehearsal], dict[str, str]]:
    """Rehearse DDP and algorithms.

    Args:
        facts: the model.
        cluster: hosts, and ranks on each.
        names: names of the algorithms; None for all that are registered.
        tell: is called with what is about to be done.

    Returns:
        The rehearsals, and by name why others have none.

    Raises:
        ConfigurationError: fewer than two ranks, or more than 64.
        UnsupportedAlgorithmException: there is no algorithm of one of the names.
    """
    check_wanted(cluster, names)
    sizes = [cluster.ranks_per_host] * cluster.hosts
    tell(f"rehearsing {DDP}")
    found = [rehearse(GradientAllReduceAlgorithm(), facts, sizes, name=DDP, bucket_bytes=_DDP_BUCKET_BYTES)]
    refusals = {}
    for name in registry if names is None else names:
        if name == DDP:
            continue
        tell(f"rehearsing {name}")
        try:
            found += [  # all of them or none
                dataclasses.replace(rehearse(Algorithm.init(name, **one), facts, sizes, name=name), options=one)
                for one in RECIPES.get(name, ({},))
            ]
        except BaguaError as error:
            refusals[name] = f"{error.problem}. {error.advice}".removesuffix(". ")
        except Exception as error:  # noqa: BLE001 - whatever an algorithm raises that somebody registered
            refusals[name] = f"{type(error).__name__}: {error}"
    return found, refusals


def check_wanted(cluster: Cluster, names: Sequence[str] | None = None) -> None:
    """There must be two ranks, and algorithms of these names."""
    if not 2 <= cluster.size <= _MOST_RANKS:
        problem = "one rank sends nothing" if cluster.size < 2 else "a rehearsal among so many ranks takes too long"
        raise ConfigurationError(problem, argument="hosts", expected=f"2 to {_MOST_RANKS} ranks", seen=cluster.size)
    if names is not None:
        check_kind((list, tuple), "a list of names, or None for all", algorithms=names)
        for name in names:
            if name != DDP:
                registry.get(name)


def ranked(predictions: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """The fastest first; of the recipes of one algorithm, only the fastest."""
    found: dict[str, Prediction] = {}
    for one in sorted(predictions, key=lambda one: one.step_s):
        found.setdefault(one.name, one)
    return tuple(found.values())


def weigh(
    facts: ModelFacts,
    cluster: Cluster,
    names: Sequence[str] | None = None,
    machine: MachineFacts | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Advice:
    """Rehearse algorithms, predict all of them, and compare.

    Args:
        facts: the model.
        cluster: hosts and links.
        names: names of the algorithms; None for all that are registered.
        machine: facts of the hosts; None measures this machine.
        tell: is called with what is about to be done.
    """
    rehearsals, refusals = rehearse_all(facts, cluster, names, tell)
    tell("measuring calls on this machine, for about 20 s")
    machine = machine or probe_machine(tell=tell)
    found = ranked(predict(one, facts, cluster, machine) for one in rehearsals)
    outside = outside_calibration(cluster)
    return Advice(cluster, found, facts.optimizer, tuple(refusals.items()), outside, machine.others)


def advise(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], object],
    *,
    hosts: int = 2,
    ranks_per_host: int = 1,
    link: str = "1gbit",
    seconds: float = 10.0,
    algorithms: Sequence[str] | None = None,
) -> Advice:
    """Predict how long a step would take with each algorithm on some hosts, and say which one is the fastest.

    Measures ``step`` and this machine once, in this process, and runs each algorithm on a stand-in for the model as one
    rank of many would. Nothing is sent anywhere else. ``step`` trains ``module`` meanwhile.

    Args:
        module: plain module on the CPU.
        optimizer: optimizer that ``step`` steps.
        step: makes one training step.
        hosts: how many.
        ranks_per_host: on each.
        link: link of each host, as ``50mbit,20ms``: rate, and delay one way.
        seconds: how long ``step`` is measured.
        algorithms: names of those that are compared with DDP; None for all.

    Returns:
        All predictions, and the answer: ``print(advice.table())``.

    Raises:
        ConfigurationError: a model that cannot be measured, a link or seconds without sense, fewer than two ranks, or
            more than 64.
        UnsupportedAlgorithmException: there is no algorithm of one of the names.

    Example:
        >>> layer = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> def step():
        ...     optimizer.zero_grad()
        ...     layer(torch.ones(2, 64)).sum().backward()
        ...     optimizer.step()
        >>> advice = advise(layer, optimizer, step, link="1gbit", seconds=0.0, algorithms=["bytegrad"])
        >>> sorted(one.name for one in advice.predictions)
        ['bytegrad', 'ddp']
    """
    check_kind(torch.nn.Module, "a torch.nn.Module", module=module)
    check_kind(torch.optim.Optimizer, "a torch.optim.Optimizer", optimizer=optimizer)
    check_kind(Callable, "a function", step=step)
    check_kind(str, "as 50mbit,20ms", link=link)
    try:
        settings = parse_link(link)
    except ValueError as error:
        raise ConfigurationError(str(error), argument="link", expected="as 50mbit,20ms", seen=repr(link)) from None
    cluster = Cluster(hosts, ranks_per_host, settings)
    check_wanted(cluster, algorithms)
    return weigh(measure_model(module, optimizer, step, seconds=seconds), cluster, algorithms)
