"""Dealing a data set out to islands that come and go.

The samples of all passes over the data lie in one order, by numbers from 0. From one exchange to the next each member
draws from lanes of its own, as many as its part of what all drew before. In the exchange all say how many they have
drawn, and move a cursor beyond that. What is left before the cursor, as what a lost member had drawn, is drawn next.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from bagua.checks import check_flags, check_whole
from bagua.errors import ConfigurationError
from bagua.membership.islands import Islands

#: Lanes of the member that draws most; others have them in proportion.
_MOST_LANES = 8


class ElasticSampler(Sampler[int]):
    """Deals the samples of a data set out to islands, and to the ranks of each; who is faster draws more.

    While the same islands train, every sample comes once in each pass. What a lost island had drawn since the last
    exchange is drawn again by the others. A newcomer trains on what was drawn last until it takes part in an exchange.
    Each rank agrees with its counterparts in the exchanges that happen anyway.

    Make it before ``with_bagua(..., between=islands)``, which waits for the others, and iterate after it. Tell it on
    what was trained: let ``batches`` do that, or call ``record``.

    Args:
        dataset: data set, or anything else with a length.
        islands: islands that train on it.
        shuffle: another order in each pass; otherwise ascending.
        seed: seed of these orders, the same on all.

    Attributes:
        number_of_pass: passes over the data that this rank has ended.
        again: samples that may have been trained on twice, because an island was lost, or came.

    Raises:
        ConfigurationError: an argument that cannot be used, or islands that train already.

    Example:
        >>> from bagua.membership import ElasticSampler, join_islands
        >>> islands = join_islands("tcp://head:29600", size=3)  # doctest: +SKIP
        >>> sampler = ElasticSampler(dataset, islands)  # doctest: +SKIP
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)  # doctest: +SKIP
        >>> model = model.with_bagua(optimizer, "diloco", between=islands)  # doctest: +SKIP
        >>> for batch in sampler.batches(loader):  # doctest: +SKIP
        ...     train(batch)
    """

    def __init__(self, dataset: Sized, islands: Islands, *, shuffle: bool = True, seed: int = 0) -> None:
        check_flags(shuffle=shuffle)
        check_whole(0, seed=seed)
        self._rank, self._ranks = islands.place
        self._all, self._seat = len(dataset), islands.seat
        self._seed = seed if shuffle else None
        #: Samples of this rank in one pass: it draws every so many-th.
        self._samples = len(range(self._rank, self._all, self._ranks))
        if self._all < self._ranks:
            raise _refused("dataset", "some rank would have no samples", f"at least {self._ranks} samples", self._all)
        #: What all agree on: the cursor, numbers before it that are not drawn yet, and the seat of each lane.
        self._first, self._left, self._lanes = 0, list[int](), [*range(islands.size)]
        self._proposed: dict[str, Any] = {}
        #: How many this rank has drawn since the last exchange; those not trained on; how many of these are given out.
        self._drawn, self._own, self._given = 0, list[int](), 0
        self._is_here = False
        self.number_of_pass = self.again = 0
        islands.deal_out(self)

    # What users call.

    def __iter__(self) -> Iterator[int]:
        """Indices of this rank in this pass, first of all those that were drawn before and not trained on."""
        if not self._is_here:
            when = "with_bagua(..., between=islands) before data is loaded"
            raise _refused("sampler", "no island has come in yet", when, "an iteration before it")
        self._given = 0
        while self._given < len(self._own) or self._draw():
            self._given += 1
            yield self._index(self._own[self._given - 1])
        self.number_of_pass += 1

    def __len__(self) -> int:
        """Samples that this rank has yet to give out in this pass, if no island comes or goes."""
        coming = itertools.takewhile(self._is_in_pass, map(self._number, itertools.count(self._drawn)))
        return len(self._own) + sum(1 for _ in coming)

    def record(self, samples: int) -> None:
        """So many samples more were trained on, in the order in which they were given out; before the optimizer steps.

        Args:
            samples: size of the batch on this rank.

        Raises:
            ConfigurationError: more than were given out.
        """
        check_whole(0, samples=samples)
        if samples > self._given:
            raise _refused("samples", "no rank has got so many samples", f"at most {self._given}", samples)
        del self._own[:samples]
        self._given -= samples

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a ``DataLoader`` that has this sampler; each is recorded when it is handed out.

        Args:
            loader: one pass over it is one pass over the data.

        Raises:
            ConfigurationError: it has another sampler, or forms batches of its own; then call ``record(samples)``.
        """
        size = getattr(loader, "batch_size", None)
        if getattr(loader, "sampler", None) is not self or not isinstance(size, int):
            expected = "DataLoader(..., batch_size=..., sampler=this one)"
            raise _refused("loader", "these batches do not consist of what this sampler gives out", expected, loader)
        for batch in loader:
            self.record(min(size, self._given))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position of the last exchange: what was drawn since then comes again. Save it right after one.

        What this rank had drawn before, and not trained on, comes again, too; what loaders of others had is left out.
        """
        before = self._own[: max(0, len(self._own) - self._drawn)]
        return {**self.give(), "left": sorted([*before, *self._left]), **self._facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called; each rank with its own, before it comes in.

        Raises:
            ConfigurationError: it is of another data set or seed, or training goes on already.
        """
        theirs = {name: state.get(name) for name in self._facts()}
        if theirs != self._facts() or self._is_here:
            seen = "one that comes after it" if self._is_here else theirs
            expected = f"one of {self._facts()}, before with_bagua"
            raise _refused("state", "this position cannot be gone on from", expected, seen)
        self.take({**state, "lanes": self._lanes})

    # What islands call.

    @property
    def fact(self) -> str:
        """What all islands have in common."""
        return f"data of {self._all} samples, {'in ascending order' if self._seed is None else f'seed {self._seed}'}"

    def begin(self) -> None:
        """This island has come in."""
        self._is_here = True
        self.number_of_pass = self._number(0) // self._samples

    def said(self) -> int:
        """What this rank says in an exchange: how many samples it has drawn since the last one."""
        return self._drawn

    def hear(self, said: Mapping[int, int]) -> None:
        """What all have said in an exchange that may come to count."""
        taken = {place for seat in {*self._lanes} & {*said} for place in self._places(seat, range(said[seat]))}
        first = self._first + max(0, max(taken, default=-1) + 1 - len(self._left))
        pool = [*self._left, *range(self._first, first)]
        lost = sum(self._lanes[place % len(self._lanes)] not in said for place in range(len(pool)))
        repeated = sum(drawn for seat, drawn in said.items() if seat not in self._lanes)
        counts = {seat: max(1, round(_MOST_LANES * drawn / max(*said.values(), 1))) for seat, drawn in said.items()}
        lanes = sorted(((turn + 0.5) / count, seat) for seat, count in counts.items() for turn in range(count))
        self._proposed = {
            "first": first,
            "left": [number for place, number in enumerate(pool) if place not in taken],
            "lanes": [seat for _, seat in lanes],
            "again": self.again + lost + repeated,
        }

    def settle(self) -> None:
        """The exchange counts."""
        self.take(self._proposed)
        self._drawn = 0

    def give(self) -> dict[str, Any]:
        """What a newcomer needs."""
        return {"first": self._first, "left": self._left, "lanes": self._lanes, "again": self.again}

    def take(self, state: Mapping[str, Any]) -> None:
        """Begin where the others are."""
        self._first, self._left, self._lanes = state["first"], list(state["left"]), list(state["lanes"])
        self.again = state["again"]

    # Numbers.

    def _places(self, seat: int, turns: range) -> list[int]:
        """The places of what a member draws in its ``turns``, from 0, among the numbers that are not drawn yet."""
        lanes = [lane for lane, owner in enumerate(self._lanes) if owner == seat]
        return [turn // len(lanes) * len(self._lanes) + lanes[turn % len(lanes)] for turn in turns]

    def _number(self, turn: int) -> int:
        """What this rank draws when it has drawn ``turn``; a newcomer goes back from the cursor."""
        if self._seat not in self._lanes:
            return self._first - 1 - turn
        (place,) = self._places(self._seat, range(turn, turn + 1))
        return self._left[place] if place < len(self._left) else self._first + place - len(self._left)

    def _is_in_pass(self, number: int) -> bool:
        return number < (self.number_of_pass + 1) * self._samples

    def _draw(self) -> bool:
        """Draw the next number; whether there is one in this pass."""
        number = self._number(self._drawn)
        if self._is_in_pass(number):
            self._drawn += 1
            self._own.append(number)
        return self._is_in_pass(number)

    def _index(self, number: int) -> int:
        """The index of a sample in the data set."""
        turn, place = divmod(number, self._samples)
        place = self._rank + place * self._ranks
        return place if self._seed is None else int(_order(self._all, self._seed + turn)[place])

    def _facts(self) -> dict[str, Any]:
        return {"samples": self._all, "seed": self._seed, "rank": self._rank, "ranks": self._ranks}


@functools.lru_cache(maxsize=2)
def _order(samples: int, seed: int) -> torch.Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed), device="cpu")


def _refused(argument: str, problem: str, expected: str, seen: object) -> ConfigurationError:
    return ConfigurationError(problem, argument=argument, expected=expected, seen=seen)
