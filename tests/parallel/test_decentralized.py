"""``DecentralizedDataParallel`` equals all ranks in one process, on every transport; bad input gets typed errors."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua.comm
from bagua import env, errors, testing, topology
from bagua.optim import optim_fn_accum_adamw, optim_fn_adamw
from bagua.parallel.decentralized import DecentralizedDataParallel
from bagua.parallel.decentralized.wrapper import nodes_for
from bagua.testing import ProcessRanks
from bagua.testing.ranks import this_rank
from bagua.topology import Edge
from tests.algorithms.stacked import Replicas
from tests.harness import State, assert_close, assert_same_on_all_ranks, batch, loss_of, mlp, snapshot
from tests.parallel.wrapping import Made, on_ranks
from tests.topologies import DRAWN_PAIRS, ONE_WAY, STAR, UNEVEN_EDGES
from tests.topologies import Made as MadeTopology

#: Makes three buckets of the small model.
BUCKET_MB = 1000 / 2**20


def momentum(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)


def plain_sgd(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.05)


def adamw(named):
    return optim_fn_adamw(named, lr=0.01)


def accum_adamw(named):
    return optim_fn_accum_adamw(named, lr=0.01, accum_iter=3)


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def wrap(seed: int | None = None, **options: Any) -> DecentralizedDataParallel:
    """The small model on this rank; ranks begin with different weights, and rank 0's must win."""
    model = mlp(bagua.comm.get_rank() if seed is None else seed)
    arguments = {"optim_fn": momentum, "bucket_size_in_mb": BUCKET_MB, **options}
    return DecentralizedDataParallel(model, **arguments)


def growing_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)


#: What becomes of a loss, on a rank, in a step.
Spoil = Callable[[int, int, torch.Tensor], torch.Tensor]


def unspoilt(rank: int, step: int, loss: torch.Tensor) -> torch.Tensor:
    return loss


def train(
    model: nn.Module, steps: Sequence[int], scaler: torch.amp.GradScaler | None = None, spoil: Spoil = unspoilt
) -> list[State]:
    """The loop of a user; the weights after each step."""
    rank = bagua.comm.get_rank()
    states = []
    for step in steps:
        loss = spoil(rank, step, loss_of(model, rank, step))
        (loss if scaler is None else scaler.scale(loss)).backward()
        states.append(snapshot(model))
    return states


class Simulation(Replicas):
    """Every rank's model and optimizers, stepped together.

    Args:
        size: number of ranks.
        layout: names of the parameters of each bucket.
        which: topology, by which weights are mixed in each round, from 1.
        nodes: host of each rank.
        optim_fn: as for the wrapper.
        lr_scheduler_fn: as for the wrapper.
        clip: as ``grad_clip_norm``.
        scaled: each rank has a ``GradScaler``.
        spoil: may change a rank's loss.
    """

    def __init__(
        self,
        size: int,
        layout: Sequence[Sequence[str]],
        which: str | topology.Topology,
        nodes: Sequence[int] | None = None,
        optim_fn: Callable[..., torch.optim.Optimizer] = momentum,
        lr_scheduler_fn: Callable[..., Any] | None = None,
        clip: float = 0.0,
        scaled: bool = False,
        spoil: Spoil = unspoilt,
    ) -> None:
        super().__init__(size)
        self.layout = layout
        self.topology, self.nodes = topology.create({"ring": "alternating_ring"}.get(which, which)), nodes
        self.optimizers = [
            [optim_fn([(name, named[name]) for name in bucket]) for bucket in layout] for named in self.named
        ]
        self.schedules = [
            [lr_scheduler_fn(optimizer) for optimizer in optimizers] if lr_scheduler_fn else []
            for optimizers in self.optimizers
        ]
        self.clip = clip
        self.scalers = [growing_scaler() for _ in range(size)]
        self.scaled, self.spoil = scaled, spoil
        self.steps_taken = 0

    def step(self, step: int) -> None:
        """One step of all ranks."""
        for rank, model in enumerate(self.models):
            model.zero_grad()
            loss = self.spoil(rank, step, loss_of(model, rank, step))
            (self.scalers[rank].scale(loss) if self.scaled else loss).backward()
        if self.steps_taken:
            matrix = self.topology.matrix(len(self.models), self.steps_taken, self.nodes)
            self.rows = (matrix @ self.rows.double()).float()
        for rank in range(len(self.models)):
            self._update(rank)
        self.steps_taken += 1

    def _update(self, rank: int) -> None:
        scaler, optimizers, named = self.scalers[rank], self.optimizers[rank], self.named[rank]
        if self.clip:
            for optimizer in optimizers if self.scaled else ():
                scaler.unscale_(optimizer)
            for names in self.layout:
                nn.utils.clip_grad_norm_([named[name] for name in names], self.clip)
        for optimizer in optimizers:
            if self.scaled:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaled:
            scaler.update()
        for schedule in self.schedules[rank]:
            schedule.step()


