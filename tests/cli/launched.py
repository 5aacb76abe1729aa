"""Functions that the tests of the launcher start in other processes."""

import os
import signal
import struct
import time
from typing import Any

import torch

from bagua import comm
from bagua.cli.lab.network import sent_bytes
from bagua.cli.launch import Rank
from bagua.errors import CollectiveTimeoutError, PeerLostError


def report_and_return(rank: Rank, factor: int) -> int:
    rank.report(("hello", rank.rank))
    return rank.rank * factor


def sum_on_a_host(rank: Rank, numel: int) -> tuple[float, int]:
    rank.join("gloo", 60.0)
    before, tensor = sent_bytes(), torch.full((numel,), rank.rank + 1.0)
    comm.allreduce(tensor)
    comm.barrier()
    sent = sent_bytes() - before
    comm.destroy_process_group()
    return float(tensor[-1]), sent


def rank_one_raises(rank: Rank) -> None:
    if rank.rank == 1:
        raise CollectiveTimeoutError("too slow", rank=1, timeout_s=2.5)
    time.sleep(60)


def rank_one_dies_and_the_other_notices(rank: Rank) -> None:
    if rank.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    raise PeerLostError("a rank is gone", rank=0, peers=(1,))


def die_in_the_middle_of_a_message(rank: Rank) -> None:
    report: Any = rank.report
    os.write(report.__self__._connection.fileno(), struct.pack("!i", 1000) + b"only this")
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long(rank: Rank) -> None:
    rank.report(os.getpid())
    time.sleep(60)
