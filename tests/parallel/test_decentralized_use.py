"""What users of ``DecentralizedDataParallel`` do besides training: averages, checkpoints, accumulation, odd models."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua.comm
from bagua import env
from bagua.errors import CollectiveMismatchError, ConfigurationError
from bagua.parallel.decentralized import DecentralizedDataParallel
from bagua.parallel.decentralized.wrapper import nodes_for
from bagua.testing import ProcessRanks
from bagua.testing.ranks import this_rank
from bagua.topology import Edge
from tests.harness import State, assert_same_on_all_ranks, batch, loss_of, mlp, snapshot
from tests.parallel.decentralized_simulation import BUCKET_MB, accum_adamw, halving, momentum, plain_sgd, train, wrap
from tests.parallel.wrapping import on_ranks
from tests.topologies import UNEVEN_EDGES

# The mean of all ranks.


def test_an_evaluation_in_between_changes_nothing(thread_ranks):
    def run(evaluates: bool) -> tuple[State, list[float]]:
        model = wrap(topology="one-peer-exp")
        distances = []
        for step in range(5):
            train(model, [step])
            if evaluates:
                model.eval()
                with model.global_avg() as average, torch.no_grad():
                    loss_of(model, 0, 0)
                distances.append(float(average))
                model.train()
        return snapshot(model), distances

    results = thread_ranks(3, lambda: (run(True), run(False)))
    for (evaluated, distances), (plain, _) in results:
        assert all(torch.equal(evaluated[name], plain[name]) for name in plain)
        assert min(distances) > 0


def test_the_distance_is_that_of_all_parameters(thread_ranks):
    def run() -> tuple[State, State, float]:
        model = wrap(topology="ring")
        own = train(model, range(3))[-1]
        average = model.global_avg()
        return own, snapshot(model), average.distance

    results = thread_ranks(3, run)
    assert_same_on_all_ranks([mean for _, mean, _ in results])
    mean = {name: sum(own[name] for own, _, _ in results) / 3 for name in results[0][0]}
    for own, found, distance in results:
        assert all(torch.allclose(found[name], mean[name], atol=1e-6) for name in mean)
        expected = sum(float((own[name] - mean[name]).square().sum()) for name in mean) ** 0.5
        assert distance == pytest.approx(expected, rel=1e-4)


@on_ranks(3, assert_same_on_all_ranks)
def test_as_a_call_the_mean_stays_and_what_was_sent_before_is_dropped() -> State:
    model = wrap(topology="ring")
    train(model, range(3))
    model.global_avg()
    for optimizer in model.bagua_optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    return train(model, [3])[-1]


@pytest.mark.parametrize("average_buffers", [False, True])
def test_float_buffers_are_averaged_on_request(thread_ranks, average_buffers):
    def run() -> tuple[list[float], list[float], int]:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        wrapped = DecentralizedDataParallel(model, plain_sgd, sync_buffer_in_global_avg=average_buffers)
        for step in range(2):
            wrapped(batch(bagua.comm.get_rank(), step)[0]).sum().backward()
        own = model[1].running_mean.tolist()
        with wrapped.global_avg():
            inside = model[1].running_mean.tolist()
        assert model[1].running_mean.tolist() == own
        return own, inside, int(model[1].num_batches_tracked)

    (own, inside, batches), (_, other_inside, _) = thread_ranks(2, run)
    assert (inside == other_inside) is average_buffers
    assert (inside == own) is not average_buffers
    assert batches == 2


@on_ranks(2)
def test_training_inside_the_block_is_refused_at_its_end():
    model = wrap()
    train(model, range(2))
    with pytest.raises(ConfigurationError, match="trained on"), model.global_avg():
        train(model, [2])


# Checkpoints.


def _saved(state: object) -> object:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize(("topology", "size"), [("ring", 3), ("complete", 3), ("one-peer-exp", 1)])
def test_a_run_goes_on_bit_by_bit(thread_ranks, topology, size, as_view):
    options = {
        "topology": topology,
        "optim_fn": accum_adamw,
        "lr_scheduler_fn": halving,
        "param_as_bucket_view": as_view,
    }

    def run() -> None:
        model = wrap(**options)
        train(model, range(3))
        parts = [
            ("load_state_dict", _saved(model.state_dict())),
            ("load_optimizer_state_dict", _saved(model.optimizer_state_dict())),
            ("bagua_load_state_dict", _saved(model.bagua_state_dict())),
        ]
        expected = train(model, range(3, 6))
        for order in itertools.permutations(parts):
            again = wrap(seed=99, **options)
            for method, state in order:
                getattr(again, method)(state)
            for states, others in zip(train(again, range(3, 6)), expected, strict=True):
                assert all(torch.equal(states[name], others[name]) for name in others), [name for name, _ in order]
        for method, state in parts[::-1]:  # back to the past in the same object
            getattr(model, method)(state)
        states = train(model, range(3, 6))[-1]
        assert all(torch.equal(states[name], expected[-1][name]) for name in states)

    thread_ranks(size, run)


def test_optimizers_go_on_in_other_buckets(thread_ranks):
    options = {"topology": "complete", "optim_fn": accum_adamw, "lr_scheduler_fn": halving}

    def run() -> None:
        model = wrap(**options)
        train(model, range(3))
        weights, optimizers = model.state_dict(), model.optimizer_state_dict()
        again = wrap(seed=99, **{**options, "bucket_size_in_mb": 25})
        again.load_state_dict(weights)
        again.load_optimizer_state_dict(optimizers)
        model.load_state_dict(weights)  # Drops what was sent before, as it must be for a comparison.
        one, other = train(model, [3, 4])[-1], train(again, [3, 4])[-1]
        assert len(again.bagua_buckets) == 1 < len(model.bagua_buckets)
        assert all(torch.allclose(one[name], other[name], rtol=1e-6, atol=1e-7) for name in one)
        assert {round(rate, 12) for s in again.lr_schedulers for rate in s.get_last_lr()} == {round(0.01 * 0.8**5, 12)}

    thread_ranks(2, run)


@on_ranks(3)
def test_state_of_other_parameters_or_another_topology_is_refused():
    model = wrap(topology="ring")
    train(model, range(2))
    state = model.optimizer_state_dict()
    state["parameters"]["elsewhere.weight"] = {}
    with pytest.raises(ConfigurationError, match=r"elsewhere\.weight"):
        model.load_optimizer_state_dict(state)
    with pytest.raises(ConfigurationError, match="another topology"):
        wrap(topology="complete").bagua_load_state_dict(model.bagua_state_dict())


@on_ranks(2)
def test_state_follows_parameters_when_the_model_changes():
    model = wrap(topology="complete")
    train(model, range(2))
    model.module[0].bias.requires_grad_(False)
    train(model, [2])  # What had been sent before is mixed in a last time.
    frozen = model.module[0].bias.clone()
    train(model, range(3, 5))
    assert torch.equal(model.module[0].bias, frozen)
    state = model.optimizer_state_dict()["parameters"]
    assert set(state) == {name for name, p in model.named_parameters() if p.requires_grad}
    momenta = [optimizer.state_dict()["state"] for optimizer in model.bagua_optimizers]
    assert all(entry["momentum_buffer"].abs().sum() > 0 for momentum_ in momenta for entry in momentum_.values())


# Accumulation.


@pytest.mark.parametrize("way", ["no_sync", "set_accumulate_grad"])
@on_ranks(2)
def test_accumulated_gradients_are_one_step(way):
    rank = bagua.comm.get_rank()
    one, other = wrap(topology="ring", optim_fn=plain_sgd), wrap(topology="ring", optim_fn=plain_sgd)
    for step in range(0, 6, 2):
        if way == "no_sync":
            with one.no_sync():
                loss_of(one, rank, step).backward()
        else:
            one.set_accumulate_grad()
            loss_of(one, rank, step).backward()
            one.set_accumulate_grad(False)
        loss_of(one, rank, step + 1).backward()
        (loss_of(other, rank, step) + loss_of(other, rank, step + 1)).backward()
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)
            assert mine.grad is None, "a step drops the gradients"


# Models.


class Odd(nn.Module):
    """Tied weights, a frozen layer, a channels-last convolution, and a layer that is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.spare = nn.Linear(12, 12)
        self.uses_spare = True

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.convolution(images).flatten(1)
        hidden = self.frozen(self.second(self.first(hidden).relu()))
        return self.spare(hidden) if self.uses_spare else hidden