STEPS = 7


def assert_equals_simulation(results, which, nodes=None, steps: int = STEPS, **options) -> Simulation:
    """Each rank's states after each step are those of all ranks in one process; ``options`` are of the simulation."""
    simulation = Simulation(len(results), results[0][1], which, nodes, **options)
    for step in range(steps):
        simulation.step(step)
        for (states, *_), expected in zip(results, simulation.states(), strict=True):
            assert_close(states[step], expected)
    return simulation


def layout_of(model) -> list[list[str]]:
    return [list(bucket.names) for bucket in model.bagua_buckets]


def trained(options, scaler=None, spoil=unspoilt):
    model = wrap(scaler=scaler, **options)
    return train(model, range(STEPS), scaler, spoil), layout_of(model)


@pytest.mark.parametrize(
    ("name", "size", "as_view"),
    [
        *((name, size, True) for name in ("complete", "ring", "one-peer-exp") for size in range(1, 7)),
        *((name, 3, False) for name in ("complete", "ring")),
    ],
)
def test_each_step_is_that_of_the_simulation(thread_ranks, name, size, as_view):
    results = thread_ranks(size, trained, {"topology": name, "param_as_bucket_view": as_view})
    assert len(results[0][1]) > 1, "several buckets"
    assert_equals_simulation(results, name)


@pytest.mark.parametrize("optim_fn", [adamw, accum_adamw])
@pytest.mark.parametrize("name", ["complete", "one-peer-exp"])
def test_each_optimizer_is_stepped_in_each_bucket(thread_ranks, name, optim_fn):
    options = {"optim_fn": optim_fn, "lr_scheduler_fn": halving}
    assert_equals_simulation(thread_ranks(3, trained, {"topology": name, **options}), name, **options)


@pytest.mark.parametrize(
    ("hosts", "options"), [([2, 2], {}), ([1, 3], {}), ([2, 2, 2], {}), ([4], {"_local_world_size": 2})], ids=str
)
def test_hosts_alternate(thread_ranks, hosts, options):
    """The size of hosts can be given."""
    nodes = [node for node, count in enumerate([2, 2] if options else hosts) for _ in range(count)]
    results = thread_ranks(sum(hosts), trained, {"topology": "alternating-exp-ring", **options}, hosts=hosts)
    assert_equals_simulation(results, "alternating_exp_ring", nodes)


@pytest.mark.parametrize(
    "which",
    [topology.Ring(), STAR, DRAWN_PAIRS, topology.Hierarchical(topology.Ring()), UNEVEN_EDGES, ONE_WAY],
    ids=str,
)
@pytest.mark.parametrize("as_view", [True, False])
def test_graphs_and_matchings(thread_ranks, which, as_view):
    results = thread_ranks(4, trained, {"topology": which, "param_as_bucket_view": as_view}, hosts=[1, 3])
    assert_equals_simulation(results, which, [0, 1, 1, 1])


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping(thread_ranks, scaled):
    def train_clipped():
        return trained({"topology": "ring", "grad_clip_norm": 0.3}, growing_scaler() if scaled else None)

    assert_equals_simulation(thread_ranks(2, train_clipped), "ring", clip=0.3, scaled=scaled)


