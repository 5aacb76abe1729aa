"""Programs whose ranks fork. Run by ``test_forks.py``, which looks at how parents and children end.

Children run one of the first functions. Each says a word, and goes on to its end from there.
"""

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import bagua.comm
from bagua.algorithms import AsyncModelAverageAlgorithm, GradientAllReduceAlgorithm
from bagua.comm.startup.default_group import holder
from bagua.errors import CommunicationError, CommunicatorClosedError
from bagua.parallel.module import with_bagua
from tests.harness import in_threads

works: list[bagua.comm.Work] = []
model = torch.nn.Linear(3, 1)


def refused(call: Callable[[], object]) -> bool:
    """Whether ``call`` says that this process was forked."""
    try:
        call()
    except CommunicatorClosedError as error:
        return "forked" in str(error)
    return False


def end_of_script() -> None:
    """Nothing at all."""


def left_by_an_error() -> None:
    raise LookupError("the child's own error")


def left_at_once() -> None:
    sys.stdout.flush()
    os._exit(0)


def destroyed() -> None:
    bagua.comm.destroy_process_group()
    print("initialized", bagua.comm.is_initialized(), dist.is_initialized(), flush=True)


def began_anew() -> None:
    bagua.comm.destroy_process_group()
    bagua.comm.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    print("alone", bagua.comm.get_world_size(), flush=True)
    bagua.comm.destroy_process_group()


def collected() -> None:
    holder.process_world = None
    works.clear()
    gc.collect()


def forked_again() -> None:
    fork(refusals)


def refusals() -> None:
    """Whatever would meet other ranks."""
    group = bagua.comm.get_default_group()
    comm = group.global_communicator
    own = comm.empty(80_000, dtype=torch.float32).fill_(1.0)
    assert bool((own == 1.0).all())
    asked = [
        lambda: comm.allreduce(torch.ones(3)), lambda: comm.allreduce(own), lambda: comm.broadcast_object("x"),
        lambda: comm.send(torch.ones(3), 1 - comm.rank), lambda: comm.allreduce(torch.ones(3), async_op=True),
        works[0].wait, works[0].result, lambda: works[0].get_future().wait(),
        group.duplicate, lambda: group.connect([0, 1], "more", timeout_s=1.0), lambda: bagua.comm.new_group([0]),
    ]  # fmt: skip
    told = sum(refused(call) for call in asked)
    ended, error = works[0].is_completed(), type(works[0].exception()).__name__
    print(f"refused {told} of {len(asked)}, asked {ended} {error}", flush=True)
    comm.abort("by the child")
    group.abort("by the child")
    group.close()


def trained() -> None:
    """Another backward pass on a model of the parent's."""
    print(f"refused {sum(refused(lambda: train_step(model)) for _ in range(2))} of 2", flush=True)


def fork(child: Callable[[], None]) -> int:
    """Fork; the child runs ``child`` and ends as any script does. Its exit status."""
    pid = os.fork()
    if pid == 0:
        child()
        if threading.main_thread().name != "MainThread":  # It would end in torch's hands, not in Python's.
            atexit._run_exitfuncs()
            os._exit(0)
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork_and_go_on(child: str) -> None:
    """Rank 0 forks while a collective and a message are under way; both complete after the child has ended."""
    group = bagua.comm.get_default_group()
    comm, store = group.global_communicator, group.store
    tensor, message = torch.full((100_000,), 1.0), torch.zeros(1)
    if comm.rank == 0:
        works.extend([comm.allreduce(tensor, async_op=True), comm.recv(message, 1, async_op=True)])
        name, _, thread = child.partition("@")  # Perhaps in another thread than the main one.
        status = in_threads(1, lambda _: fork(globals()[name]))[0] if thread else fork(globals()[name])
        store.set(child, "")
    else:
        store.wait([child])
        works.extend([comm.allreduce(tensor, async_op=True), comm.send(message + 5, 0, async_op=True)])
    for work in works:
        work.wait()
    works.clear()
    comm.allreduce(tensor)
    if comm.rank == 0:
        print(f"{child} {status}, parent {tensor[0].item()} {message.item()}", flush=True)


def train_step(model: torch.nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def average(steps: int = 60) -> None:
    """Rank 0 forks in the middle of asynchronous averaging, and both ranks end together."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with_bagua(model, [optimizer], AsyncModelAverageAlgorithm(warmup_steps=0, sync_interval_ms=1))

    def child() -> None:
        train_step(model)
        print("refused", refused(lambda: model.bagua_algorithm.abort(model)), flush=True)
        gc.collect()

    for step in range(steps):
        train_step(model)
        optimizer.step()
        time.sleep(0.002)
        if step == steps // 2 and bagua.comm.get_rank() == 0:
            print("status", fork(child), flush=True)
    model.bagua_algorithm.abort(model)
    sums = (model.weight.sum() + model.bias.sum()) * torch.tensor([1.0, -1.0])
    bagua.comm.get_default_group().global_communicator.allreduce(sums, bagua.comm.ReduceOp.MAX)
    print("parents together", bool(sums.sum() == 0), flush=True)


def leave_an_heir(how: str) -> None:
    """Rank 1 dies, or becomes another program, and a child of it lives on."""
    comm = bagua.comm.get_default_group().global_communicator
    if comm.rank == 1:
        if os.fork() == 0:
            sys.stdin.read()  # Until the test has ended.
            os._exit(0)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"])
    try:
        comm.allreduce(torch.ones(4))
    except CommunicationError as error:
        print(type(error).__name__, error.peers, flush=True)


def main(backend: str, job: str, *arguments: str) -> None:
    bagua.comm.init_process_group(backend=backend, timeout=40.0)
    bagua.comm.get_default_group().global_communicator.allreduce(torch.ones(4))
    if job == "children":
        with_bagua(model, [torch.optim.SGD(model.parameters(), lr=0.0)], GradientAllReduceAlgorithm())
        for _ in range(2):  # Forms the buckets.
            train_step(model)
        for child in arguments:
            fork_and_go_on(child)
    elif job == "averaging":
        average()
    else:
        leave_an_heir(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
