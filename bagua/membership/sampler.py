"""Dealing a data set out to islands that come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from bagua.checks import check_flags, check_whole
from bagua.errors import ConfigurationError
from bagua.membership.epochs import Epoch
from bagua.membership.islands import Islands
from bagua.membership.position import Position, Tally


class ElasticSampler(Sampler[int]):
    """Deals the samples of a data set out to islands, and to the ranks of each.

    What an island has trained on counts when an exchange does to which it contributed. Samples of an island that was
    lost before are drawn again by the others, so in each pass over the data every sample counts once. A newcomer draws
    from where the others are. Each rank agrees with its counterparts in the exchanges that happen anyway.

    Make it before ``with_bagua(..., between=islands)``, which waits for the others, and iterate after it. Tell it on
    what was trained: let ``batches`` do that, or call ``record``.

    Args:
        dataset: data set, or anything else with a length.
        islands: islands that train on it.
        shuffle: another order in each pass; otherwise ascending.
        seed: seed of these orders, the same on all.

    Attributes:
        number_of_pass: passes over the data that this rank has ended.

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
        self._all = len(dataset)
        #: Samples of this rank in one pass: it draws every so many-th.
        self._samples = len(range(self._rank, self._all, self._ranks))
        if self._all < self._ranks:
            raise ConfigurationError(
                "some rank would have no samples",
                argument="dataset",
                expected=f"at least {self._ranks} samples",
                seen=self._all,
            )
        self._shuffle, self._seed = shuffle, seed
        self._seat = islands.seat
        self._position = Position()
        self._lane: int | None = None
        self._drawn = 0
        #: Numbers that this rank has drawn and not contributed; how many it has given out, and trained on.
        self._own: list[int] = []
        self._given = self._trained = 0
        self._proposed: tuple[Position, int] | None = None
        self._changed = threading.Condition()
        #: This rank has said what it has drawn: more may become another's.
        self._agreeing = False
        self._orders: dict[int, torch.Tensor] = {}
        self.number_of_pass = 0
        islands.deal_out(self)

    # What users call.

    @property
    def again(self) -> int:
        """How many samples belonged to members that were lost, so that some may be trained on for the second time."""
        return self._position.again

    def __iter__(self) -> Iterator[int]:
        """Indices of this rank in this pass, first of all those that were drawn before and not trained on."""
        if self._lane is None:
            raise ConfigurationError(
                "no island has come in yet",
                argument="sampler",
                expected="with_bagua(..., between=islands) before data is loaded",
                seen="an iteration before it",
            )
        with self._changed:
            self._given = self._trained
        while (number := self._next()) is not None:
            yield self._index(number)
        self.number_of_pass += 1

    def __len__(self) -> int:
        """Samples that this rank has yet to give out in this pass, if no island comes or goes."""
        with self._changed:
            number, lane, count = self._position.number, self._lane or 0, len(self._own) - self._trained
            turn = drawn = self._drawn
        while number(lane, turn) < self._end:
            turn += 1
        return count + turn - drawn

    def record(self, samples: int) -> None:
        """So many samples more were trained on, in the order in which they were given out; before the optimizer steps.

        Args:
            samples: size of the batch on this rank.

        Raises:
            ConfigurationError: more than were given out.
        """
        check_whole(0, samples=samples)
        with self._changed:
            if samples > self._given - self._trained:
                raise ConfigurationError(
                    "no rank has got so many samples",
                    argument="samples",
                    expected=f"at most {self._given - self._trained}, which were given out and not recorded",
                    seen=samples,
                )
            self._trained += samples

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a ``DataLoader`` that has this sampler; each is recorded when it is handed out.

        Args:
            loader: one pass over it is one pass over the data.

        Raises:
            ConfigurationError: it has another sampler, or forms batches of its own.
        """
        size = getattr(loader, "batch_size", None)
        if getattr(loader, "sampler", None) is not self or not isinstance(size, int):
            raise ConfigurationError(
                "these batches do not consist of what this sampler gives out",
                argument="loader",
                expected="DataLoader(..., batch_size=..., sampler=this one)",
                seen=repr(loader),
                advice="With another batch_sampler, call record(samples) in each step.",
            )
        for batch in loader:
            self.record(min(size, self._given - self._trained))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where training is: what this rank has trained on is done, and what others had on their way is drawn again."""
        with self._changed:
            after = self._position
            if self._lane is not None:
                after = after.exchanged({self._seat: Tally(self._lane, self._drawn, self._trained)})
        after = after.without_members()
        return {"first": after.first, "left": list(after.left), "again": after.again, **self._facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called; each rank with its own, before it comes in.

        Raises:
            ConfigurationError: it is of another data set or seed, or training goes on already.
        """
        theirs = {name: state.get(name) for name in self._facts()}
        if theirs != self._facts() or self._lane is not None:
            raise ConfigurationError(
                "this position cannot be gone on from",
                argument="state",
                expected=f"one of {self._facts()}, before with_bagua",
                seen=theirs if self._lane is None else "one that comes after it",
            )
        self._position = Position(state["first"], tuple(state["left"]), again=state["again"])

    # What islands call.

    @property
    def fact(self) -> str:
        """What all islands have in common."""
        return f"data of {self._all} samples, {'seed ' + str(self._seed) if self._shuffle else 'in ascending order'}"

    def begin(self, seat: int, epoch: Epoch) -> None:
        """This island has come in, with this epoch."""
        if not self._position.own:
            self._position = self._position.of_members(epoch.members)
        own = self._position.own
        self._lane = self._position.lane_of(seat) if seat in own else len(own) + epoch.newcomers.index(seat)
        self.number_of_pass = self._position.number(self._lane, 0) // self._samples

    def said(self) -> Tally:
        """What this rank says in an exchange. From then on it draws nothing more, until ``settle`` or ``resume``."""
        with self._changed:
            self._agreeing = True
            return Tally(self._lane or 0, self._drawn, self._trained)

    def hear(self, said: Mapping[int, Tally], room: int) -> None:
        """What all have said in an exchange that may come to count; see ``Position.exchanged``."""
        self._proposed = self._position.exchanged(said, room), said[self._seat].trained

    def settle(self) -> None:
        """The exchange counts."""
        assert self._proposed is not None
        with self._changed:
            (self._position, counted), self._proposed = self._proposed, None
            del self._own[:counted]
            self._trained -= counted
            self._given -= counted
            self._drawn = 0
            self._lane = self._position.lane_of(self._seat)
        self.resume()

    def resume(self) -> None:
        """What this rank said last is part of its position, or does not count: it draws on."""
        with self._changed:
            self._agreeing = False
            self._changed.notify_all()

    def give(self) -> dict[str, Any]:
        """What a newcomer needs."""
        return self._position._asdict()

    def take(self, state: Mapping[str, Any]) -> None:
        """Begin where the others are."""
        self._position = Position(**state)

    def _facts(self) -> dict[str, Any]:
        seed = self._seed if self._shuffle else None
        return {"samples": self._all, "seed": seed, "rank": self._rank, "ranks": self._ranks}

    @property
    def _end(self) -> int:
        return (self.number_of_pass + 1) * self._samples

    def _next(self) -> int | None:
        """The number to give out next; None at the end of the pass."""
        with self._changed:
            self._changed.wait_for(lambda: self._given < len(self._own) or not self._agreeing)
            if self._given == len(self._own) and not self._draw():
                return None
            self._given += 1
            return self._own[self._given - 1]

    def _draw(self) -> bool:
        """Draw the next number; whether there is one in this pass."""
        assert self._lane is not None
        number = self._position.number(self._lane, self._drawn)
        if number >= self._end:
            return False
        self._drawn += 1
        self._own.append(number)
        return True

    def _index(self, number: int) -> int:
        """The index of a sample in the data set."""
        turn, place = divmod(number, self._samples)
        place = self._rank + place * self._ranks
        return int(self._order(turn)[place]) if self._shuffle else place

    def _order(self, turn: int) -> torch.Tensor:
        if turn not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known == turn - 1}
            generator = torch.Generator().manual_seed(self._seed + turn)
            self._orders[turn] = torch.randperm(self._all, generator=generator)
        return self._orders[turn]
