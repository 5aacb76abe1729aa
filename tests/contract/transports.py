"""Every promise of a transport as a test. Needs pytest.

To hold a transport to it, derive a class and give it a pool of ranks on that transport:

    >>> import pytest
    >>> from bagua.comm import register_transport
    >>> from bagua.comm.transports.threads import ThreadsTransport
    >>> from bagua.testing import ThreadRanks
    >>> register_transport("mine", ThreadsTransport)
    >>> class TestMine(TransportContract):
    ...     @pytest.fixture
    ...     def pool(self):
    ...         return ThreadRanks(3, backend="mine")

``pytest`` runs all of its tests; by hand one looks like this:

    >>> TestMine().test_every_root(ThreadRanks(3, backend="mine"))

A transport that connects processes uses ``ProcessRanks(3, backend="mine", modules=["my_package.transport"])``,
where importing the module registers it. What a transport cannot do it says with the class attributes of
``TransportContract``; the tests that need it are skipped, with that declaration as the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bagua import errors
from bagua.testing.ranks import Outcome, RankPool
from tests.contract import asynchronous, failures, records, results
from tests.contract.exercises import CallSetting, assert_same

__all__ = ["TransportContract"]

#: What is true of a transport without a capability.
_WITHOUT = {
    "compares_calls": "calls are not compared",
    "compares_messages": "messages are not compared",
    "can_lose_ranks": "there is no other rank",
    "adds_in_float32": "a foreign library adds",
    "keeps_apart": "communicators are used in one order, and share their fate",
    "receives_from_any": "ranks to receive from are named",
    "matches_in_order": "a foreign library matches receives",
    "blocks_host": "waiting does not block",
}
_IN_ORDER = ("receives_from_any", "can_lose_ranks", "matches_in_order")

_Test = Callable[["TransportContract", RankPool], None]


def _on_every_size(function: Callable[..., Any], *arguments: Any) -> _Test:
    """A test that runs ``function`` with each of the numbers of ranks."""

    def test(self: TransportContract, pool: RankPool) -> None:
        for size in self.sizes:
            pool.run(function, *arguments, size=size)

    return test


def _on_most_ranks(function: Callable[..., Any], *needs: str) -> _Test:
    """A test that runs ``function`` with the largest number of ranks, on transports with the capabilities ``needs``."""

    def test(self: TransportContract, pool: RankPool) -> None:
        self.need(*needs)
        pool.run(function, size=self.size)

    return test


def check_the_dead(error: errors.BaguaError, lost: int, rank: int) -> None:
    """The error of ``rank`` names the rank that was lost, once, and no other one."""
    assert isinstance(error, errors.PeerLostError), f"rank {rank} got {error!r}"
    assert (error.peers, error.silent, error.rank) == ((lost,), (), rank), f"rank {rank} got {error!r}"
    assert str(error).count("lost rank") == str(error).count(f"lost rank {lost}: it ") == 1, str(error)


class TransportContract:
    """Every promise of a transport; what a transport declares about itself decides which of them are tested."""

    sizes: ClassVar[tuple[int, ...]] = (2, 3)  # numbers of ranks with which every promise is checked
    compares_calls: ClassVar[bool] = True  # ranks that disagree get ``CollectiveMismatchError``
    compares_messages: ClassVar[bool] = True  # both ends of a message that disagree do, too
    can_lose_ranks: ClassVar[bool] = True  # they can die, be late, or call something else; not where there is only one
    adds_in_float32: ClassVar[bool] = True  # sums of 16-bit floats are accumulated in float32 by this project
    keeps_apart: ClassVar[bool] = True  # calls on two communicators may be issued in other orders on other ranks
    receives_from_any: ClassVar[bool] = True  # ``recv_any`` works
    matches_in_order: ClassVar[bool] = True  # the receive that was started first gets a message, also from any sender
    blocks_host: ClassVar[bool] = True  # ``wait`` returns when the result is there, not when a stream will see it
    names_the_dead: ClassVar[bool] = True  # a rank that dies is named by all others; elsewhere they may only time out
    names_the_late: ClassVar[bool] = True  # a timeout names the rank that did not come, and no other one
    deadline_s: ClassVar[float] = 0.6  # timeout that the tests of late and silent ranks use

    @pytest.fixture
    def pool(self) -> RankPool:
        """The ranks, on the transport under test. Every transport supplies its own."""
        raise NotImplementedError("give the class a fixture `pool` that returns a RankPool")

    @property
    def size(self) -> int:
        return max(self.sizes)

    def need(self, *capabilities: str) -> None:
        """Skip, visibly, a test that this transport declares not to be for it."""
        for name in capabilities:
            if not getattr(self, name):
                pytest.skip(f"{type(self).__name__} declares: {_WITHOUT[name]}")

    def survivors(self, outcomes: list[Outcome], lost: int) -> list[Outcome]:
        """The outcomes of all ranks but ``lost``, after a check that only that one was lost."""
        assert outcomes[lost].error is not None, f"rank {lost} should have been lost"
        rest = [outcome for outcome in outcomes if outcome.rank != lost]
        for outcome in rest:
            if outcome.error is not None:
                raise outcome.error
        return rest

    test_every_reduction_of_every_dtype = _on_every_size(results.reduce_all_of_it)
    test_every_dtype_is_carried = _on_every_size(results.carry_everything)
    test_every_root = _on_every_size(results.use_every_root)
    test_large_tensors = _on_every_size(results.exercise_all, CallSetting(shape=(results.LARGE,)))
    test_scalars = _on_every_size(results.exercise_all, CallSetting(shape=()))
    test_empty_tensors = _on_every_size(results.exercise_all, CallSetting(shape=(0,)))
    test_every_layout = _on_every_size(results.use_every_layout)
    test_tensors_that_require_gradients = _on_every_size(results.use_tensors_with_history)
    test_inference_mode = _on_every_size(results.exercise_in_inference_mode)
    test_tensors_made_in_inference_mode = _on_every_size(results.exercise_on_inference_tensors)
    test_messages_to_oneself_arrive = _on_every_size(results.send_to_oneself)
    test_shapes_may_differ_where_sizes_agree = _on_every_size(results.use_other_shapes)

    def test_results_are_bitwise_identical(self, pool: RankPool) -> None:
        for size in self.sizes:
            per_rank = pool.run(results.return_results, size=size)
            for rank, found in enumerate(per_rank):
                for mine, first in zip(found, per_rank[0], strict=True):
                    assert_same(mine, first, f"rank {rank} of {size} against rank 0")

    test_sums_of_16_bit_floats_accumulate_in_float32 = _on_most_ranks(results.add_small_to_large, "adds_in_float32")
    test_memory_of_the_communicator_is_ordinary_memory = _on_every_size(results.reduce_own_memory)
    test_communicators_of_some_ranks = _on_most_ranks(results.exercise_in_subgroups)

    test_reductions_without_a_meaning = _on_every_size(results.try_meaningless_reductions)
    test_tensors_that_cannot_be_communicated = _on_every_size(results.try_wrong_tensors)
    test_ranks_that_do_not_exist = _on_every_size(results.try_wrong_ranks)
    test_tensors_that_do_not_fit_together = _on_every_size(results.try_wrong_sizes)
    test_a_root_that_was_refused_calls_again = _on_most_ranks(results.refuse_the_root)
    test_timeouts_that_are_none = _on_every_size(results.try_wrong_timeouts)
    test_timeouts_without_end = _on_every_size(results.use_endless_timeouts)

    test_every_collective_can_be_waited_for = _on_every_size(asynchronous.exercise_asynchronously)
    test_a_synchronous_call_comes_after_what_was_started = _on_every_size(asynchronous.mix_with_synchronous)
    test_everything_that_a_work_offers = _on_every_size(asynchronous.use_all_of_work)
    test_a_work_keeps_its_tensors_alive = _on_every_size(asynchronous.forget_tensors)
    test_closing_lets_started_calls_end = _on_most_ranks(asynchronous.forget_works)
    test_closing_ends_calls_that_others_never_make = _on_most_ranks(
        asynchronous.close_before_calls_end, "can_lose_ranks", "blocks_host"
    )

    def test_closing_gives_everything_back(self, pool: RankPool) -> None:
        if not Path("/proc/self/fd").exists():
            pytest.skip("the system does not list open files")
        _on_every_size(asynchronous.open_and_close)(self, pool)

    test_two_communicators_do_not_interfere = _on_most_ranks(asynchronous.cross_two_communicators, "keeps_apart")

    @pytest.mark.parametrize("kind", [*failures.NEEDS_EVERYONE, *failures.NEEDS_SOME])
    def test_a_rank_that_died(self, pool: RankPool, kind: str) -> None:
        self.need("can_lose_ranks")
        deadline_s = failures.PATIENT_S if self.names_the_dead else self.deadline_s
        outcomes = pool.outcomes(failures.lose_a_rank, kind, "die", deadline_s, size=self.size)
        for outcome in self.survivors(outcomes, failures.CULPRIT):
            self.check_loss(outcome.value)
            if self.names_the_dead:
                check_the_dead(outcome.value[0].error, failures.CULPRIT, outcome.rank)

    @pytest.mark.parametrize("kind", ["allreduce", "barrier", "broadcast"])
    def test_a_silent_rank(self, pool: RankPool, kind: str) -> None:
        self.need("can_lose_ranks")
        outcomes = pool.outcomes(failures.lose_a_rank, kind, "fall_silent", self.deadline_s, size=self.size)
        survivors = self.survivors(outcomes, failures.CULPRIT)
        for outcome in survivors:
            self.check_loss(outcome.value)
        found = [outcome.value[0].error for outcome in survivors]
        late = [error for error in found if isinstance(error, errors.CollectiveTimeoutError)]
        assert late, found
        assert not self.names_the_late or {error.peers for error in late} == {(failures.CULPRIT,)}, late

    def check_times(self, found: list[failures.Caught], kind: Any, limit_s: float) -> None:
        """All got an error of this kind, in time."""
        for number, (error, seconds) in enumerate(found):
            assert isinstance(error, kind), f"number {number} of {len(found)} is {error!r}"
            assert seconds < limit_s, f"rank {error.rank} waited {seconds:.1f} s for {error}"

    def check_loss(self, value: tuple[failures.Caught, failures.Caught]) -> None:
        """In time, of the right kind, with facts; then refused at once."""
        first, again = value
        kinds = errors.PeerLostError | errors.CollectiveTimeoutError
        self.check_times([first], kinds, self.deadline_s + failures.GRACE_S)
        self.check_times([again], errors.CommunicatorClosedError, failures.SOON_S)

    @pytest.mark.parametrize("kind", ["allreduce", "recv", "allgather_object", "broadcast_coalesced"])
    def test_a_late_rank(self, pool: RankPool, kind: str) -> None:
        self.need("can_lose_ranks")
        found = pool.run(failures.come_late, kind, self.deadline_s, size=self.size)
        self.check_times(found, errors.CollectiveTimeoutError, self.deadline_s + failures.GRACE_S)
        for rank, (error, _) in enumerate(found if self.names_the_late else ()):
            assert error.peers == (failures.CULPRIT,), f"rank {rank} got {error!r}"
            assert ("this rank came late" in str(error)) == (rank == failures.CULPRIT), f"rank {rank} got {error!r}"

    test_a_rank_just_in_time = _on_most_ranks(failures.come_just_in_time, "can_lose_ranks")

    def test_the_facts_of_a_timeout(self, pool: RankPool) -> None:
        self.need("can_lose_ranks")
        found = pool.run(failures.time_out_with_facts, self.deadline_s, size=self.size)
        if not self.blocks_host:  # Who came late learns it from a later call.
            del found[failures.CULPRIT]
        timeouts = [error for error in found if isinstance(error, errors.CollectiveTimeoutError)]
        assert timeouts
        # Ranks start their calls at different moments; the rank that began first waits the whole deadline.
        assert max(error.elapsed_s or 0.0 for error in timeouts) >= self.deadline_s - 0.1
        for error in timeouts:
            assert (error.sequence, error.timeout_s) == (4, self.deadline_s), "three calls came before"
            assert "allreduce(3 x float64, sum)" in str(error.call)
            assert error.rank in range(self.size)
            assert error.peers == (failures.CULPRIT,) or not self.names_the_late, f"{error!r}"
            assert error.elapsed_s is not None
            assert "broadcast" in error.history[0]
            facts = ("#4", "allreduce", "broadcast", "barrier", f"{self.deadline_s}")
            assert all(fact in str(error) for fact in facts), str(error)

    def test_waiting_with_a_timeout(self, pool: RankPool) -> None:
        self.need("can_lose_ranks", "blocks_host")
        found = pool.run(failures.wait_with_timeout, size=self.size)
        self.check_times(found, errors.CommunicationError, failures.SOON_S)
        assert isinstance(found[0][0], errors.CollectiveTimeoutError), repr(found[0][0]) + str(found[0][0])
        told = [error for error, _ in found[1:] if isinstance(error, errors.PeerLostError)]
        assert told, f"no rank lost a peer: {found}"
        assert any(0 in error.peers and "rank 0" in str(error) for error in told), told

    def test_abort_from_another_thread(self, pool: RankPool) -> None:
        self.need("can_lose_ranks")
        found = pool.run(failures.abort_from_thread, size=self.size)
        self.check_times(found, errors.CommunicationError, failures.SOON_S)
        for rank in {*range(self.size)} - {failures.CULPRIT}:
            error = found[rank].error
            assert isinstance(error, errors.PeerLostError if rank else errors.CommunicatorClosedError), f"{error!r}"
            assert "because of this test" in str(error), str(error)

    def test_errors_of_works(self, pool: RankPool) -> None:
        self.need("can_lose_ranks")
        outcomes = pool.outcomes(failures.lose_a_rank_asynchronously, self.deadline_s, size=self.size)
        self.survivors(outcomes, failures.CULPRIT)

    test_use_by_two_threads = _on_most_ranks(failures.use_from_two_threads, "can_lose_ranks")
    test_closing = _on_every_size(failures.close_twice)
    test_a_broken_communicator_leaves_others_alone = _on_most_ranks(failures.break_one_of_two, "keeps_apart")

    @pytest.mark.parametrize("disagreement", failures.DISAGREEMENTS)
    def test_ranks_that_disagree(self, pool: RankPool, disagreement: str) -> None:
        self.need("can_lose_ranks", "compares_calls")
        found = pool.run(failures.disagree, disagreement, size=self.size)
        for rank, (error, others) in enumerate(found):
            assert isinstance(error, errors.CollectiveMismatchError), f"rank {rank} got {error!r}"
            expected, seen = str(error.expected), str(error.seen)
            theirs = found[failures.CULPRIT if rank != failures.CULPRIT else 0][1]
            assert others in expected, f"rank {rank} does not know what it asked for: {error}"
            assert theirs in seen, f"rank {rank} does not name the other side: {error}"
            odd = {failures.CULPRIT} if rank != failures.CULPRIT else {*range(self.size)} - {rank}
            assert error.peers == tuple(odd), f"rank {rank} names others: {error}"

    @pytest.mark.parametrize("way", failures.WAYS_OF_PAIRS)
    def test_pairs_that_disagree(self, pool: RankPool, way: str) -> None:
        seen_at_once = way != "message_against_collective"
        messages = seen_at_once and way != "counts"
        self.need("can_lose_ranks", "compares_calls", *["compares_messages"] * messages)
        deadline_s = failures.CALM_S if seen_at_once else self.deadline_s
        found = pool.run(failures.disagree_in_pairs, way, deadline_s, size=self.size)
        receives, sends = found[0], found[failures.CULPRIT]
        kind = errors.CollectiveMismatchError if seen_at_once else errors.CommunicationError
        for error in (receives, sends):
            assert isinstance(error, kind), f"{error!r}"
        if way == "counts":
            assert "sends 4 elements to rank 0" in f"{receives} {sends}"
            assert "expects 3" in f"{receives} {sends}"
        elif seen_at_once:
            for error, own, other in ((receives, "recv(4 x float32", "send("), (sends, "send(", "recv(4 x float32")):
                assert own in str(error.expected), f"{error!r}"
                assert other in str(error.seen), f"{error!r}"

    test_objects_arrive = _on_every_size(records.send_objects)
    test_objects_without_a_safe_encoding_are_refused_everywhere = _on_every_size(records.send_unsafe_objects)
    test_pickle_is_used_when_all_ask_for_it = _on_every_size(records.send_pickled_objects)
    test_pickle_is_refused_by_a_rank_that_did_not_ask = _on_most_ranks(records.refuse_pickle, "can_lose_ranks")
    test_misplaced_objects_keep_nobody_waiting = _on_most_ranks(records.misplace_objects, "can_lose_ranks")
    test_empty_lists_of_tensors = _on_every_size(records.coalesce_nothing)
    test_counters = _on_every_size(records.count_calls)
    test_history_is_bounded_and_in_order = _on_every_size(records.fill_history)
    test_facts_about_the_communicator = _on_every_size(records.read_facts)

    def test_messages_from_any_rank(self, pool: RankPool) -> None:
        error = errors.InvalidRankError if self.receives_from_any else errors.TransportUnavailableError
        several = self.receives_from_any and self.can_lose_ranks
        test = (asynchronous.receive_every_kind,) if several else (asynchronous.be_refused, error)
        _on_every_size(*test)(self, pool)

    test_the_receive_that_was_started_first_gets_the_message = _on_most_ranks(asynchronous.receive_in_order, *_IN_ORDER)
    test_ranks_that_closed_are_not_missed = _on_most_ranks(asynchronous.outlive_those_who_closed, *_IN_ORDER)
    test_a_broken_communicator_ends_the_wait_for_any_rank = _on_most_ranks(asynchronous.wait_in_vain, *_IN_ORDER)

    def test_nobody_sends(self, pool: RankPool) -> None:
        self.need("receives_from_any", "can_lose_ranks")
        found = pool.run(asynchronous.wait_for_nobody, self.deadline_s, size=self.size)
        self.check_times(found[:1], errors.CollectiveTimeoutError, self.deadline_s + failures.GRACE_S)
