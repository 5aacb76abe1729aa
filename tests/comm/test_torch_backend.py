"""The backend ``bagua`` of ``torch.distributed``: how it is found, what torch builds on it, hooks around its calls."""

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import bagua.torch_api
from bagua import errors
from bagua.comm import connect_store, create_torch_group, torch_private
from bagua.comm.torch_backend.group import TorchGroup
from bagua.comm.torch_backend.work import PlainFutures
from bagua.testing import ProcessRanks, RankDiedError
from tests.comm import torch_backend_ranks as ranks
from tests.harness import in_threads, on_ranks
from tests.launching import PATIENCE_S, REPOSITORY, ends, environment, finished, free_port, launched
from tests.versions import TORCH, needs

SIZE = 3  # Ranks that are threads.
pool = pytest.fixture(lambda: ProcessRanks(4, backend=None), scope="module")


@pytest.mark.shm
@pytest.mark.parametrize("job", [ranks.collectives, ranks.callbacks], ids=lambda job: job.__name__)
@pytest.mark.parametrize(("nodes", "transport"), [((0, 0), "shm"), ((0, 1), "gloo"), ((0, 0, 1), "hybrid")])
def test_calls_of_torch_on_each_transport(
    pool: ProcessRanks, port: int, nodes: tuple[int, ...], transport: str, job: Callable[..., None]
) -> None:
    pool.run(job, port, nodes, transport, size=len(nodes))


