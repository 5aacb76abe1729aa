"""Communication hooks on torch's DDP: compared with the algorithms that do the same, and with torch's own results.

And algorithms as such hooks: the same steps as through the engine, and which cannot be hooks.
"""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import bagua.comm
from bagua import errors
from bagua.algorithms import Algorithm, Every, Exchange, Gradients, Mean, Replace, TopKAlgorithm
from bagua.compression import Codec, Identity, MinMaxUInt8, TopK
from bagua.compression import registry as codecs
from bagua.errors import ConfigurationError
from bagua.integrations.ddp_comm_hooks import HookState, bagua_hook, register_fsdp_hook
from bagua.parallel import with_bagua
from bagua.primitives import AllGatherReducer, ErrorFeedback, PowerSGDReducer, ScatterGatherReducer, SumReducer
from bagua.utilities.distributed import register_ddp_comm_hook
from tests import harness
from tests.contract.failures import die_last
from tests.harness import State, assert_close, assert_same_on_all_ranks, loss_of, mlp, sgd, snapshot, train_steps

pytestmark = pytest.mark.gloo

#: So small that there are several buckets, all of which are under way at a time.
SEVERAL, ONE = 0.0005, 25.0
#: As ``bytegrad``; and rounding each 64 elements that follow each other in a bucket together.
BYTES = ScatterGatherReducer(MinMaxUInt8())
BLOCKS = ErrorFeedback(ScatterGatherReducer(MinMaxUInt8(block_numel=64)))


def low_rank(rank: int) -> SumReducer:
    return ErrorFeedback(PowerSGDReducer(rank))


def largest(ratio: float) -> SumReducer:
    return ErrorFeedback(AllGatherReducer(TopK(ratio)))


def _ddp(state: HookState | None, megabytes: float = SEVERAL, wrapper=None, make=mlp) -> DistributedDataParallel:
    model = DistributedDataParallel(make(), bucket_cap_mb=megabytes)
    register_ddp_comm_hook(model, state, None if state is None else bagua_hook, wrapper)
    return model


def _to_bfloat16(hook):
    wrapped = default_hooks.bf16_compress_wrapper(hook)
    wrapped.__name__ = "in_bfloat16"  # torch goes by the name to refuse it where there is no CUDA
    return wrapped


def _distance(state: State, other: State) -> float:
    return float(torch.stack([(state[name] - other[name]).norm() for name in state]).norm())


@harness.on_ranks(2, assert_same_on_all_ranks, pool="process_pool")
def test_hooks_do_what_they_say_with_several_buckets_under_way() -> State:
    found: dict[str, State] = {}
    for kind, what, *options in (
        ("plain", None),
        ("identity", AllGatherReducer(Identity())),
        ("warm-up", TopKAlgorithm(hierarchical=False, warmup_steps=4)),
        ("8 bits", BYTES),
        ("8 bits, feedback", BLOCKS),
        ("8 bits of float16", BYTES, SEVERAL, default_hooks.fp16_compress_wrapper),
        ("8 bits of bfloat16, feedback", BLOCKS, SEVERAL, _to_bfloat16),
        ("low rank", low_rank(2)),
        ("largest", largest(0.02), ONE),
    ):
        model = _ddp(None if what is None else HookState(what), *options)
        train_steps(model, sgd(model.parameters()), bagua.comm.get_rank(), range(4))
        found[kind] = snapshot(model.module)
    plain = found["plain"]
    assert_close(found["identity"], plain)
    assert_close(found["warm-up"], plain)
    way = _distance(plain, snapshot(mlp()))
    for kind in ("8 bits", "8 bits, feedback", "8 bits of float16", "8 bits of bfloat16, feedback"):
        assert 1e-6 * way < _distance(found[kind], plain) < 0.05 * way, kind
    for kind in ("low rank", "largest"):
        assert 0.01 * way < _distance(found[kind], plain) < way, kind
    return {f"{name} of {kind}": value for kind, state in found.items() for name, value in state.items()}


