"""What the throw-away ranks of ``test_c10d_notices.py`` do. Prints one line per event."""

import os
import signal
import sys
import threading
import time

import torch

import bagua.comm
from tests.contract.exercises import communicator
from tests.contract.failures import say, wait_until_said

BIG = 20_000_000


def interrupted(comm: bagua.comm.Communicator) -> None:
    """Ctrl-C on the last rank, which waits in a collective; the others come later."""
    if comm.rank == comm.size - 1:
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        try:
            comm.allreduce(torch.ones(3))
        finally:
            say("interrupted")
    wait_until_said("interrupted", 1)
    comm.allreduce(torch.ones(3))


def leaves_with_calls_under_way(comm: bagua.comm.Communicator) -> None:
    """Rank 0 ends normally although a collective and a message of it never complete."""
    if comm.rank > 0:
        time.sleep(1.0)
        return
    comm.allreduce(torch.ones(BIG), async_op=True)
    comm.recv(torch.ones(3), comm.size - 1, async_op=True)


def late_writes(comm: bagua.comm.Communicator) -> None:
    """After a timeout the tensor belongs to the caller again."""
    tensor = torch.ones(BIG)
    if comm.rank == 0:
        try:
            comm.allreduce(tensor, timeout=0.5)
        finally:
            tensor.fill_(7)
            say("timed out")
            time.sleep(1.5)
            print("untouched", bool((tensor == 7).all()), flush=True)
    wait_until_said("timed out", 1)
    comm.allreduce(tensor)


def main(scenario: str) -> None:
    bagua.comm.init_process_group(backend="gloo", timeout=20.0)
    communicator().barrier()
    print("ready", flush=True)
    started = time.monotonic()
    try:
        globals()[scenario](communicator())
    except BaseException as error:
        print(f"{type(error).__name__} soon={time.monotonic() - started < 15.0} {error}", flush=True)
        raise SystemExit(3) from None


if __name__ == "__main__":
    main(sys.argv[1])
