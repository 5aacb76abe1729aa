"""What the throw-away ranks of ``test_c10d_processes.py`` do. Prints one line per event."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from bagua.comm.communicator import Communicator
from bagua.comm.store.serving import connect_store
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from tests.comm.memory_ranks import membership

BIG = 20_000_000


def kill_soon(number: int, delay_s: float = 0.2) -> None:
    threading.Timer(delay_s, os.kill, [os.getpid(), number]).start()


def killed_in_the_middle(comm: Communicator) -> None:
    """The last rank dies while megabytes are on the way."""
    if comm.rank == comm.size - 1:
        kill_soon(signal.SIGKILL)
    tensor = torch.ones(BIG)
    while True:
        comm.allreduce(tensor)
        tensor.fill_(1)


def store_host_killed(comm: Communicator) -> None:
    """Rank 0, which hosts the store, dies when all others wait for it."""
    if comm.rank == 0:
        kill_soon(signal.SIGKILL)
        time.sleep(60)
    comm.barrier()


def interrupted(comm: Communicator, store: Store) -> None:
    """Ctrl-C on the last rank, which waits in a collective; the others come later."""
    if comm.rank == comm.size - 1:
        kill_soon(signal.SIGINT)
        try:
            comm.allreduce(torch.ones(3))
        finally:
            store.set("interrupted", "")
    store.wait(["interrupted"])
    comm.allreduce(torch.ones(3))


def leaves_with_calls_under_way(comm: Communicator) -> None:
    """Rank 0 ends normally although a collective and a message of it never complete."""
    if comm.rank > 0:
        time.sleep(1.0)
        return
    comm.allreduce(torch.ones(BIG), async_op=True)
    comm.recv(torch.ones(3), comm.size - 1, async_op=True)


def late_writes(comm: Communicator, store: Store) -> None:
    """After a timeout the tensor belongs to the caller again."""
    tensor = torch.ones(BIG)
    if comm.rank == 0:
        try:
            comm.allreduce(tensor, timeout=0.5)
        finally:
            tensor.fill_(7)
            store.set("timed out", "")
            time.sleep(1.5)
            print("untouched", bool((tensor == 7).all()), flush=True)
    store.wait(["timed out"])
    comm.allreduce(tensor)


def main(scenario: str) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = connect_store(int(os.environ["MASTER_PORT"]), 20.0)
    if scenario == "store_host_killed":
        if rank == 0:
            hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("hosted", str(hosted.port))
        inner_port = int(store.get("hosted"))
        if rank > 0:
            hosted = TCPStore("127.0.0.1", inner_port, is_master=False, timeout=timedelta(seconds=20))
        store = hosted
    comm = Communicator(C10dTransport("gloo", membership(PrefixStore("test", store), rank, size)), 20.0)
    comm.barrier()
    print("ready", flush=True)
    started = time.monotonic()
    try:
        function = globals()[scenario]
        function(*(comm, PrefixStore("scenario", store))[: len(inspect.signature(function).parameters)])
    except BaseException as error:
        waited_s = time.monotonic() - started
        peers = getattr(error, "peers", None)
        print(f"{type(error).__name__} peers={peers} soon={waited_s < 15.0} {error}", flush=True)
        raise SystemExit(3) from None


if __name__ == "__main__":
    main(sys.argv[1])