def _gradients(model: DistributedDataParallel, steps: int) -> State:
    """The sum of what every step makes of the same gradient."""
    total: State = {}
    for _ in range(steps):
        model.zero_grad()
        loss_of(model, bagua.comm.get_rank(), 0).backward()
        for name, parameter in model.module.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad
    return total


def _add_up(hierarchical: bool) -> tuple[State, dict[str, tuple[State, State]]]:
    """What exact steps make of one gradient; for each kind of hook what it makes of it, and what it still owes."""
    steps, found = 3, {}
    reducers: dict[str, SumReducer] = {"low rank": PowerSGDReducer(1)}
    for form in (AllGatherReducer, ScatterGatherReducer):
        reducers |= {f"{name}, {form.__name__}": form(Codec.init(name)) for name in codecs}
    for kind, reducer in reducers.items():
        how = Mean(ErrorFeedback(reducer), hierarchical)
        state = HookState(Algorithm.of(Exchange(Gradients(), Every(), how, Replace())))
        model = _ddp(state)
        done = _gradients(model, steps)
        remembered = state.state_dict(model)
        assert remembered["step"] == state.step == steps
        owed = {name: part["residual"].view_as(done[name]) for name, part in remembered["parameters"].items()}
        found[kind] = (done, owed)
        state.close()
    return _gradients(_ddp(None), steps), found


@pytest.mark.parametrize("hosts", [None, [2, 1]], ids=["flat", "hierarchical"])
def test_nothing_is_lost_by_any_codec_also_when_ddp_forms_its_buckets_anew(process_ranks, hosts):
    outcomes = process_ranks(2, _add_up, False) if hosts is None else process_ranks(3, _add_up, True, hosts=hosts)
    expected = outcomes[0][0]
    for kind, (done, _) in outcomes[0][1].items():
        assert_same_on_all_ranks([of_kinds[kind][0] for _, of_kinds in outcomes])
        owed = {name: sum(of_kinds[kind][1][name] for _, of_kinds in outcomes) for name in done}
        assert_close({name: done[name] + owed[name] for name in done}, expected)
        if kind.startswith(("low rank", "random", "sign", "topk")):
            assert max(float(part.abs().max()) for part in owed.values()) > 0.01, kind


@harness.on_ranks(2, pool="process_pool")
def test_what_is_not_finite_reaches_everyone_and_is_not_remembered() -> None:
    """A gradient of one rank is not finite in the second of three steps."""
    rank, seen = bagua.comm.get_rank(), []
    state = HookState(largest(0.2))
    model = _ddp(state)
    for step in range(3):
        model.zero_grad()
        loss = loss_of(model, rank, step)
        (loss * float("inf") if (rank, step) == (1, 1) else loss).backward()
        seen.append(all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters()))
    assert seen == [True, False, True]
    assert all(part["residual"].isfinite().all() for part in state.state_dict(model)["parameters"].values())


def _whole_and_resumed(what: object, stop: int, steps: int = 6, make=mlp) -> tuple[State, State]:
    """The weights after all steps, and of a model that went on from step ``stop`` with what had been saved."""
    state, rank = HookState(what), bagua.comm.get_rank()
    model = _ddp(state, make=make)
    optimizer = sgd(model.parameters())
    train_steps(model, optimizer, rank, range(stop))
    weights, moments = snapshot(model.module), copy.deepcopy(optimizer.state_dict())
    saved = state.state_dict(model.module)
    train_steps(model, optimizer, rank, range(stop, steps))
    state.close()

    later = HookState(what)
    again = _ddp(later, make=make)
    again.module.load_state_dict(weights)
    optimizer = sgd(again.parameters())
    optimizer.load_state_dict(moments)
    later.load_state_dict(saved, again)
    assert later.state_dict(again).keys() == saved.keys()
    train_steps(again, optimizer, rank, range(stop, steps))
    assert later.step == steps
    later.close()
    return snapshot(model.module), snapshot(again.module)