def odd(**options) -> DecentralizedDataParallel:
    torch.manual_seed(0)
    return DecentralizedDataParallel(Odd(), momentum, topology="complete", bucket_size_in_mb=BUCKET_MB, **options)


IMAGES = torch.linspace(-1, 1, 2 * 2 * 4 * 4).view(2, 2, 4, 4)


@on_ranks(2)
def test_odd_models():
    model = odd()
    before = snapshot(model)
    for _ in range(3):
        model(IMAGES).square().sum().backward()
    module = model.module
    assert module.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert module.second.weight is module.first.weight
    assert torch.equal(module.frozen.weight, before["frozen.weight"])
    assert not torch.equal(module.first.weight, before["first.weight"])
    assert list(model.state_dict()) == list(Odd().state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Odd().named_parameters()]
    plain = copy.deepcopy(model)
    assert type(plain) is Odd
    assert torch.equal(plain(IMAGES), model(IMAGES))


@on_ranks(2)
def test_unused_parameters_are_named_or_count_as_zero():
    model = odd()
    model.module.uses_spare = False
    with pytest.raises(ConfigurationError, match=r"spare\.weight, spare\.bias"):
        model(IMAGES).sum().backward()

    model = odd(find_unused_parameters=True)
    model(IMAGES).square().sum().backward()
    used = model.module.spare.weight.clone()
    model.module.uses_spare = False
    model(IMAGES).square().sum().backward()
    assert not torch.equal(model.module.spare.weight, used), "momentum goes on with a gradient of zero"


