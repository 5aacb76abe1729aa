"""The helpers that Lightning users know, loaders that deal, and what rank 0 prints."""

import logging
import operator
import types
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import ChainDataset, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

import bagua.comm
from bagua.errors import ConfigurationError, InvalidReduceOpError, InvalidTensorError, NotInitializedError
from bagua.testing import ProcessRanks, this_rank
from bagua.utilities import distributed
from bagua.utilities.training import distributed_loader, print_rank_0
from tests.contract.exercises import communicator as all_ranks
from tests.harness import on_ranks
from tests.launching import free_port


@on_ranks(3, pool="rank_pool")
def test_groups_of_some_ranks_on_every_transport() -> None:
    """The gradient claim among all ranks and in a part of them, and what else takes a group, in the part."""
    rank, part = bagua.comm.get_rank(), bagua.comm.new_group([0, 2])
    assert bool(part) == (rank != 1)
    for group in filter(None, (bagua.comm.get_default_group(), part)):
        generator = torch.Generator().manual_seed(group.rank)
        own = torch.randn(2, 3, dtype=torch.float64, generator=generator).requires_grad_()
        weights = torch.randn(group.size, 2, 3, dtype=torch.float64, generator=generator)
        stack = distributed.AllGatherGrad.apply(own, group)
        (weights * stack).sum().backward()
        assert torch.equal(stack[group.rank], own)
        expected = sum(one[group.rank] for one in group.global_communicator.allgather_object(weights))
        assert torch.allclose(own.grad, expected, rtol=1e-12, atol=0)
    given = torch.full((rank + 1,), float(rank), dtype=torch.float64)
    for named in (part, part.global_communicator) if part else ():
        assert distributed.sync_ddp(given[:1], named, "max").tolist() == [2.0]
        assert distributed.sync_ddp_if_available(given[:1], named, "mean").tolist() == [1.0]
        gathered = distributed.all_gather_ddp_if_available(given[:1], named, sync_grads=True)
        assert gathered.tolist() == [[0.0], [2.0]]
        assert [one.tolist() for one in distributed.gather_all_tensors(given, named)] == [[0.0], [2.0] * 3]


@on_ranks(2, pool="rank_pool")
def test_reducing_and_gathering_on_every_transport() -> None:
    rank = bagua.comm.get_rank()
    given, whole = torch.tensor([1.0, 3.0]) + rank, torch.tensor([2, 5]) + rank
    own = torch.full((rank + 1, 3 - rank), float(rank), requires_grad=True)
    found = {
        "sum": distributed.sync_ddp(given).tolist(),
        "mean": distributed.sync_ddp_if_available(given, reduce_op="mean").tolist(),
        "AVG": distributed.sync_ddp(given, reduce_op="AVG").tolist(),
        "max": distributed.sync_ddp(given, reduce_op=bagua.comm.ReduceOp.MAX).tolist(),
        "mean of integers": distributed.sync_ddp(whole, reduce_op="mean").tolist(),
        "stack": distributed.all_gather_ddp_if_available(given).tolist(),
        "shapes": [part.tolist() for part in distributed.gather_all_tensors(own)],
        "scalars": [part.item() for part in distributed.gather_all_tensors(torch.tensor(rank))],
        "empty": [list(part.shape) for part in distributed.gather_all_tensors(torch.zeros(0, rank))],
    }
    assert torch.equal(given, torch.tensor([1.0, 3.0]) + rank), "the input was changed"
    assert distributed.distributed_available()
    assert found == {
        "sum": [3.0, 7.0], "mean": [1.5, 3.5], "AVG": [1.5, 3.5], "max": [2.0, 4.0], "mean of integers": [2.5, 5.5],
        "stack": [[1.0, 3.0], [2.0, 4.0]], "shapes": [[[0.0] * 3], [[1.0] * 2] * 2], "scalars": [0, 1],
        "empty": [[0, 0], [0, 1]],
    }  # fmt: skip


@on_ranks(2, pool="rank_pool")
def test_what_cannot_be_gathered_is_an_error_on_all_ranks() -> None:
    rank = bagua.comm.get_rank()
    one, other = torch.zeros([2] * (rank + 1)), torch.zeros(2, dtype=(torch.float32, torch.float64)[rank])
    for tensor, said in ((one, "[2, 2]"), (other, "float64")):
        with pytest.raises(InvalidTensorError, match="rank 1") as caught:
            distributed.gather_all_tensors(tensor)
        assert said in caught.value.seen
        assert all_ranks().allgather_object(caught.value.seen) == [caught.value.seen] * 2
    with pytest.raises(InvalidTensorError, match=r"rank 1: torch.float32 \[3, 2\]"):
        distributed.all_gather_ddp_if_available(torch.zeros(2 + rank, 3 - rank))
    with pytest.raises(InvalidTensorError, match=r"rank 0: torch.float32 \[2\]"):
        distributed.AllGatherGrad.apply(torch.zeros(2 + rank))
    assert distributed.all_gather_ddp_if_available(torch.ones(1)).tolist() == [[1.0], [1.0]]


