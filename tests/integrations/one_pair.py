"""What two ranks do that do the jobs of all tests of a module: the fixture ``pair`` starts them."""

import itertools
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import bagua.comm
from bagua.comm.store.serving import connect_store
from bagua.testing import this_rank


def do_jobs(port: int, begin: Callable[[], None]) -> None:
    """Begin; then report what each function returns that is in the store as a job, until one is None."""
    begin()
    store, rank = connect_store(port, 600.0), this_rank.get()
    for number in itertools.count():
        job = pickle.loads(store.get(f"job {number}"))
        if job is None:
            return
        try:
            rank.report({rank.rank: job()})
        except BaseException:
            store.set(f"job {number + 1}", pickle.dumps(None))  # The other rank does not wait for more.
            raise


def of_all_ranks(value: Any) -> list[Any]:
    """The values of all ranks, on each of them."""
    return bagua.comm.get_default_group().global_communicator.allgather_object(value)


def as_torchrun_starts_it() -> None:
    """What Accelerate looks for before it finds that torch.distributed is initialized already."""
    rank = str(bagua.comm.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    warnings.simplefilter("ignore")