@harness.on_ranks(2, pool="process_pool")
def test_a_state_of_something_else_is_refused() -> None:
    state = HookState(largest(0.05))
    model = _ddp(state, ONE)
    train_steps(model, sgd(model.parameters()), bagua.comm.get_rank(), range(1))
    saved = state.state_dict(model)
    with pytest.raises(ConfigurationError, match=r"another reducer.*0\.5"):
        HookState(largest(0.5)).load_state_dict(saved, model)
    with pytest.raises(ConfigurationError, match=r"state of rank 7 of 2"):
        HookState(largest(0.05)).load_state_dict({**saved, "rank": 7}, model)
    exact = HookState(AllGatherReducer(Identity()))
    exact.load_state_dict({**exact.state_dict(model), "rank": 7}, model)  # nothing in it is of one rank
    with pytest.raises(ConfigurationError, match=r"another model"):
        HookState(largest(0.05)).load_state_dict(saved, nn.Linear(1, 1))


@harness.on_ranks(2, pool="process_pool")
def test_training_resumes_bit_by_bit_although_ddp_begins_with_other_buckets() -> None:
    """By codecs of blocks, and by thin matrices."""
    for reducer, stop in ((BLOCKS, 1), (low_rank(1), 1), (BLOCKS, 2), (low_rank(1), 3)):
        assert_same_on_all_ranks(_whole_and_resumed(reducer, stop))


@harness.on_ranks(2, pool="process_pool")
def test_a_state_that_one_rank_loads_is_an_error_on_all() -> None:
    state, rank = HookState(largest(0.2)), bagua.comm.get_rank()
    model = _ddp(state)
    if rank == 0:
        state.load_state_dict({**state.state_dict(model), "step": 3}, model)
    with pytest.raises(errors.CollectiveMismatchError, match=r"different states of this hook.*on every rank") as caught:
        train_steps(model, sgd(model.parameters()), rank, range(1))
    assert {caught.value.expected, caught.value.seen} == {"loaded state: of step 3", "loaded state: none"}


def _load_between_steps(ranks: tuple[int, ...]) -> str:
    state, module = HookState(BLOCKS), nn.Linear(4, 4)
    for step in range(2):
        if step == 1 and bagua.comm.get_rank() in ranks:
            state.load_state_dict(state.state_dict(module), module)
        try:
            state.exchange_part("weight", torch.ones(16))
        except errors.CommunicationError as error:
            return str(error)
    return f"step {state.step}"


def test_a_state_may_be_loaded_between_steps_on_all_ranks_only(thread_ranks):
    assert thread_ranks(2, _load_between_steps, (0, 1)) == ["step 2", "step 2"]
    loaded, other = thread_ranks(2, _load_between_steps, (0,))
    assert "changed on rank 0 (load_state_dict of HookState), and not on rank 1" in loaded
    assert "lost rank 0: it waited for a change" in other


def _lose_a_peer() -> None:
    model = _ddp(HookState(BYTES))
    for step in range(2):  # In the second one DDP has formed its buckets for good.
        loss_of(model, bagua.comm.get_rank(), step).backward()
    die_last(bagua.comm.get_rank() == 1, 1)
    with pytest.raises(errors.PeerLostError):
        loss_of(model, 0, 1).backward()


def test_a_lost_peer_is_a_typed_error_at_the_end_of_backward(process_pool):
    outcomes = process_pool.outcomes(_lose_a_peer, size=2)
    assert outcomes[0].error is None, outcomes[0].trace