def test_alone_there_is_the_answer_of_a_single_process():
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not distributed.distributed_available()
    assert not distributed.tpu_distributed()
    assert distributed.sync_ddp_if_available(tensor) is tensor
    assert distributed.all_gather_ddp_if_available(tensor, sync_grads=True) is tensor
    assert [part.tolist() for part in distributed.gather_all_tensors(tensor)] == [[1.0, 2.0]]
    distributed.AllGatherGrad.apply(tensor).sum().backward()
    assert tensor.grad.tolist() == [1.0, 1.0]
    with pytest.raises(NotInitializedError, match="init_process_group"):
        distributed.sync_ddp(tensor)


def test_unknown_reductions_and_groups_are_named():
    with pytest.raises(InvalidReduceOpError, match=r"sum or avg or mean.*median"):
        distributed.sync_ddp(torch.ones(1), reduce_op="median")
    with pytest.raises(InvalidTensorError, match="float"):
        distributed.sync_ddp(1.0)
    gathering = (distributed.all_gather_ddp_if_available, distributed.gather_all_tensors)
    for function in (*gathering, distributed.AllGatherGrad.apply):
        with pytest.raises(InvalidTensorError, match="list"):
            function([1.0])
    with pytest.raises(ConfigurationError, match=r"argument group.*str"):
        distributed.all_gather_ddp_if_available(torch.ones(1), group="everyone")


def test_backends_of_devices():
    backend = distributed.get_default_process_group_backend_for_device
    assert [backend(device) for device in ("cuda:1", torch.device("cpu"))] == ["nccl", "gloo"]


@distributed.rank_zero_only
def _speak(word: str) -> str:
    return word.upper()