def test_a_compiled_model(thread_ranks):
    def run(compiles: bool) -> State:
        model = mlp()
        wrapped = DecentralizedDataParallel(
            torch.compile(model, backend="eager") if compiles else model, momentum, bucket_size_in_mb=BUCKET_MB
        )
        for step in range(3):
            loss_of(wrapped, 0, step).backward()
        return snapshot(model)

    # One rank: the compiler is not made for several threads.
    compiled, plain = thread_ranks(1, lambda: (run(True), run(False)))[0]
    assert all(torch.allclose(compiled[name], plain[name]) for name in plain)


class Looks(torch.optim.SGD):
    """Notes what it is shown before each mixing."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.05)
        self.seen: list[tuple[Edge, float, list[torch.Tensor], list[torch.Tensor]]] = []

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        parameters = self.param_groups[0]["params"]
        self.seen.append(
            (edge, weight, [p.detach().clone() for p in parameters], [p.comm_buffer.clone() for p in parameters])
        )


@pytest.mark.parametrize("which", ["ring", "complete", UNEVEN_EDGES], ids=str)
def test_an_optimizer_may_look_before_the_mixing(thread_ranks, which):
    def run():
        def looks(named) -> Looks:
            return Looks([parameter for _, parameter in named])

        model = wrap(topology=which, optim_fn=looks, bucket_size_in_mb=25)
        plain = wrap(topology=which, optim_fn=plain_sgd, bucket_size_in_mb=25)
        states = train(model, range(5))
        for state, expected in zip(states, train(plain, range(5)), strict=True):
            assert all(torch.allclose(state[name], expected[name], atol=1e-6) for name in state), "looking is free"
        return model.bagua_optimizers[0].seen

    seen = thread_ranks(4, run)
    for shown in zip(*seen, strict=True):  # one round on all ranks
        for edge, weight, _, buffers in shown:
            share = (1 - weight) / (len(edge.ranks) - 1) if len(edge.ranks) > 1 else 0.0
            for position, buffer in enumerate(buffers):
                expected = sum(share * shown[rank][2][position] for rank in edge.ranks)
                assert torch.allclose(buffer, expected, atol=1e-6)
    assert len(seen[0]) == 4, "before each mixing: in all steps but the first"


# Hosts, accumulation and the start, as documented.


@pytest.mark.parametrize(
    ("said", "asked", "expected"),
    [
        ([2, 2, 2, 2], None, (0, 0, 1, 1)),
        ([2, 2, 2, 2], 1, (0, 1, 2, 3)),
        ([None] * 4, None, (0, 0, 0, 1)),
        ([3, 3, 3, 1], None, (0, 0, 0, 1)),
        ([3, 3, 3, 3], None, (0, 0, 0, 1)),
    ],
    ids=str,
)
def test_hosts_are_those_of_the_launcher(thread_ranks, monkeypatch, said, asked, expected):
    monkeypatch.setattr(env, "get_local_world_size", lambda: said[this_rank.get().rank])
    found = thread_ranks(4, lambda: nodes_for(bagua.comm.get_default_group(), asked), hosts=[3, 1])
    assert found == [expected] * 4


@pytest.mark.parametrize(("before", "between", "steps"), [(False, True, False), (True, False, True)])
@on_ranks(2)
def test_accumulation_is_asked_for_in_the_backward_pass(before, between, steps):
    """Set before a forward pass, and set otherwise before its backward pass: the latter counts."""
    model = wrap()
    loss_of(model, 0, 0).backward()
    start = snapshot(model)
    model.set_accumulate_grad(before)
    loss = loss_of(model, 0, 1)
    model.set_accumulate_grad(between)
    loss.backward()
    assert any((not torch.equal(value, start[name]) for name, value in snapshot(model).items())) == steps


def wrap_with_torch_alone(folder: str) -> bool:
    rank = this_rank.get().rank
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        model = DecentralizedDataParallel(mlp(), plain_sgd)
        loss_of(model, rank, 0).backward()
        return bagua.comm.is_initialized()
    finally:
        bagua.comm.destroy_process_group()
        dist.destroy_process_group()


@pytest.mark.gloo
def test_torch_alone_is_enough(tmp_path):
    assert ProcessRanks(2, backend=None).run(wrap_with_torch_alone, str(tmp_path)) == [True, True]


@on_ranks(4, hosts=[2, 2])
def test_ranks_that_ask_for_other_hosts_are_told():
    asked = None if this_rank.get().rank == 0 else 1
    with pytest.raises(CollectiveMismatchError):
        wrap(topology="alternating-exp-ring", _local_world_size=asked)