@harness.on_ranks(2, assert_same_on_all_ranks, pool="process_pool")
def test_replicas_of_a_sharded_model_are_averaged() -> State:
    rank = bagua.comm.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    gradients = []
    for reducer in (AllGatherReducer(Identity()), ErrorFeedback(AllGatherReducer(MinMaxUInt8()))):
        model = mlp()
        fully_shard(model[0], mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"])
        state = HookState(reducer, mesh["replicas"].get_group())
        register_fsdp_hook(model, state)
        for step in range(2):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        gradients.append(torch.cat([parameter.grad.to_local().view(-1) for parameter in model.parameters()]))
        assert state.step == 2
        HookState(reducer).load_state_dict(state.state_dict(model), model)
    plain = _ddp(None, ONE)
    loss_of(plain, rank, 1).backward()
    with pytest.raises(ConfigurationError, match=r"ranks \[\d\], which are in the mesh"):
        register_fsdp_hook(fully_shard(mlp()), HookState(BYTES))
    with (
        mock.patch.object(FSDPModule, "set_all_reduce_hook", side_effect=ValueError("multiple param groups")),
        pytest.raises(ConfigurationError, match="several meshes"),
    ):
        register_fsdp_hook(model, state)
    exact, rounded = gradients
    expected = torch.cat([parameter.grad.view(-1) for parameter in plain.module.parameters()])
    assert torch.allclose(exact, expected, atol=1e-6)
    assert 0 < (rounded - expected).abs().max() < 0.02
    return {"rounded": rounded}


@harness.on_ranks(2, pool="process_pool")
def test_a_script_that_knows_only_torch_needs_one_line() -> None:
    rank = bagua.comm.get_rank()
    store = dist.distributed_c10d._get_default_store()
    bagua.comm.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("alone", store), rank=rank, world_size=2)
    state = HookState(BYTES)
    model = _ddp(state)
    loss_of(model, rank, 0).backward()
    assert bagua.comm.is_initialized()
    assert state.group.size == 2
    del model  # As the last one that has the group, it may wait for a thread of Gloo, which waits for Python's lock.
    bagua.comm.destroy_process_group()
    dist.destroy_process_group()


def test_what_is_no_state_is_refused():
    with pytest.raises(ConfigurationError, match=r"a reducer, as ScatterGatherReducer\(codec\), seen MinMaxUInt8"):
        HookState(MinMaxUInt8())
    with pytest.raises(ConfigurationError, match="HookState"):
        bagua_hook(None, None)
    with pytest.raises(ConfigurationError, match="HookState"):
        register_fsdp_hook(nn.Linear(1, 1), None)
    with pytest.raises(ConfigurationError, match="fully_shard"):
        register_fsdp_hook(nn.Linear(1, 1), HookState("sign_sgd"))
    with pytest.raises(ConfigurationError, match="with_bagua"):
        HookState(Algorithm.init("local_sgd", inner="gradient_allreduce"))
    with pytest.raises(errors.UnsupportedAlgorithmException, match="bytegrad"):
        HookState("bytegard")


STEPS, HALF = 8, 3
#: All that hooks can do, with options with which so many steps go through all phases.
HOOKS = {
    "gradient_allreduce": {},
    "bytegrad": {"warmup_steps": 2},
    "power_sgd": {"warmup_steps": 2, "matrix_rank": 1},
    "top_k": {"warmup_steps": 1, "density_steps": 4, "ratio": 0.05},
    "sign_sgd": {"warmup_steps": 2},
    "loco": {"warmup_steps": 2, "reset_every": 5},
}


def _matrix() -> nn.Linear:
    """A model that has one layout, however gradients are put into buckets."""
    torch.manual_seed(0)
    return nn.Linear(8, 4, bias=False)


@harness.on_ranks(2, assert_same_on_all_ranks, pool="process_pool")
def test_hooks_do_what_the_algorithms_do_in_all_their_phases() -> State:
    """Through the engine, through a hook, and through a hook that is saved and goes on."""
    rank, model, ends = bagua.comm.get_rank(), _ddp(None, make=_matrix), {}
    train_steps(model, sgd(model.parameters()), rank, range(STEPS))
    plain = snapshot(model.module)
    for name, options in HOOKS.items():
        algorithm = Algorithm.init(name, hierarchical=False, **options)
        engine = _matrix()
        optimizer = sgd(engine.parameters())
        with_bagua(engine, [optimizer], algorithm)
        train_steps(engine, optimizer, rank, range(STEPS))
        whole, resumed = _whole_and_resumed(algorithm, HALF, STEPS, _matrix)
        assert_close(whole, snapshot(engine))
        assert_close(resumed, whole)
        if name == "gradient_allreduce":
            assert_close(whole, plain)
        else:
            assert not torch.allclose(whole["weight"], plain["weight"], rtol=1e-3, atol=1e-5), name
        ends[name] = whole["weight"]
    return ends
