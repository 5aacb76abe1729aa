"""What users hold: the islands that train together, and how a process, or the ranks of a job, become one of them."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from bagua import __version__, comm, env
from bagua.checks import check_kind, check_numbers, check_whole
from bagua.comm import Group, ProcessGroup, Store
from bagua.errors import BaguaError, CommunicatorClosedError, ConfigurationError, PeerLostError, StoreLostError
from bagua.membership.counterparts import Counterparts
from bagua.membership.epochs import Epoch
from bagua.membership.island import Island, different, first_difference, require_same
from bagua.membership.pace import Announced
from bagua.membership.participant import Participant
from bagua.membership.state import Attempt, Deadlines, MemberState, Samples, Training, take_seat


def check_place(ranks: int, **places: str | os.PathLike[str] | None) -> None:
    """Refuse another thing than a path, and one file for several ranks of an island."""
    check_kind((str, os.PathLike, type(None)), "a path, or None", **places)
    for argument, place in places.items():
        if place is not None and ranks > 1 and "{rank}" not in os.fspath(place):
            raise ConfigurationError(
                "one file for all ranks of this island",
                argument=argument,
                expected="a path that contains {rank}: each rank has a file of its own",
                seen=os.fspath(place),
            )


def place_of(place: str | os.PathLike[str] | None, seat: int, rank: int) -> Path | None:
    """The file of one rank: ``{seat}`` and ``{rank}`` are replaced."""
    if place is None:
        return None
    return Path(os.fspath(place).replace("{seat}", str(seat)).replace("{rank}", str(rank)))


def write_state(file: Path, facts: Sequence[str], state: Mapping[str, object]) -> None:
    """Write a state that ``torch.load`` can read, in the place of what ``file`` was; all of it, or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("wb") as open_file:
            torch.save({"facts": list(facts), "state": dict(state)}, open_file)
            open_file.flush()
            os.fsync(open_file.fileno())
        torch.load(draft, map_location="cpu", weights_only=True, mmap=True)  # What cannot be read is no checkpoint.
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_state(file: Path, facts: Sequence[str]) -> dict[str, Any]:
    """The state that ``write_state`` has written for the same model and training. The algorithm may be another."""
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        theirs, state = list(saved["facts"]), dict(saved["state"])
    except Exception as error:  # torch has many ways to say that it is no such file
        raise unusable(file, error) from error
    here, there = _of_model(facts), _of_model(theirs)
    if here != there:
        one, other = first_difference(here, there)
        raise unusable(file, ValueError(f"it was saved by another model or training: {other}, and here is {one}"))
    return state


def _of_model(facts: Sequence[str]) -> list[str]:
    return [fact for fact in facts if not fact.startswith("algorithm ")]


def unusable(file: Path, error: Exception) -> BaguaError:
    """The error of a file from which islands cannot begin, because of ``error``."""
    if isinstance(error, BaguaError):
        return error
    return ConfigurationError(
        f"islands cannot begin from this file: {str(error) or type(error).__name__}",
        argument="resume",
        expected="a file that join_islands(checkpoint=...) has written for the same model",
        seen=str(file),
    )


_log = logging.getLogger("bagua")
_DEADLINES = Deadlines()
#: Each sign of life, and each look, is a request that takes tens of milliseconds and costs money.
_DEADLINES_OF_BUCKETS = Deadlines(beat_s=2.0, silence_s=20.0, suspect_s=6.0, meet_s=60.0, poll_s=0.5)


class Members(NamedTuple):
    """The islands of a job by their seats, in three lists that may differ. Each list is in ascending order.

    Attributes:
        alive: joined, and not silent; newcomers that wait are among them.
        in_epoch: take part in the next exchange.
        contributed: were part of the last result.
    """

    alive: tuple[int, ...] = ()
    in_epoch: tuple[int, ...] = ()
    contributed: tuple[int, ...] = ()