@pytest.mark.shm
@pytest.mark.parametrize(
    ("job", "size"),
    [
        (ranks.as_launched, 2),
        pytest.param(ranks.all_forms, 2, marks=needs("the forms of arguments of torch 2.13", TORCH >= (2, 13))),
        (ranks.compiled, 2),
        (ranks.meshes, 4),
        (ranks.reconfigured, 3),
        pytest.param(ranks.reconfigured_by_torch, 2, marks=needs("_reconfigure", hasattr(dist, "_reconfigure"))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_torch_builds_on_a_backend(pool: ProcessRanks, port: int, job: Callable[..., None], size: int) -> None:
    pool.run(job, port, size=size)


@pytest.mark.shm
def test_survivors_of_a_killed_rank_name_it(pool: ProcessRanks, port: int) -> None:
    *survivors, lost = pool.outcomes(ranks.lose_a_rank, port, 3, size=3)
    assert isinstance(lost.error, RankDiedError)
    for survivor in survivors:
        assert survivor.error is None, survivor.trace


@pytest.mark.shm
@on_ranks(1, pool="pool")
def test_a_backend_that_torch_would_drop_is_refused() -> None:
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    for names in ("cpu:bagua,cuda:nccl", "cpu:gloo,cuda:bagua", "cuda:gloo,cpu:bagua"):
        with pytest.raises(errors.ConfigurationError, check=lambda error: error.argument == "backend"):
            dist.init_process_group(names, **alone)
        assert not dist.is_initialized()
    for name in ("cpu:bagua", "bagua"):
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()


@pytest.mark.shm
def test_processes_end_well_whatever_they_leave_open() -> None:
    """Each rank ends in another way: nothing is destroyed, or all of it, in an odd order."""
    python = (sys.executable, "-W", "error")
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # Torch warns of the call that nobody waits for.
    with launched(2, "-m", "tests.comm.torch_backend_exits", python=python, **quiet) as ranks:
        assert ends(ranks) == [(0, "at the end\n")] * 2


def on_threads(port: int, function: Callable[[list[Any], int], Any]) -> list[Any]:
    """``function([group], rank)`` in three threads, each with a group of torch of its own."""

    def rank_of(rank: int) -> Any:
        request = torch_private.backend_request()
        request.store = dist.PrefixStore("threads", connect_store(port, 20.0))
        request.group_rank, request.group_size, request.timeout = rank, SIZE, timedelta(seconds=20)
        request.group_id, request.global_ranks_in_group = "threads", list(range(SIZE))
        return function([torch_private.plugins()["BAGUA"].creator_fn(request, None)], rank)

    return in_threads(SIZE, rank_of)


@pytest.mark.shm
def test_peers_learn_of_a_group_that_was_dropped(port: int) -> None:
    ready = threading.Barrier(SIZE, timeout=60)

    def drop_one(groups: list[Any], rank: int) -> None:
        groups[0].allreduce(torch.ones(1)).wait()
        ready.wait()
        if rank == SIZE - 1:
            seen = weakref.ref(groups[0])
            groups.clear()
            gc.collect()
            assert seen() is None
            return
        with pytest.raises(errors.PeerLostError, check=lambda error: error.peers == (SIZE - 1,)):
            groups[0].allreduce(torch.ones(1)).wait(timedelta(seconds=10))
        groups[0].shutdown()

    on_threads(port, drop_one)


@pytest.mark.shm
def test_groups_without_a_default_group_and_with_plain_futures(port: int) -> None:
    """What software asks for that makes its groups itself, as torchft does."""
    options = bagua.torch_api.TorchBackendOptions(ordered_callbacks=False)

    def talk(rank: int) -> list[Any]:
        own = dist.PrefixStore("own", connect_store(port, 20.0))
        group = create_torch_group(own, rank, 2, 20.0, name="own", options=options)
        asynchronous = dist.AllreduceOptions()
        asynchronous.asyncOp = True
        early = group.allreduce([torch.ones(2)], asynchronous).get_future()
        work = group.allreduce([torch.ones(3)], asynchronous)
        work.wait()
        ran_in: list[int] = []
        work.get_future().then(lambda _: ran_in.append(threading.get_ident()))
        at_once = ran_in == [threading.get_ident()]
        group.shutdown()
        with pytest.raises(errors.CommunicatorClosedError):
            group.allreduce([torch.ones(1)]).wait()
        return [early.wait()[0].tolist(), work.result()[0].tolist(), at_once, group.rank(), group.size()]

    assert in_threads(2, talk) == [[[2.0] * 2, [2.0] * 3, True, rank, 2] for rank in range(2)]


@pytest.mark.shm
def test_a_plain_future_hands_on_what_went_wrong() -> None:
    future = PlainFutures().future(None, Mock(side_effect=errors.PeerLostError("rank 1 is gone")))
    with pytest.raises(errors.PeerLostError, match="rank 1"):
        future.wait()


MEET = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("bagua"{arguments})
dist.all_reduce(total := torch.ones(1))
assert total == dist.get_world_size(), total
assert dist.get_backend() == "bagua"
dist.destroy_process_group()
"""
ALONE = MEET.format(arguments=", store=dist.HashStore(), rank=0, world_size=1")


@pytest.mark.solo
def test_what_is_registered_costs_little_imports_the_rest_later_and_refuses_a_string_of_backends() -> None:
    program = f"""
import torch.distributed as dist, sys
from bagua.plugin import register
register()
assert dist.is_backend_available("bagua")
assert "bagua.comm" not in sys.modules
try:
    dist.init_process_group("cpu:bagua,meta:gloo", store=dist.HashStore(), rank=0, world_size=1)
except ValueError as error:
    assert "would silently not build meta:gloo beside bagua" in str(error), error
else:
    raise AssertionError("a string of backends was taken")
{ALONE}
assert "bagua.comm" in sys.modules
import bagua.torch_api
"""
    result = finished(sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr


@pytest.mark.solo
def test_what_is_wrong_is_said_when_a_group_is_asked_for() -> None:
    program = f"""
import sys
sys.modules["bagua.comm"] = None
from bagua.plugin import register
register()
import torch.distributed as dist
assert dist.is_backend_available("bagua")
{ALONE}
"""
    assert "import of bagua.comm halted" in finished(sys.executable, "-c", program).stderr


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A path with what an installation says of its entry points."""
    folder = tmp_path / "bagua_torch-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: bagua-torch\nVersion: 0\n")
    found = (REPOSITORY / "pyproject.toml").read_text().partition('entry-points."torch.distributed.backends"]\n')[2]
    entry = found.partition("\n")[0].replace('"', "")
    (folder / "entry_points.txt").write_text(f"[torch.distributed.backends]\n{entry}\n")
    return f"{tmp_path}:{REPOSITORY}"


@pytest.mark.solo
@needs("entry points of backends", TORCH >= (2, 14))
@pytest.mark.parametrize(
    ("launcher", "program"),
    [
        pytest.param((), ALONE, id="python"),
        pytest.param(("-m", "torch.distributed.run"), MEET.format(arguments=""), id="torchrun", marks=pytest.mark.shm),
    ],
)
def test_torch_finds_the_name(installed: str, tmp_path: Path, launcher: tuple[str, ...], program: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(program)
    options = ("--nproc-per-node=2", f"--master-port={free_port()}") if launcher else ()
    command, told = [sys.executable, *launcher, *options, str(script)], environment(PYTHONPATH=installed)
    result = subprocess.run(command, capture_output=True, text=True, env=told, timeout=PATIENCE_S, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def group() -> Iterator[TorchGroup]:
    made = create_torch_group(dist.HashStore(), 0, 1, timedelta(seconds=20))
    made._set_group_name("watched")
    yield made
    made.shutdown()


def hooks(test: Callable[..., None]) -> Callable[..., None]:
    """A test of hooks around calls."""
    return pytest.mark.shm(needs("hooks around calls", hasattr(dist.ProcessGroup, "register_pre_hook"))(test))


class Seen:
    """What the hooks of one group are told."""

    def __init__(self, group: Any) -> None:
        self.before: list[Any] = []
        self.after: list[Any] = []
        self.aborted = threading.Event()
        group.register_pre_hook(1, lambda told: self.before.append((told.name.name, told.op_id, told.root)))
        group.register_post_hook(2, lambda told: self.after.append((told.name.name, told.op_id)))
        group.register_abort_hook(3, self.aborted.set)

    def names(self) -> list[str]:
        assert [told[:2] for told in self.before] == self.after
        return [name for name, _ in self.after]


@hooks
def test_each_call_is_told_before_and_after(group: TorchGroup) -> None:
    seen, one, two = Seen(group), torch.ones(2), torch.zeros(2)
    work = group.allreduce([one], dist.AllreduceOptions())
    assert work.result()[0] is one, "it is our work, not what C++ made of it"
    group.allreduce(one, op=dist.ReduceOp.MAX).wait()
    group.broadcast(one, root=0).wait()
    group.allgather([[two]], [one]).wait()
    group.all_gather_single(two, one).wait()
    group.reduce_scatter([two], [[one]]).wait()
    group.all_to_all_single(two, one, [], []).wait()
    group.gather([[two]], [one]).wait()
    group.scatter([two], [[one]]).wait()
    group.reduce(one, 0).wait()
    group.alltoall([two], [one]).wait()
    group.allreduce_coalesced([one, two]).wait()
    group.barrier().wait()
    # Torch 2.14 tells of some forms as of others.
    told = [name.removesuffix("_BASE").removesuffix("_COALESCED") for name in seen.names()]
    assert told == [
        *("ALLREDUCE", "ALLREDUCE", "BROADCAST", "ALLGATHER", "ALLGATHER", "REDUCE_SCATTER", "ALLTOALL"),
        *("GATHER", "SCATTER", "REDUCE", "ALLTOALL", "ALLREDUCE", "BARRIER"),
    ]
    assert seen.before[2][2] == 0
    assert one.tolist() == two.tolist() == [1.0, 1.0]
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    group.allreduce(one).wait()
    assert len(seen.after) == 13
    assert not seen.aborted.is_set()


@hooks
def test_calls_without_tensors_are_made_without_hooks(group: TorchGroup) -> None:
    Seen(group)
    group.all_gather_single_coalesced([], []).wait()


@hooks
@pytest.mark.parametrize("register", ["register_pre_hook", "register_post_hook"])
def test_what_a_hook_raises_reaches_the_caller(group: TorchGroup, register: str) -> None:
    Seen(group)
    getattr(group, register)(9, Mock(side_effect=ValueError("the hook says no")))
    for call in (lambda: group.allreduce(torch.ones(2)), group.barrier, lambda: group.send([torch.ones(1)], 0, 0)):
        with pytest.raises(ValueError, match="the hook says no"):
            call()


@hooks
def test_errors_are_those_of_the_call(group: TorchGroup) -> None:
    seen = Seen(group)
    with pytest.raises(errors.InvalidTensorError):
        group.gather([[], []], [torch.ones(1)])
    group.abort()
    assert seen.aborted.is_set()
    with pytest.raises(errors.CommunicatorClosedError):
        group.allreduce(torch.ones(1))


@hooks
def test_messages_and_calls_between_ranks(port: int) -> None:
    done = threading.Barrier(3, timeout=60)

    def calls(groups: list[Any], rank: int) -> str:
        group = groups[0]
        seen = Seen(group)
        group.allreduce(total := torch.ones(1)).wait()
        assert total.item() == 3
        if rank == 0:
            group.send([torch.ones(1)], 1, 0).wait()
        if rank == 1:
            group.recv([torch.empty(1)], 0, 0).wait()
        group.barrier().wait()
        if rank == 2:
            with pytest.raises(errors.CollectiveTimeoutError):
                group.allreduce([torch.ones(1)], timeout=timedelta(seconds=0.2)).wait()
            assert seen.aborted.wait(20)
        told = " ".join(seen.names())
        done.wait()
        group.shutdown()
        return told

    expected = ["ALLREDUCE SEND BARRIER", "ALLREDUCE RECV BARRIER", "ALLREDUCE BARRIER ALLREDUCE"]
    assert on_threads(port, calls) == expected


@hooks
def test_torch_asks_the_backend_what_it_can(group: TorchGroup) -> None:
    backend = group._get_backend(torch.device("cpu"))
    for name in dir(c10d.Backend):
        if "supports_" in name and isinstance(getattr(c10d.Backend, name), property):
            assert isinstance(getattr(backend, name), bool), name
    assert backend.options._timeout == timedelta(seconds=20)
    assert not group.supports_window


@hooks
@needs("a recorder with the name of a backend", TORCH >= (2, 15))
def test_the_flight_recorder_of_torch_has_the_calls(group: TorchGroup) -> None:
    group._set_group_name("recorded")
    Seen(group)
    recorder = c10d.FlightRecorderHook.attach(group, [0])
    group.allreduce(torch.ones(3)).wait()
    group.barrier().wait()
    recorder.remove()
    entries = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, backend="bagua"))["entries"]
    found = [entry["profiling_name"] for entry in entries if entry["process_group"] == ["recorded", ""]]
    assert found == ["bagua:all_reduce", "bagua:barrier"]