def test_an_overflow_on_one_rank_skips_its_update_and_nothing_else(thread_ranks):
    def overflow(rank, step, loss):
        return loss * float("inf") if (rank, step) == (1, 3) else loss

    def train_with_overflow():
        scaler = growing_scaler()
        return *trained({"topology": "complete"}, scaler, overflow), scaler.get_scale()

    results = thread_ranks(3, train_with_overflow)
    simulation = assert_equals_simulation(results, "complete", scaled=True, spoil=overflow)
    assert [result[2] for result in results] == [scaler.get_scale() for scaler in simulation.scalers]
    assert results[0][2] != results[1][2], "each rank has a scale of its own"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": MadeTopology(lambda size, number, nodes: [[1.0, 0.0], [1.0, 0.0]])}, "do not sum to 1"),
        ({"topology": MadeTopology(lambda size, number, nodes: [topology.Edge((0,), 1.0)])}, "exactly one edge"),
    ],
)
@on_ranks(2)
def test_topologies_that_do_not_fit(options, message):
    with pytest.raises(errors.ConfigurationError, match=message):
        wrap(**options)


def drops_biases(named):
    return torch.optim.SGD([parameter for name, parameter in named if "bias" not in name] or [nn.Parameter()], lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim_fn": drops_biases}, r"none for .*4\.bias"),
        ({"optim_fn": lambda named: [parameter for _, parameter in named]}, "list"),
        (
            {"optim_fn": lambda named: torch.optim.SGD([*(p for _, p in named), nn.Parameter(torch.ones(1))], lr=0.1)},
            "1 more",
        ),
        ({"lr_scheduler_fn": lambda optimizer: 0.1}, "float"),
    ],
)
@on_ranks(2)
def test_functions_that_make_something_else(options, message):
    model = wrap(**options)
    with pytest.raises(errors.ConfigurationError, match=message):
        train(model, [0])


ONE_OR_ANOTHER = MadeTopology(lambda *_: topology.Complete().matrix(2) if bagua.comm.get_rank() else torch.eye(2))


@pytest.mark.parametrize(
    ("of_all", "of_rank_1", "message"),
    [
        ({"topology": ONE_OR_ANOTHER}, {}, "topologies"),
        ({}, {"topology": "ring"}, "AlternatingRing"),
        ({}, {"grad_clip_norm": 1.0}, "clip"),
        ({}, {"make": lambda: nn.Linear(8, 4)}, "weight"),
    ],
    ids=["topologies", "names", "options", "models"],
)
@on_ranks(2)
def test_what_differs_between_ranks(of_all, of_rank_1, message):
    options = {**of_all, **(of_rank_1 if bagua.comm.get_rank() else {})}
    model = options.pop("make", mlp)()
    with pytest.raises(errors.CollectiveMismatchError, match=message):
        DecentralizedDataParallel(model, momentum, **options)


@on_ranks(2)
def test_orders_that_differ():
    def forward(self, inputs: torch.Tensor, turned: bool) -> torch.Tensor:
        first, second = (self.right, self.left) if turned else (self.left, self.right)
        return second(first(inputs))

    two_ways = Made(forward, **dict.fromkeys(("left", "right"), lambda: nn.Linear(8, 8)))
    model = DecentralizedDataParallel(two_ways, momentum)
    with pytest.raises(errors.CollectiveMismatchError, match=r"another order.*right\..*left\."):
        model(torch.ones(2, 8), turned=bagua.comm.get_rank() == 1).sum().backward()


class OptimizerError(Exception):
    """What a user's own optimizer raises in these tests."""


@pytest.mark.parametrize("at_step", [0, 2])
@on_ranks(2)
def test_an_error_in_an_optimizer_ends_every_rank(at_step):
    class Fails(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            if bagua.comm.get_rank() == 1 and self.steps == at_step:
                raise OptimizerError
            self.steps += 1
            return super().step(closure)

    rank = bagua.comm.get_rank()
    model = wrap(optim_fn=lambda named: Fails([parameter for _, parameter in named], lr=0.1))
    train(model, range(at_step))
    with pytest.raises(OptimizerError if rank == 1 else errors.CommunicationError):
        train(model, range(at_step, at_step + 3))
    with pytest.raises(errors.BaguaError):
        train(model, [9])


@on_ranks(6)
def test_errors_in_an_edge_of_several_ranks_end_all_of_it():
    """The communicators of edges break with that of the model."""
    rank = bagua.comm.get_rank()
    halves = [topology.Edge((0, 1, 2), 1 / 3), topology.Edge((3, 4, 5), 1 / 3)]
    model = wrap(topology=MadeTopology(lambda size, step, nodes: halves, static=True))
    train(model, range(2))
    if rank == 5:
        model.reducer.give_up("a test")
    elif rank in (3, 4):
        with pytest.raises(errors.CommunicationError):
            train(model, range(2, 4))


#: Buckets that are large enough for memory of their own on every transport.
WIDTH = 160


def train_and_average(name: str) -> tuple[list[State], list[list[str]], State]:
    model = wrap(topology=name)
    states = train(model, range(4))
    with model.global_avg() as average:
        assert 0 < average.distance < 1
        mean = snapshot(model)
    assert all(torch.equal(value, states[-1][name]) for name, value in snapshot(model).items())
    return states, layout_of(model), mean


@pytest.mark.parametrize("name", ["ring", "hierarchical_ring"])
def test_it_trains_alike_on_every_transport(ranks, name):
    results = ranks(3, train_and_average, name)
    assert_equals_simulation(results, name, None if name == "ring" else [0, 0, 0], 4)
    assert_same_on_all_ranks([mean for _, _, mean in results])


def wide() -> DecentralizedDataParallel:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4))
    return DecentralizedDataParallel(model, plain_sgd, topology="ring", bucket_size_in_mb=0.02)