def test_only_rank_zero_runs(thread_ranks, monkeypatch):
    speak_or_not = distributed.rank_zero_only(_speak, default="silent")
    assert thread_ranks(2, lambda: (_speak("a"), speak_or_not("b"))) == [("A", "B"), (None, "silent")]
    assert _speak("before") == "BEFORE"
    monkeypatch.setenv("RANK", "1")
    assert _speak("as the launcher says") is None


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0), ({"LOCAL_RANK": "3"}, 3), ({"JSM_NAMESPACE_RANK": "2"}, 2),
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, 1), ({"RANK": "0", "LOCAL_RANK": "1"}, 0),
    ],
)  # fmt: skip
def test_before_ranks_are_connected_the_launcher_is_asked_as_lightning_does(variables, rank, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert distributed.rank_zero_only.rank == rank
    assert _speak("a") == (None if rank else "A")


def test_the_rank_can_be_assigned():
    distributed.rank_zero_only.rank = 5
    try:
        assert (distributed.rank_zero_only.rank, _speak("a")) == (5, None)
    finally:
        distributed.rank_zero_only.rank = None
    assert distributed.rank_zero_only.rank == 0


@on_ranks(3)
def test_bits_are_reduced_by_name():
    own = torch.tensor([bagua.comm.get_rank() + 1])
    assert [distributed.sync_ddp(own, reduce_op=name).item() for name in ("band", "bor", "BXOR")] == [0, 3, 0]


def test_rank_zero_logs_and_warns(caplog, monkeypatch):
    def say() -> None:
        distributed.rank_zero_info("step %d", 3)
        distributed.rank_zero_debug("detail")

    with caplog.at_level(logging.DEBUG, logger="bagua"):
        say()
        monkeypatch.setenv("RANK", "1")
        say()
        distributed.rank_zero_warn("not heard")
    assert [record.getMessage() for record in caplog.records] == ["step 3", "detail"]
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(FutureWarning, match="soon") as warned:
        distributed.rank_zero_warn("soon", category=FutureWarning)
    assert warned[0].filename == __file__

    def of_the_caller() -> None:
        distributed.rank_zero_warn("later", 5)
        distributed.rank_zero_deprecation("gone")

    with pytest.warns((UserWarning, DeprecationWarning)) as warned:
        of_the_caller()
    assert [one.category for one in warned] == [UserWarning, DeprecationWarning]
    assert {(one.filename, one.lineno) for one in warned} == {(__file__, of_the_caller.__code__.co_firstlineno + 5)}


def _on_torch_alone(port: int) -> None:
    rank = this_rank.get().rank
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    pair = dist.new_group([0, 1])
    assert (_speak("torch's rank"), distributed.distributed_available()) == (None if rank else "TORCH'S RANK", True)
    with pytest.raises(NotInitializedError, match="on all ranks"):
        distributed.sync_ddp(torch.ones(1), pair)
    assert distributed.sync_ddp_if_available(torch.ones(1)).tolist() == [2.0]
    own = torch.ones(2, requires_grad=True)
    (distributed.all_gather_ddp_if_available(own, pair, sync_grads=True) * (rank + 1)).sum().backward()
    assert own.grad.tolist() == [3.0, 3.0]
    assert [part.tolist() for part in distributed.gather_all_tensors(own[:rank], dist.group.WORLD)] == [[], [1.0]]
    assert [distributed.sync_ddp(torch.ones(1), pair, "mean").item() for _ in range(2)] == [1.0, 1.0]
    bagua.comm.destroy_process_group()
    dist.destroy_process_group()


def _connect(port: int) -> None:
    place = types.SimpleNamespace(main_address="127.0.0.1", main_port=port)
    place.global_rank, place.world_size = (lambda: this_rank.get().rank), (lambda: 2)
    distributed.init_dist_connection(place, "gloo", timeout=20)
    distributed.init_dist_connection(place, "gloo")
    assert dist.is_initialized()
    assert distributed.sync_ddp(torch.ones(1)).item() == 2.0


@pytest.mark.gloo
def test_groups_of_torch_are_joined_and_connections_made():
    pool = ProcessRanks(2, backend=None)
    for function in (_on_torch_alone, _connect):
        pool.run(function, free_port())


def test_hooks_are_checked_before_they_are_registered():
    model = torch.nn.Linear(1, 1)
    distributed.register_ddp_comm_hook(model)
    no_module = r"DistributedDataParallel.*Linear"
    for hooks, said in (((print, "fp16"), "ddp_comm_wrapper"), (("fp16",), "ddp_comm_hook"), ((print,), no_module)):
        with pytest.raises(ConfigurationError, match=said):
            distributed.register_ddp_comm_hook(model, None, *hooks)


def test_hooks_are_taken_by_what_takes_them():
    """As ``torch.compile`` makes one: it has what the model inside has."""
    model = torch.nn.Module()
    model.register_comm_hook = Mock()
    distributed.register_ddp_comm_hook(model, "state", print)
    assert model.register_comm_hook.mock_calls == [call("state", print)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("drop_last", "split_batches", "first"), [(True, False, 0), (False, True, 5), (False, False, 0)]
)
@on_ranks(2)
def test_a_dealt_loader_does_what_the_sampler_does_by_hand(shuffle, drop_last, split_batches, first):
    rank, ranks, data = bagua.comm.get_rank(), bagua.comm.get_world_size(), torch.arange(23)
    given = DataLoader(data, batch_size=6, shuffle=shuffle, drop_last=drop_last, collate_fn=torch.stack)
    loader = distributed_loader(given, split_batches=split_batches)
    loader.set_epoch(first)
    sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle, drop_last=drop_last)
    by_hand = DataLoader(data, batch_size=6 // ranks if split_batches else 6, sampler=sampler, drop_last=drop_last)
    found, expected = [], []
    for epoch in range(first, first + 3):
        found.append([batch.tolist() for batch in loader])
        sampler.set_epoch(epoch)
        expected.append([batch.tolist() for batch in by_hand])
    assert len(loader) == len(by_hand)
    assert loader.collate_fn is torch.stack
    assert found == expected
    assert (found[0] != found[1]) == shuffle
    assert operator.ne(*all_ranks().allgather_object(found))


def test_the_seed_of_rank_0s_generator_shuffles_on_all_ranks(thread_ranks):
    def seeded() -> list[int]:
        generator = torch.Generator().manual_seed(7 + bagua.comm.get_rank())
        loader = DataLoader(torch.arange(8), batch_size=4, shuffle=True, generator=generator)
        return torch.cat(list(distributed_loader(loader))).tolist()

    dealt = [sample for part in thread_ranks(2, seeded) for sample in part]
    assert sorted(dealt) == list(range(8))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(7)).tolist()
    assert dealt == order[::2] + order[1::2]


_UNDEALT = {
    "a torch.utils.data.DataLoader": lambda: [1, 2],
    "an IterableDataset": lambda: DataLoader(ChainDataset([]), batch_size=2),
    "batches of its own": lambda: DataLoader(torch.arange(4), batch_sampler=[[0, 1], [2, 3]]),
    "WeightedRandomSampler": lambda: DataLoader(torch.arange(4), 2, sampler=WeightedRandomSampler([1.0] * 4, 4)),
    "replacement or num_samples": lambda: DataLoader(range(4), 2, sampler=RandomSampler(range(4), replacement=True)),
    "a multiple of 2": lambda: DataLoader(torch.arange(4), 3),
}


@pytest.mark.parametrize("words", _UNDEALT)
@on_ranks(2)
def test_a_loader_that_cannot_be_dealt_is_refused(words):
    with pytest.raises((ConfigurationError, TypeError), match=words):
        distributed_loader(_UNDEALT[words](), split_batches=True)


def test_ranks_must_be_connected():
    with pytest.raises(NotInitializedError):
        distributed_loader(DataLoader(torch.arange(4)))


def test_rank_0_alone_prints(thread_ranks, capsys):
    thread_ranks(3, lambda: print_rank_0("rank", bagua.comm.get_rank(), sep="-", end="!\n", flush=True))
    assert capsys.readouterr().out == "rank-0!\n"
