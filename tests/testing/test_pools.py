"""A pool returns what ranks return, says how they fail, names who hangs, and leaves nothing behind."""

import os
import re
import sys
import threading
import time
from pathlib import Path
from types import NoneType

import pytest
import torch

import bagua.comm
from bagua.comm.transports.threads import RankKilled
from bagua.errors import ConfigurationError, InvalidTensorError, PeerLostError
from bagua.testing import ProcessRanks, RankDiedError, RankHangsError, ThreadRanks, die, fall_silent
from bagua.testing.ranks import this_rank

# These tests are about the pools alone: the ranks do not communicate.
POOLS = {"threads": lambda: ThreadRanks(4, backend=None), "processes": lambda: ProcessRanks(4, backend=None)}


@pytest.fixture(params=sorted(POOLS))
def pool(request):
    return POOLS[request.param]()


def own_rank() -> int:
    return this_rank.get().rank


def fail_with_peer_lost_but_one():
    if own_rank() == 2:
        raise InvalidTensorError("the cause", argument="tensor", expected=1, seen=2)
    raise PeerLostError("a peer is gone", rank=own_rank(), peers=(2,))


class UnpicklableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail_unpicklable():
    raise UnpicklableError(1, 2)


def rank_one(does, *arguments):
    if own_rank() == 1:
        does(*arguments)
    return os.getpid()


def sleep_in_a_recognizable_place(seconds):
    time.sleep(seconds)


def report_process_id(path):
    (path / str(own_rank())).write_text(str(os.getpid()))
    time.sleep(90 if own_rank() == 0 else 0)


def test_the_cause_is_raised_and_not_its_consequences(pool):
    with pytest.raises(InvalidTensorError) as caught:
        pool.run(fail_with_peer_lost_but_one)
    assert caught.value.argument == "tensor"
    if sys.version_info >= (3, 11):
        (note,) = caught.value.__notes__
        assert note.startswith("rank 2 failed")
        assert "fail_with_peer_lost" in note
        assert "rank 3: PeerLost" in note


def test_outcomes_say_how_each_rank_ended(pool):
    outcomes = pool.outcomes(rank_one, die, size=3)
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2]
    assert [type(outcome.error) for outcome in outcomes] == [NoneType, RankDiedError, NoneType]
    with pytest.raises(RankDiedError, match="rank 1"):
        pool.run(rank_one, die, size=2)


def test_a_silent_rank_delays_nobody_and_is_gone_afterwards(pool):
    outcomes = pool.outcomes(rank_one, fall_silent, size=2, deadline_s=3600)  # More than a test may take.
    assert [type(outcome.error) for outcome in outcomes] == [NoneType, RankHangsError]
    assert Path(f"/proc/{outcomes[0].value}").exists() == (outcomes[0].value == os.getpid())


def test_a_rank_that_hangs_is_named_with_its_stack(pool):
    for deadline_s in (0.5, 30.0):  # On a busy machine the rank has not come so far when the first passes.
        with pytest.raises(RankHangsError) as caught:
            pool.run(rank_one, sleep_in_a_recognizable_place, 2 * deadline_s + 1, size=2, deadline_s=deadline_s)
        said = str(caught.value)
        if "sleep_in_a_recognizable_place" in said:
            break
    assert re.search(r"(?s)rank 1 was still busy.*sleep_in_a_recognizable_place", said)


@pytest.mark.parametrize(
    ("ranks", "refusal"),
    [*(({"hosts": hosts}, "cannot run so many") for hosts in ([2, 3], [5])), ({"size": 3, "hosts": [1, 1]}, "hosts")],
    ids=str,
)
def test_ranks_that_the_pool_cannot_have_are_refused(pool, ranks, refusal):
    with pytest.raises(ConfigurationError, match=refusal):
        pool.run(own_rank, **ranks)


def test_processes_of_a_run_that_hangs_are_gone_afterwards(tmp_path):
    for deadline_s in (1.0, 30.0):  # On a busy machine a process has not come so far when the first passes.
        with pytest.raises(RankHangsError, match="rank 0"):
            POOLS["processes"]().run(report_process_id, tmp_path, size=2, deadline_s=deadline_s)
        process_ids = [text for file in tmp_path.iterdir() if (text := file.read_text())]
        if len(process_ids) == 2:
            break
    assert [Path("/proc", process_id).exists() for process_id in process_ids] == [False] * 2


def test_an_error_that_does_not_survive_pickling_arrives_as_text_and_a_function_is_refused():
    with pytest.raises(RuntimeError, match="1 and 2"):
        POOLS["processes"]().run(fail_unpicklable, size=1)
    with pytest.raises(ConfigurationError, match="top level"):
        POOLS["processes"]().run(lambda: None, size=1)


def has_module(name):
    return name in sys.modules


def test_processes_import_the_given_modules_first():
    assert ProcessRanks(1, backend=None).run(has_module, "tabnanny") == [False]
    assert ProcessRanks(1, backend=None, modules=["tabnanny"]).run(has_module, "colorsys") == [True]
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        ProcessRanks(1, backend=None, modules=["no_such_module"]).run(has_module, "tabnanny")


def reduce_once():
    tensor = torch.ones(3)
    bagua.comm.allreduce(tensor)
    return tensor.tolist()


def reduce_in_the_background():
    for work in [bagua.comm.allreduce(torch.ones(1000), async_op=True) for _ in range(3)]:
        work.wait()


@pytest.mark.threads
@pytest.mark.parametrize("job", [(reduce_in_the_background,), (rank_one, die)], ids=["background", "death"])
def test_thread_ranks_leave_no_thread(job):
    before = set(threading.enumerate())
    ThreadRanks(3).outcomes(*job)
    assert not {thread for thread in threading.enumerate() if thread.is_alive()} - before


@pytest.mark.threads
def test_a_fault_hook_kills_a_thread_rank_where_it_wants():
    steps = []

    def kill_rank_two_on_arrival(step):
        steps.append((step.rank, step.name))
        if step.rank == 2 and step.name == "arrive":
            raise RankKilled

    outcomes = ThreadRanks(3, fault=kill_rank_two_on_arrival).outcomes(reduce_once)
    assert [type(outcome.error) for outcome in outcomes] == [PeerLostError, PeerLostError, RankDiedError]
    assert (2, "publish") in steps
    assert ThreadRanks(3).run(reduce_once) == [[3.0] * 3] * 3
