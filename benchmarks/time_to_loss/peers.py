"""What others offer for training with less communication, each with the recipe of its documentation.

A function takes a model, its optimizer and options, and returns what :mod:`benchmarks.network.contenders` calls
``Prepared``. Packages are imported when they are asked for: each is an extra of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from benchmarks.network.contenders import Follower, Prepared

__all__ = [
    "accelerate",
    "decent_dp",
    "expand",
    "hivemind",
    "plain",
    "post_local_sgd",
    "torchft_diloco",
    "torchft_local_sgd",
]

#: Seconds that torchft and hivemind wait for others: a step of the slowest link takes less.
PATIENCE_S = 120.0


def expand(contender: str) -> str:
    """The full name of a contender that is a function of this module; any other as it is."""
    return f"{__name__}:{contender}" if contender.partition(":")[0] in _NAMES else contender


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """Each rank by itself."""
    return Prepared(model, optimizer)


def post_local_sgd(
    model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int = 4, start_after: int = 100
) -> Prepared:
    """Torch's PostLocalSGDOptimizer does so after each step: full gradients first, and means of weights then."""
    alone, _ = torch.distributed.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    wrapped = nn.parallel.DistributedDataParallel(model)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=start_after)  # type: ignore[no-untyped-call]
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=sync_every, warmup_steps=start_after)
    optimizer.register_step_post_hook(lambda stepped, *_: averager.average_parameters(stepped.param_groups))
    return Prepared(wrapped, optimizer)


def accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int = 8) -> Prepared:
    """Accelerate's LocalSGD: a mean of the weights every so often."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}")
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    wrapped = accelerator.prepare_model(model)
    local = importlib.import_module("accelerate.local_sgd").LocalSGD(accelerator, wrapped, sync_every)
    local.__enter__()
    optimizer.register_step_post_hook(lambda *_: local.step())
    return Prepared(wrapped, optimizer, finish=lambda: local.__exit__(None, None, None))


def decent_dp(model: nn.Module, optimizer: torch.optim.Optimizer, topology: str = "complete") -> Prepared:
    """The package decent-dp: means with one other rank, which steps in the backward pass."""
    importlib.import_module("loguru").logger.disable("decent_dp")
    wrapper = importlib.import_module("decent_dp.ddp").DecentralizedDataParallel
    follower = Follower(optimizer)
    wrapped: Any = wrapper(model, follower.make, topology=topology, _local_world_size=1)
    return Prepared(wrapped, follower)


def torchft_local_sgd(model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int = 8) -> Prepared:
    """Torchft's LocalSGD, each rank a replica."""
    manager, closed = torchft_manager(model, optimizer)
    local = importlib.import_module("torchft.local_sgd").LocalSGD(manager, model, optimizer, sync_every)
    local.__enter__()
    return Prepared(model, optimizer, finish=closed)


def torchft_diloco(
    model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int = 20, lr: float = 0.7, momentum: float = 0.9
) -> Prepared:
    """Torchft's DiLoCo, with the outer optimizer of the paper."""
    manager, closed = torchft_manager(model, optimizer)
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
    local = importlib.import_module("torchft.local_sgd").DiLoCo(
        manager, [model], optimizer, outer, sync_every, pin_memory=False
    )
    local.__enter__()
    return Prepared(model, optimizer, finish=closed)


def torchft_manager(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """A manager of this rank, which rank 0 keeps a lighthouse for; and what ends both."""
    rank, size, here = torch.distributed.get_rank(), torch.distributed.get_world_size(), own_address()
    lighthouse = None
    if rank == 0:
        served = importlib.import_module("torchft.coordination").LighthouseServer
        lighthouse = served(bind=f"{here}:0", min_replicas=size, join_timeout_ms=60_000)
    socket.gethostname = lambda: here  # Its states are served under this name, which all hosts of the lab share.
    where = said_by_first(f"http://{here}:{lighthouse.address().rpartition(':')[2]}" if lighthouse else "")
    store = torch.distributed.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=PATIENCE_S)
    torchft = importlib.import_module("torchft")
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=patience),
        min_replica_size=size,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), optimizer.load_state_dict(state["own"])),
        state_dict=lambda: {"model": model.state_dict(), "own": optimizer.state_dict()},
        use_async_quorum=False,
        replica_id=f"replica_{rank}",
        lighthouse_addr=where,
        store_addr=here,
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=patience,
        quorum_timeout=patience,
        connect_timeout=patience,
        hostname=here,
    )

    served_here = (lighthouse, store)  # Both end with their last reference.

    def close() -> None:
        torch.distributed.barrier()
        manager.shutdown(wait=False)
        torch.distributed.barrier()
        if served_here[0] is not None:
            served_here[0].shutdown()

    return manager, close


def hivemind(
    model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int = 20, bits: int = 16, wait: float = 3.0
) -> Prepared:
    """Hivemind's Optimizer with local updates, and means of weights in 16 or 8 bits."""
    package, compression = importlib.import_module("hivemind"), importlib.import_module("hivemind.compression")
    multiprocessing.current_process().daemon = False  # Its network is a process, and a daemon may start none.
    multiprocessing.set_start_method("fork", force=True)  # It has locks, which go nowhere otherwise.
    kind = compression.Float16Compression if bits == 16 else compression.Uniform8BitQuantization
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    maddrs = [f"/ip4/{own_address()}/tcp/0"]
    dht = package.DHT(host_maddrs=maddrs, start=True) if rank == 0 else None
    first = said_by_first(str(dht.get_visible_maddrs()[0]) if dht is not None else "")
    dht = dht or package.DHT(host_maddrs=maddrs, initial_peers=[first], start=True)
    opt = package.Optimizer(
        dht=dht,
        run_id="time_to_loss",
        target_batch_size=sync_every * size,
        batch_size_per_step=1,
        optimizer=optimizer,
        params=list(model.parameters()),
        use_local_updates=True,
        delay_state_averaging=False,
        matchmaking_time=wait,
        averager_opts={"request_timeout": wait / 3},  # Shorter than the search, or peers block each other.
        averaging_timeout=PATIENCE_S / 6,  # Now and then ranks find no group, and go on without.
        state_averaging_compression=kind(),
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2},
    )

    def close() -> None:
        torch.distributed.barrier()
        opt.shutdown()
        dht.shutdown()

    return Prepared(model, opt, finish=close)


def own_address() -> str:
    """The address at which other hosts reach this one."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asked:
        try:
            asked.connect(("10.77.0.254", 9))  # of the lab; nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(asked.getsockname()[0])


def said_by_first(text: str) -> str:
    """What rank 0 says."""
    said = [text]
    torch.distributed.broadcast_object_list(said, 0)
    return said[0]


_NAMES = frozenset(__all__) - {"expand"}