class Islands:
    """Islands that train together, and come and go: processes, or jobs of several ranks. Made by ``join_islands``.

    Pass it to ``with_bagua(..., between=islands)``. At the end of a ``with`` block it leaves.

    Args:
        store: store through which they meet; its calls do not block for long.
        where: name of the store in messages.
        size: islands that begin together.
        minimum: smallest number of islands that may go on; None for more than half of those before.
        name: name of the run.
        timeout_s: how long to wait for others, in seconds.
        backend: name of the backend that connects islands; None for the one that the store needs.
        deadlines: how often to look, and how long silence may last; None for those that suit the store.
        group: ranks of this island, which all make this object; it is closed with it. None for a process alone.
        checkpoint: file for the state if the store is lost; see ``join_islands``.
        resume: file with the state that the run begins with; see ``join_islands``.

    Attributes:
        seat: number of this island, which no other one ever has. Data can be dealt out by it.
        name: name of the run.
        ranks: ranks of this island, as the default group numbers them; none for a process alone.
        size: islands that begin together.
        pace: pace of this island, and the steps that all have agreed on.
    """

    def __init__(
        self,
        store: Store,
        where: str,
        *,
        size: int,
        minimum: int | None,
        name: str,
        timeout_s: float,
        backend: str | None = None,
        deadlines: Deadlines | None = None,
        group: ProcessGroup | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> None:
        self._bucket = comm.bucket_of(store)
        backend = backend or ("gloo" if self._bucket is None else "bucket")
        is_slow = self._bucket is not None and not self._bucket.is_folder
        usual = _DEADLINES_OF_BUCKETS if is_slow else _DEADLINES
        deadlines = dataclasses.replace(deadlines or usual, timeout_s=timeout_s)
        self.name, self.size = name, size
        self.ranks = () if group is None else group.ranks
        self._whole_store = store  # C++ keeps no Python object alive.
        part = comm.PrefixStore(f"islands/{name}", store)
        self._history: deque[str] = deque(maxlen=64)
        self._callbacks: list[Callable[[Members, str], object]] = []
        self._left = ""
        self._lost_rank: tuple[int, str] | None = None
        cells, island = comm.Cells(store, where, f"islands/{name}/"), Island(group)
        facts = [
            *(f"bagua {__version__}", f"size={size}", f"minimum={minimum}", f"backend={backend}"),
            *(f"ranks of an island={island.size}", f"resumes={resume is not None}"),
        ]
        self.seat = island.share(lambda: _sit_down(cells, facts))
        self._checkpoint, self._resume = (place_of(one, self.seat, island.rank) for one in (checkpoint, resume))
        self._facts: list[str] = []
        self._state = MemberState(cells, self.seat, deadlines, (island.rank, island.size))
        self.pace = self._state.pace
        self._counterparts = Counterparts(self._state, part, backend, self._changed)
        self._island = Island(group, self._counterparts.acts)
        self._participant = Participant(self._state, self._island, self._counterparts, size=size, minimum=minimum)
        self._state.start(self._watch)
        _living.add(self)

    # What users ask.

    def members(self) -> Members:
        """Who is alive, who takes part, and who was part of the last result."""
        epoch = self._state.epoch
        in_epoch = () if epoch is None else epoch.members
        return Members(self._state.roster.alive(), in_epoch, self._state.contributed)

    def metrics(self) -> dict[str, float]:
        """What ``bagua.torch_api.metrics`` says of islands, where there is a default group; here it is always there.

        Returns:
            ``comm/alive``, ``comm/epoch_members`` and ``comm/contributed``: numbers of the islands that ``members``
            names. ``comm/bytes_between_islands``: bytes that this rank has sent to other islands, at least.
            ``comm/requests``: requests that this rank has made to a bucket, where islands meet in one.
        """
        names = ("comm/alive", "comm/epoch_members", "comm/contributed")
        found = {name: float(len(seats)) for name, seats in zip(names, self.members(), strict=True)}
        found["comm/bytes_between_islands"] = float(self._counterparts.sent_bytes)
        return found if self._bucket is None else {**found, "comm/requests": float(self._bucket.requests)}

    def why(self) -> str:
        """Who takes part and why, in words: what is waited for, and what led to each epoch, latest first."""
        alive, in_epoch, contributed = self.members()
        part = f"alive {list(alive)}, in the epoch {list(in_epoch)}, contributed {list(contributed)}"
        lines = [f"seat {self.seat}: {part}"]
        lines += [f"waiting: {self._state.waiting_for}"] if self._state.waiting_for else []
        lines += [self._state.trouble] if self._state.trouble else []
        lines += [f"this process left: {self._left}"] if self._left else []
        return "\n".join([*lines, *reversed(self._history)])

    def on_change(self, callback: Callable[[Members, str], object]) -> None:
        """Have ``callback(members, why)`` called after each change, in the thread that exchanges."""
        self._callbacks.append(callback)

    def count_tokens(self, tokens: float) -> None:
        """This process has trained on so many tokens, or samples, more: with ``pace="own"`` islands count by them.

        Args:
            tokens: those of this step, before the optimizer steps. If one never calls this, all count by steps.
        """
        check_numbers(lambda count: count >= 0, "a number from 0", tokens=tokens)
        self.pace.count(tokens)

    def leave(self, reason: str = "it left") -> None:
        """Go, and tell the others, who then do not wait. Idempotent; happens at the end of the process at the latest.

        Of an island of several ranks, all leave.

        Args:
            reason: reason that ``why()`` of the others gives.
        """
        self._leave(reason)

    def _leave(self, reason: str, error: BaseException | None = None) -> None:
        if not self._left:
            self._left = reason
            self._state.leave(reason)
            self._counterparts.close()
            if error is not None:  # The other ranks may be waiting for this one.
                self._island.abort(reason)
            self._island.close()
            comm.close_store(self._whole_store)
            _living.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self._leave(f"it left with {type(error).__name__}: {error}", error)

    def __repr__(self) -> str:
        return f"Islands(name={self.name!r})"

    # What the layers above call.

    def bind(self, facts: Sequence[str], training: Training, *, early: bool = True) -> None:
        """Come in with a model. Waits until this process takes part and has the state.

        Args:
            facts: facts about the model and its training, equal on all.
            training: the model as it is trained here.
            early: a newcomer may receive the state before it comes in, while the others train on. That pays if they
                make several steps between two exchanges.

        Raises:
            CollectiveMismatchError: the others train something else.
            ConfigurationError: a model is bound already.
            TooFewMembersError: too few others came.
            StoreLostError: the store does not answer.
        """
        self._check_open()
        state = self._state
        if state.training is not None:
            raise ConfigurationError(
                "these islands train another model already",
                argument="between",
                expected="islands of its own for each model, with another name",
                seen=repr(self),
            )
        told = [*facts, "no ElasticSampler" if state.samples is None else state.samples.fact]
        # Models of the ranks of an island were compared with each other, but not what deals out their samples.
        stranger = self._island.compare(told[-1:], "")
        if stranger is not None:
            rank, theirs, _ = stranger
            raise different(
                "the ranks of this island do not deal out the same samples", "with_bagua", rank, told[-1:], theirs,
                "Make an ElasticSampler with the same arguments on all ranks of the island, or on none.",
            )  # fmt: skip
        self._island.share(lambda: require_same(state.cells, "model", told, "models"))
        state.training = training
        with self._leaving():
            self._begin_from_file(told)
            self._participant.join(early=early)
        self._facts = told
        if state.samples is not None:
            state.samples.begin()

    def _begin_from_file(self, facts: list[str]) -> None:
        """Have the state of the file, if the run has not begun: who gives the others theirs is not known yet."""
        if self._resume is None or not self._island.share(lambda: self._state.read_epoch(1) is None):
            return
        state = read_state(self._resume, facts)
        if state["samples"] is not None:  # Seats are given out anew.
            state["samples"]["lanes"] = [*range(self.size)]
        try:
            self._state.take(state, -1)
        except Exception as error:
            raise unusable(self._resume, error) from error

    def save_if_lost(self, error: BaseException | str) -> None:
        """Training ended here with ``error``: save the state if the store is lost, and that is wanted. Never raises."""
        file = self._checkpoint
        if file is None or not self._facts or not isinstance(error, StoreLostError):
            return
        self._checkpoint = None  # A step may be given up twice.
        try:
            write_state(file, self._facts, self._state.give())
            told = f"The state of this process is in {file}; join_islands(resume=...) begins from it."
        except Exception as failure:  # noqa: BLE001 - the error that ends training must not be replaced
            told = f"Its state could not be saved in {file}: {type(failure).__name__}: {failure}."
            _log.exception("islands: seat %d could not save its state in %s", self.seat, file)
        self._history.append(told)
        error.advice = f"{error.advice} {told}"

    def deal_out(self, samples: Samples) -> None:
        """Agree on samples in each exchange.

        Raises:
            ConfigurationError: training has begun, or others are dealt out.
        """
        if self._state.training is not None or self._state.samples is not None:
            raise ConfigurationError(
                "these islands agree on their samples already, or on none",
                argument="islands",
                expected="one sampler for each, made before with_bagua",
                seen=repr(self),
            )
        self._state.samples = samples

    @property
    def deals_samples(self) -> bool:
        """Whether the islands agree on their samples."""
        return self._state.samples is not None

    @property
    def place(self) -> tuple[int, int]:
        """Rank of this process in its island, and the size of the island."""
        return self._island.rank, self._island.size

    def announce(self, part: Hashable, period: int) -> Announced:
        """What this island says in an exchange, for all of its ranks; see ``Pace.announce``. Collective among these."""
        self._check_open()
        with self._leaving(), self.pace.waiting():
            return Announced(*self._island.total(self.pace.announce(part, period)))

    def exchange(self, attempt: Attempt, alike: Sequence[torch.Tensor] = ()) -> None:
        """Have an exchange happen for all members or for none; see ``Participant.exchange``."""
        self._check_open()
        with self._leaving(), self.pace.waiting():
            self._participant.exchange(attempt, alike)
            if self._state.samples is not None:
                self._state.samples.settle()

    def check_loads(self) -> None:
        """Refuse weights that are loaded here alone, once the islands have exchanged.

        Raises:
            ConfigurationError: they have.
        """
        if self._state.contributed:
            raise ConfigurationError(
                f"seat {self.seat} loads weights or state, and the other islands go on from what all have exchanged",
                argument="state_dict",
                expected="no load after the first exchange between islands",
                seen="a load after it",
                advice="Load before the first exchange, on all islands alike. To go back, end the run, and start "
                "another one with join_islands(resume=...).",
            )

    def rest(self) -> None:
        """This process is between two steps: newcomers may come in."""
        if not self._left:
            with self._leaving(), self.pace.waiting():
                self._participant.rest()

    def _check_open(self) -> None:
        if self._left:
            raise CommunicatorClosedError(
                f"this process is no longer one of the islands: {self._left}",
                rank=self.seat,
                advice="Join again with join_islands, and wrap the model anew.",
            )

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """Whatever ends an exchange half-way ends this process's part, and the others are told."""
        try:
            yield
        except BaseException as error:
            self._leave(f"it left with {type(error).__name__}: {error}", error)
            if self._lost_rank is not None and isinstance(error, CommunicatorClosedError):
                rank, why = self._lost_rank
                raise PeerLostError(f"rank {rank} of this island is lost: {why}", peers=[rank]) from error
            raise

    def _changed(self, epoch: Epoch) -> None:
        when = f"epoch {epoch.number} of seats {list(epoch.members)}, from exchange {epoch.base}"
        self._history.append(f"{when}: {epoch.why}")
        members = self.members()
        for callback in self._callbacks:
            callback(members, epoch.why)

    def _watch(self) -> None:
        """From the thread that gives signs of life: end calls that wait for a member that is gone."""
        self._counterparts.watch()
        for rank, why in self._state.lost_ranks().items():
            self._lost_rank = self._lost_rank or (rank, why)
            self._state.leave(f"rank {rank} of this island is lost: {why}")
            self._island.abort(why, rank)
            self._counterparts.abort(f"rank {rank} of its island is lost: {why}")


def join_islands(
    where: str | None = None,
    size: int | None = None,
    minimum: int | None = None,
    name: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    process_group: Group | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    store: object = None,
) -> Islands:
    """Join the islands that train together and may come and go. Returns at once, as soon as the store answers.

    An island is one process, or all ranks of a launcher's job, which then call this together: if one of them is lost,
    the island is. ``with_bagua(..., between=islands)`` then waits until this island takes part: with the others at the
    beginning, or as a newcomer, which receives the state.

    Args:
        where: ``tcp://host:port``, as ``baguarun --serve-islands`` prints it, or ``etcd://host:port,host:port,...``
            with the servers of an etcd cluster; or a bucket that all islands can write to, where none reaches another
            one: ``file:///path``, ``s3://bucket/path``, ``gs://bucket/path`` or ``az://container/path``, with the extra
            ``bucket``. None for ``BAGUA_ISLANDS``.
        size: islands that begin together; None for ``minimum``, or for one, which others may join.
        minimum: islands that may go on when others are lost; None for more than half.
        name: name of the run; another run over the same store needs another one. None for ``default``.
        timeout: how long to wait for others, in seconds; None for ``BAGUA_TIMEOUT_S``, or 30 minutes.
        process_group: ranks of this island, as many as of each other one; None for all of the default group if there is
            one, and for this process alone otherwise.
        checkpoint: file in which this process saves its state when training ends because the store is lost: the shared
            state after the last exchange that counts, and its own weights and optimizers. ``{seat}`` and ``{rank}``
            stand for its numbers; the ranks of one island need the latter. None for no file.
        resume: such a file, from which the run begins, over a new store. All islands pass one; that of the island with
            the lowest seat counts. Who comes when the run has begun reads none. None to begin with the model as it is.
        store: store of the package obstore, through which the bucket at ``where`` is reached; None to make one from the
            usual variables of the environment.

    Returns:
        The islands, with the seat of this one.

    Raises:
        ConfigurationError: an argument that cannot be used.
        StoreLostError: no store answers there.
        CollectiveMismatchError: the others have joined with other arguments, or another version.

    Example:
        >>> import bagua.torch_api as bagua
        >>> islands = bagua.join_islands("tcp://head:29600", size=3)  # doctest: +SKIP
        >>> model = model.with_bagua(optimizer, "diloco", between=islands)  # doctest: +SKIP
    """
    found = env.islands() if where is None else where
    if found is None:
        raise ConfigurationError(
            "no store where islands meet",
            argument="where",
            expected="an address, or one in BAGUA_ISLANDS",
            seen="neither",
            advice="Start a store with: baguarun --serve-islands",
        )
    for option, value in (("size", size), ("minimum", minimum)):
        if value is not None:
            check_whole(1, **{option: value})
    check_kind((str, type(None)), "a word", name=name)
    if size is not None and minimum is not None and minimum > size:
        raise ConfigurationError(
            "fewer begin than may go on", argument="minimum", expected=f"at most size, which is {size}", seen=minimum
        )
    chosen = env.timeout_s() if timeout is None else timeout
    timeout_s = comm.DEFAULT_TIMEOUT_S if chosen is None else comm.as_seconds(chosen)
    begin, chosen_name = size or minimum or 1, name or "default"
    facts = [f"where={found}", f"size={begin}", f"minimum={minimum}", f"name={chosen_name}", f"timeout={timeout_s:g}"]
    group = _ranks_of_island(process_group)
    opened: Store | None = None
    try:
        check_place(1 if group is None else group.size, checkpoint=checkpoint, resume=resume)
        opened = _opened_together(found, facts, timeout_s, group, store)
        return Islands(
            opened, found, size=begin, minimum=minimum, name=chosen_name, timeout_s=timeout_s, group=group,
            checkpoint=checkpoint, resume=resume,
        )  # fmt: skip
    except BaseException:
        if opened is not None:
            comm.close_store(opened)
        if group is not None:
            group.close()
        raise


def _ranks_of_island(process_group: Group | None) -> ProcessGroup | None:
    """The ranks of this island, over connections of their own; None for one. Collective."""
    if process_group is None and not comm.is_initialized():
        return None
    group = comm.get_default_group() if process_group is None else comm.as_group(process_group, "process_group")
    return group.duplicate("islands") if group.size > 1 else None


def _opened_together(
    where: str, facts: list[str], timeout_s: float, group: ProcessGroup | None, objects: object
) -> Store:
    """The store, if all ranks of the island ask for the same one, and reach it. Collective.

    Raises:
        StoreLostError: some rank does not reach it.
        CollectiveMismatchError: ranks ask for different things.
    """
    failure: BaguaError | None = None
    try:
        store = comm.open_store(where, timeout_s, objects)
    except BaguaError as error:
        failure = error
    stranger = Island(group).compare(facts, "" if failure is None else failure.problem)
    if failure is not None:
        raise failure
    if stranger is None:
        return store
    comm.close_store(store)
    rank, theirs, problem = stranger
    if problem:
        raise StoreLostError(f"rank {rank} of this island: {problem}", peers=[rank])
    raise different(
        "the ranks of this island join different islands", "join_islands", rank, facts, theirs,
        "Call join_islands with the same arguments on all ranks of the process group.",
    )  # fmt: skip


def _sit_down(cells: comm.Cells, facts: list[str]) -> int:
    require_same(cells, "job", facts, "runs")
    return take_seat(cells)


_living: weakref.WeakSet[Islands] = weakref.WeakSet()


def _leave_all() -> None:
    for islands in list(_living):
        islands._leave("its process ended")  # noqa: SLF001 - here no rank waits for another one


atexit.register(_leave_all)
