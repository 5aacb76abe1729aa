"""What ranks do in the tests of the backend ``bagua`` of ``torch.distributed``. Each function runs on every rank."""

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua import errors
from bagua.comm import ReconfigureOptions, connect_store
from bagua.comm.startup import formation
from bagua.testing.ranks import this_rank
from tests.comm import torch_group_forms
from tests.harness import descend, gradients
from tests.versions import TORCH, renamed

TIMEOUT_S = 20.0

all_gather_single = renamed(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather = renamed(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter = renamed(functional, "reduce_scatter_single", "reduce_scatter_tensor")
gather_with_graph = renamed(functional, "all_gather_single_autograd", "all_gather_tensor_autograd")
reduce_scatter_with_graph = renamed(functional, "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")


def own_rank() -> int:
    return this_rank.get().rank


@contextlib.contextmanager
def joined(port: int, size: int, nodes: tuple[int, ...] | None = None) -> Iterator[int]:
    """A default group of torch, on hosts as the ranks shall believe, and its end."""
    if nodes is not None:
        formation.nodes_from_identities = lambda hosts: nodes[: len(hosts)]
    store, timeout = connect_store(port, TIMEOUT_S), timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("bagua", store=store, rank=own_rank(), world_size=size, timeout=timeout)
    yield dist.get_rank()
    dist.destroy_process_group()


def raised(error: type[Exception], function: Any, *arguments: Any, **keywords: Any) -> Any:
    with pytest.raises(error) as caught:
        function(*arguments, **keywords)
    return caught.value


def collectives(port: int, nodes: tuple[int, ...], transport: str) -> None:
    """What the programs of ``test_programs.py`` do not call."""
    size = len(nodes)
    with joined(port, size, nodes) as rank:
        assert dist.get_backend() == "bagua"
        assert dist.group.WORLD.members.backend == transport
        for part in (tags, from_any_rank, coalesced, in_functional_style, from_two_threads, refusals):
            part(rank, size)


def tags(rank: int, size: int) -> None:
    """They tell messages apart, whatever their order."""
    right, left = (rank + 1) % size, (rank - 1) % size
    received = {tag: torch.empty(1) for tag in (2, 1)}
    works = [dist.irecv(tensor, left, tag=tag) for tag, tensor in received.items()]
    works += [dist.isend(torch.tensor([float(tag)]), right, tag=tag) for tag in (1, 2)]
    for work in works:
        work.wait()
    assert received == {1: 1.0, 2: 2.0}


def from_any_rank(rank: int, size: int) -> None:
    """Rank 0 takes what comes, and learns from whom."""
    tensor = torch.full((2,), float(rank))
    if rank:
        dist.send(tensor, 0)
        dist.send(tensor + 10, 0)
        return
    received = torch.empty(2)
    found = [(dist.recv(received), received[0].item()) for _ in range(2 * (size - 1))]
    assert sorted(found) == sorted((other, float(other + more)) for other in range(1, size) for more in (0, 10))


def coalesced(rank: int, size: int) -> None:
    group, total = dist.group.WORLD, size * (size + 1) // 2
    tensors = [torch.full((n,), rank + 1.0) for n in (1, 5)] + [torch.full((2, 2), rank + 1)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for one in tensors:
            dist.all_reduce(one)
    manager.wait()
    assert all((one == total).all() for one in tensors)
    outputs = [torch.empty(size), torch.empty(2 * size)]
    with dist.distributed_c10d._coalescing_manager(group):
        for number, output in enumerate(outputs):
            all_gather_single(output, torch.full((number + 1,), float(rank)))
    assert outputs[1].tolist() == [float(r) for r in range(size) for _ in range(2)]
    parts = [torch.empty(1), torch.empty(2)]
    with dist.distributed_c10d._coalescing_manager(group):
        for number, part in enumerate(parts):
            reduce_scatter_single(part, torch.ones((number + 1) * size))
    assert parts[1].tolist() == [float(size)] * 2
    values = torch.full((4,), rank + 1.0)
    with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        works = group.broadcast([values])
        del works
    manager.wait()
    assert (values == 1).all()


def in_functional_style(rank: int, size: int) -> None:
    group, values = dist.group.WORLD, torch.arange(2.0 * size) + rank
    total = size * torch.arange(2.0 * size) + sum(range(size))
    assert torch.equal(functional.all_reduce(values, "sum", group).clone(), total)
    assert torch.equal(functional_reduce_scatter(values, "sum", 0, group).clone(), total.chunk(size)[rank])
    assert torch.equal(functional_all_gather(values, 0, group)[-2 * size :], torch.arange(2.0 * size) + size - 1)
    assert torch.equal(functional.all_reduce_coalesced([values, values + 1], "sum", group)[1].clone(), total + size)
    assert functional.all_to_all_single(values, None, None, group)[0].item() == 2 * rank
    assert torch.equal(functional.broadcast(values, 1, group).clone(), torch.arange(2.0 * size) + 1)
    # Outputs become part of a graph while the call is still under way.
    weights = values.clone().requires_grad_()
    reduce_scatter_with_graph(weights, "sum", 0, group).square().sum().backward()
    assert torch.equal(weights.grad, 2 * total)
    # Torch 2.8 gives the backward pass of this call no gradient that ``sum`` has expanded.
    (gather_with_graph(weights, 0, group) * torch.ones(2 * size * size)).sum().backward()
    assert torch.equal(weights.grad, 2 * total + size)


def from_two_threads(rank: int, size: int) -> None:
    """One thread sends and receives while another reduces: the calls of one group may come from several."""

    def exchange() -> None:
        for number in range(20):
            received = torch.empty(1)
            work = dist.isend(torch.tensor([float(number)]), (rank + 1) % size)
            dist.recv(received, (rank - 1) % size)
            work.wait()
            assert received.item() == number

    with ThreadPoolExecutor(1) as thread:
        exchanged = thread.submit(exchange)
        for number in range(20):
            dist.all_reduce(values := torch.tensor([float(number)]), async_op=True).wait()
            assert values.item() == size * number
        exchanged.result(TIMEOUT_S)


def refusals(rank: int, size: int) -> None:
    group = dist.group.WORLD
    raised(errors.InvalidTensorError, dist.all_reduce, torch.empty(2, device="meta"))
    raised(errors.InvalidTensorError, dist.all_gather, [torch.empty(r + 1) for r in range(size)], torch.empty(1))
    raised(errors.ConfigurationError, group.split_group, [0])
    raised(errors.ConfigurationError, dist.new_group, pg_options=object())
    # A deadline of torch reaches our transport.
    patient = dist.new_group()
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=0.2), patient)
    if rank == 0:
        error = raised(errors.CollectiveTimeoutError, dist.all_reduce, torch.ones(1), group=patient)
        assert error.timeout_s == 0.2
        assert set() < {*error.peers} <= {*range(1, size)}
    dist.barrier()


def all_forms(port: int) -> None:
    """Each form on a group of Gloo and on one of ours, with equal results."""
    with joined(port, 2):
        ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
        torch.testing.assert_close(torch_group_forms.results(ours), torch_group_forms.results(gloo), rtol=0, atol=0)
        for name, call in torch_group_forms.REFUSED.items():
            with contextlib.suppress(errors.ConfigurationError):
                call(ours)
                pytest.fail(f"not refused: {name}")
        ours.allreduce(values := torch.ones(2)).wait()  # What was refused is not in the way.
        assert values.tolist() == [2.0, 2.0]
        recent = ours.members.global_communicator.statistics.recent
        before = recent[-1].call.sequence
        ours.allreduce(torch.ones(500)).wait()
        assert (recent[-1].call.sequence, recent[-1].call.numel) == (before + 1, 500)


def as_launched(port: int, size: int = 2) -> None:
    """Torch's wrappers, with the rendezvous that torchrun prepares."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(own_rank()), WORLD_SIZE=str(size))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # The pool's store is there already, as an agent's would be.
    dist.init_process_group("bagua")
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        assert_mean_of_gradients(size, **options)
    for hook in (fp16_compress_hook, own_hook):
        assert_mean_of_gradients(size, hook)
    uneven_inputs(size)
    dist.destroy_process_group()
    # The same store again, which holds what the first groups have written.
    dist.init_process_group("bagua")
    dist.all_reduce(values := torch.ones(1))
    dist.destroy_process_group()
    # Beside a default group of another backend.
    dist.init_process_group("gloo", store=connect_store(port, TIMEOUT_S), rank=own_rank(), world_size=size)
    dist.all_reduce(values, group=dist.new_group(backend="bagua"))
    dist.all_reduce(values)
    assert values.item() == size**3
    dist.destroy_process_group()


def own_hook(_, bucket):  # torch refuses annotations that are strings
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(dist.get_world_size()))


def small_model() -> nn.Module:
    torch.manual_seed(own_rank())  # DDP makes them equal
    return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 2))


def assert_mean_of_gradients(size: int, hook: Any = None, **options: bool) -> None:
    wrapped = DistributedDataParallel(small_model(), bucket_cap_mb=0.2, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    inputs = torch.randn(size, 3, 6, generator=torch.Generator().manual_seed(7))
    for _ in range(3):  # the first shows the order of gradients, the second has new buckets
        wrapped.zero_grad()
        wrapped(inputs[dist.get_rank()]).square().mean().backward()
    alone = small_model()
    alone.load_state_dict(wrapped.module.state_dict())
    sum(alone(part).square().mean() for part in inputs).div(size).backward()
    tolerance = 2e-2 if hook is fp16_compress_hook else 1e-5
    torch.testing.assert_close(gradients(wrapped.module), gradients(alone), rtol=tolerance, atol=tolerance / 10)


def compiled(port: int) -> None:
    """Wrapped and compiled in both orders, with the gradients of the model that is not compiled."""
    with joined(port, 2) as rank, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of itself
        inputs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(7))[rank]
        alone = DistributedDataParallel(small_model())
        alone(inputs).square().mean().backward()
        for backend in ("eager", "aot_eager"):
            model = small_model()
            for wrapped in (
                torch.compile(DistributedDataParallel(model), backend=backend),
                DistributedDataParallel(torch.compile(model, backend=backend)),
            ):
                for _ in range(2):
                    wrapped.zero_grad()
                    wrapped(inputs).square().mean().backward()
                torch.testing.assert_close(gradients(model), gradients(alone.module))
        reduce = torch.compile(lambda t: functional.all_reduce(t * 2, "sum", dist.group.WORLD), backend="eager")
        assert reduce(torch.ones(2)).tolist() == [4.0, 4.0]


def uneven_inputs(size: int) -> None:
    """Rank r has 2 + r inputs; each of them has a gradient of ones, which is divided by all ranks, or by those left."""
    for by_all in (True, False):
        wrapped = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        begun = wrapped.module.weight.detach().clone()
        with Join([wrapped], divide_by_initial_world_size=by_all):
            for _ in range(2 + dist.get_rank()):
                descend(optimizer, wrapped(torch.ones(1, 2)).sum())
        left = [size, size, *range(size - 1, 0, -1)]
        moved = 0.1 * sum(ranks / (size if by_all else ranks) for ranks in left)
        torch.testing.assert_close(wrapped.module.weight.detach(), begun - moved)


def callbacks(port: int, nodes: tuple[int, ...], transport: str) -> None:
    """Callbacks make calls and wait for them, however deep, while other threads make calls."""
    size = len(nodes)
    with joined(port, size, nodes):
        assert dist.group.WORLD.members.backend == transport
        nested_callbacks(size)
        callbacks_beside_calls(size)
        train_with_hook(None, fp16_compress_hook)
        train_with_hook(PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook)
        train_with_hook(PostLocalSGDState(None, dist.new_group(), 2), post_localSGD_hook)


def nested_callbacks(size: int) -> None:
    def nest(depth: int) -> float:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        if depth == 1:
            return future.wait()[0].item()
        return future.then(lambda done: nest(depth - 1) + done.value()[0].item()).wait()

    assert nest(10) == 10 * size


def callbacks_beside_calls(size: int) -> None:
    """Calls of callbacks and of other threads have other sizes: they must not meet."""

    def reduce_again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        total = done.value()[0]
        works = [dist.all_reduce(part, async_op=True) for part in total.chunk(3)]
        torch.futures.wait_all([work.get_future() for work in works])
        return total

    sizes = range(3, 63, 3)
    futures = [dist.all_reduce(torch.ones(n), async_op=True).get_future().then(reduce_again) for n in sizes]
    assert [int(future.wait().sum()) for future in futures] == [n * size**2 for n in sizes]


def train_with_hook(state: Any, hook: Any) -> None:
    """Several buckets, so that callbacks run while the backward pass goes on; equal weights afterwards."""
    wrapped = DistributedDataParallel(small_model(), bucket_cap_mb=0.2)
    wrapped.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for batch in torch.randn(6, 3, 6, generator=torch.Generator().manual_seed(dist.get_rank())):
        descend(optimizer, wrapped(batch).square().mean())
    weights = nn.utils.parameters_to_vector(wrapped.parameters()).detach()
    dist.all_gather(of_all := [torch.empty_like(weights) for _ in range(dist.get_world_size())], weights)
    assert all(torch.equal(weights, other) for other in of_all)


def meshes(port: int) -> None:
    """Four ranks in groups of groups, and what torch builds on these."""
    with joined(port, 4) as rank:
        many_groups(rank)
        fully_sharded(rank)
        on_top(rank)


def many_groups(rank: int) -> None:
    twin, gloo = dist.new_group(), dist.new_group(backend="gloo")
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    local = dist.new_group([2, 3], use_local_synchronization=True) if rank >= 2 else None
    if local and TORCH < (2, 15):  # Torch 2.15 itself counts what the others did not make.
        dist.distributed_c10d._world.group_count += 1
    # All at once, in an order that differs from rank to rank.
    groups = [(dist.group.WORLD, 4), (twin, 4), (gloo, 4), (pair, 2)] + ([(local, 2)] if local else [])
    tensors = [torch.ones(40_000) for _ in groups]
    order = list(range(len(groups)))
    works = {i: dist.all_reduce(tensors[i], group=groups[i][0], async_op=True) for i in order[rank:] + order[:rank]}
    for i, (_, size) in enumerate(groups):
        works[i].wait()
        assert (tensors[i] == size).all()
    assert dist.get_backend(gloo) == "gloo"
    assert dist.get_group_rank(pair, rank) == rank // 2
    assert dist.get_process_group_ranks(pair) == [rank % 2, rank % 2 + 2]
    dist.broadcast(values := torch.tensor([rank]), src=rank % 2 + 2, group=pair)
    assert values.item() == rank % 2 + 2
    # The end comes in any order; what is left goes on.
    for group in (twin, pair) if rank % 2 else (pair, twin):
        dist.destroy_process_group(group)
    dist.barrier()


def fully_sharded(rank: int) -> None:
    for shape, names in (((4,), ("shard",)), ((2, 2), ("replicate", "shard"))):
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        torch.manual_seed(0)
        alone, model = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2))
        model.load_state_dict(alone.state_dict())
        fsdp.fully_shard(model[2], mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone)]
        inputs = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(3))
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(inputs[rank]).square().mean().backward()
            sum(alone(part).square().mean() for part in inputs).div(4).backward()
            for optimizer in optimizers:
                optimizer.step()
        found = [parameter.full_tensor() for parameter in model.parameters()]
        torch.testing.assert_close(found, [parameter.detach() for parameter in alone.parameters()])


def on_top(rank: int) -> None:
    """Ours on a default group of ours is not stacked: it has transports of its own."""
    for backend in (None, "bagua"):
        bagua.init_process_group(backend=backend)
        assert bagua.get_default_group().backend == "shm"
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        groups = [bagua.from_torch_group(pair), bagua.from_torch_group(pair, backend="bagua")]
        groups += [bagua.new_group(), bagua.new_group(backend="bagua")]
        values = torch.ones(3)
        for group in groups:
            assert group.backend == "shm"
            group.global_communicator.allreduce(values)
        dist.all_reduce(values)
        assert (values == 2 * 2 * 4 * 4 * 4).all()
        bagua.destroy_process_group()
        assert dist.is_initialized()


def lose_a_rank(port: int, size: int) -> None:
    """The last rank dies; the others notice in a plain call, in the backward pass of DDP, or in a hook's future."""
    with joined(port, size) as rank:
        quiet = dist.new_group(pg_options=bagua.TorchBackendOptions(raise_in_backward=False))
        handled: list[BaseException] = []

        def hook(_, bucket):  # handles the error of its future, and the backward pass goes on
            def swallow(done: torch.futures.Future[Any]) -> torch.Tensor:
                try:
                    return done.value()[0]
                except Exception as error:
                    handled.append(error)
                    return bucket.buffer()

            return dist.all_reduce(bucket.buffer(), group=quiet, async_op=True).get_future().then(swallow)

        models = [DistributedDataParallel(small_model(), process_group=one) for one in (dist.new_group(), quiet)]
        models[1].register_comm_hook(None, hook)
        for model in models * 2:  # forms the buckets
            model(torch.randn(2, 6)).sum().backward()
        losses = [model(torch.randn(2, 6)).sum() for model in models]
        dist.barrier()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        in_a_call = raised(errors.PeerLostError, dist.all_reduce, torch.ones(5))
        in_backward = raised(errors.PeerLostError, losses[0].backward)
        losses[1].backward()
        for error in (in_a_call, in_backward, handled[0]):
            assert isinstance(error, errors.PeerLostError)
            assert error.peers == (size - 1,)


def handles_of_all(store: dist.Store, handle: str, number: int, members: list[int]) -> list[str]:
    store.set(f"handle{number}/{own_rank()}", handle)
    return [store.get(f"handle{number}/{member}").decode() for member in members]


def reconfigured(port: int) -> None:
    """The default group loses its rank 1, which comes back as the first; groups and models are made anew."""
    with joined(port, 3):
        store, group = connect_store(port, TIMEOUT_S), dist.group.WORLD
        earlier = dist.new_group([0, 1])
        for number, order in enumerate(([2, 0], [1, 2, 0])):
            if own_rank() not in order:
                continue
            handles = handles_of_all(store, group.get_reconfigure_handle(), number, order)
            group.reconfigure(ReconfigureOptions(number, handles)).wait()
            assert dist.group.WORLD is group
            assert (dist.get_rank(), dist.get_world_size()) == (order.index(own_rank()), len(order))
            if earlier is not dist.GroupMember.NON_GROUP_MEMBER:
                raised(errors.CommunicationError, earlier.allreduce, torch.ones(1))  # Torch would look its rank up.
            assert_mean_of_gradients(len(order))
            pair = dist.new_group([0, 1])
            if dist.get_rank() < 2:
                dist.all_reduce(total := torch.tensor(float(own_rank())), group=pair)
                assert total == sum(order[:2])
            dist.broadcast_object_list(told := [own_rank()], src=0)
            assert told == [order[0]]


def reconfigured_by_torch(port: int) -> None:
    store = connect_store(port, TIMEOUT_S)
    options = {"rank": own_rank(), "world_size": 2, "timeout": timedelta(seconds=TIMEOUT_S)}
    dist.init_process_group("bagua", store=store, enable_reconfigure=True, **options)
    assert dist._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (own_rank(), 2)
    raised(errors.CommunicationError, dist.all_reduce, torch.ones(1))
    for number, order in enumerate(([0, 1], [1, 0])):
        handles = handles_of_all(store, dist._get_reconfigure_handle(), number, order)
        dist._reconfigure(number, handles, timeout=timedelta(seconds=TIMEOUT_S)).wait()
        dist.all_reduce(total := torch.ones(1))
        assert total == 2
        assert dist.get_rank() == order.index(own_rank())
    dist.destroy_process_group()