def lose_a_peer() -> str:
    rank = bagua.comm.get_rank()
    model = wide()
    try:
        train(model, range(2))  # Its last exchanges are still under way when the other rank dies.
        if rank == 1:
            testing.die()
        for step in range(2, 6):
            loss_of(model, rank, step).backward()
    except errors.PeerLostError as error:
        found = type(error).__name__
    for parameter in model.parameters():
        assert torch.isfinite(parameter).all()
    loss = loss_of(model.module, rank, 6)
    assert torch.isfinite(loss), "the weights of this rank can be used and saved"
    assert list(model.state_dict()) == list(model.module.state_dict())
    assert model.optimizer_state_dict()["buckets"]
    with pytest.raises(errors.BaguaError):
        loss_of(model, rank, 7)
    return found


@pytest.mark.parametrize(
    "pool",
    [
        pytest.param(name, marks=getattr(pytest.mark, mark))
        for name, mark in (("thread_pool", "threads"), ("process_pool", "gloo"), ("shm_pool", "shm"))
    ],
)
def test_survivors_keep_their_weights(request, pool):
    outcomes = request.getfixturevalue(pool).outcomes(lose_a_peer, size=2)
    assert outcomes[0].value == "PeerLostError", outcomes[0].trace


def leave_early() -> None:
    rank = bagua.comm.get_rank()
    model = wide()
    for step in range(2):
        if rank == 0 and step == 1:
            time.sleep(1.5)  # The other rank closes meanwhile: more than a second, after which transports give up.
        loss_of(model, rank, step).backward()
    bagua.comm.destroy_process_group()


def test_a_rank_that_is_done_waits_for_the_others(ranks):
    ranks(2, leave_early)


@pytest.mark.hybrid
def test_on_several_hosts():
    results = ProcessRanks(4, backend="hybrid").run(train_on_hosts, hosts=[2, 2])
    assert_equals_simulation(results, "alternating_exp_ring", [0, 0, 1, 1], 4)


def train_on_hosts() -> tuple[list[State], list[list[str]]]:
    assert bagua.comm.get_default_group().global_communicator.backend == "hybrid"
    model = wrap(topology="alternating-exp-ring")
    return train(model, range(4)), layout_of(model)


# What users do besides training: averages, checkpoints, accumulation, odd models.

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
    with pytest.raises(errors.ConfigurationError, match="trained on"), model.global_avg():
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
    with pytest.raises(errors.ConfigurationError, match=r"elsewhere\.weight"):
        model.load_optimizer_state_dict(state)
    with pytest.raises(errors.ConfigurationError, match="another topology"):
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


@on_ranks(2)
def test_unused_parameters_are_named_or_count_as_zero():
    model = odd()
    model.module.uses_spare = False
    with pytest.raises(errors.ConfigurationError, match=r"spare\.weight, spare\.bias"):
        model(IMAGES).sum().backward()

    model = odd(find_unused_parameters=True)
    model(IMAGES).square().sum().backward()
    used = model.module.spare.weight.clone()
    model.module.uses_spare = False
    model(IMAGES).square().sum().backward()
    assert not torch.equal(model.module.spare.weight, used), "momentum goes on with a gradient of zero"


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
    with pytest.raises(errors.CollectiveMismatchError):
        wrap(topology="alternating-exp-ring", _local_world_size=asked)
