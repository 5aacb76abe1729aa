"""``DecentralizedDataParallel`` equals all ranks in one process, on every transport; bad input gets typed errors."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
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
from tests.harness import State, assert_close, assert_same_on_all_ranks, batch, loss_of, mlp, sgd, snapshot
from tests.parallel.wrapping import Made, file_of, on_ranks
from tests.topologies import DRAWN_PAIRS, ONE_WAY, STAR, UNEVEN_EDGES
from tests.topologies import Made as MadeTopology

#: Makes three buckets of the small model.
BUCKET_MB = 1000 / 2**20


def momentum(named):
    return sgd(parameter for _, parameter in named)


def plain_sgd(named, make=torch.optim.SGD):
    return make([parameter for _, parameter in named], lr=0.05)


accum_adamw = partial(optim_fn_accum_adamw, lr=0.01, accum_iter=3)
decaying = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)


def wrap(seed: int | None = None, **options: Any) -> DecentralizedDataParallel:
    """The small model on this rank; ranks begin with different weights, and rank 0's must win."""
    model = mlp(bagua.comm.get_rank() if seed is None else seed)
    return DecentralizedDataParallel(model, **{"optim_fn": momentum, "bucket_size_in_mb": BUCKET_MB, **options})


def growing_scaler(enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=enabled)


#: What becomes of a loss, on a rank, in a step.
Spoil = Callable[[int, int, torch.Tensor], torch.Tensor]


def unspoilt(rank: int, step: int, loss: torch.Tensor) -> torch.Tensor:
    return loss


def train(
    model: nn.Module, steps: Sequence[int], scaler: torch.amp.GradScaler | None = None, spoil: Spoil = unspoilt
) -> list[State]:
    """The loop of a user; the weights after each step."""
    rank, states = bagua.comm.get_rank(), []
    for step in steps:
        loss = spoil(rank, step, loss_of(model, rank, step))
        (loss if scaler is None else scaler.scale(loss)).backward()
        states.append(snapshot(model))
    return states


class Simulation(Replicas):
    """Every rank's model and optimizers, stepped together, from step 0 on."""

    def __init__(
        self,
        size: int,
        layout: Sequence[Sequence[str]],  # Names of the parameters of each bucket.
        which: str | topology.Topology,  # By it weights are mixed in each round, from 1.
        nodes: Sequence[int] | None = None,  # Host of each rank.
        optim_fn: Callable[..., torch.optim.Optimizer] = momentum,
        lr_scheduler_fn: Callable[..., Any] | None = None,
        clip: float = 0.0,
        scaled: bool = False,
        spoil: Spoil = unspoilt,
    ) -> None:
        super().__init__(size, losses=lambda model, rank, step: spoil(rank, step, loss_of(model, rank, step)))
        self.layout, self.clip = layout, clip
        self.topology, self.nodes = topology.create({"ring": "alternating_ring"}.get(which, which)), nodes
        self.optimizers = [[optim_fn([(name, named[name]) for name in bucket]) for bucket in layout]
                           for named in self.named]  # fmt: skip
        self.schedules = [[lr_scheduler_fn(one) for one in row if lr_scheduler_fn] for row in self.optimizers]
        self.scalers = [growing_scaler(scaled) for _ in range(size)]

    def step(self, step: int) -> None:
        for rank, model in enumerate(self.models):
            model.zero_grad()
            self.scalers[rank].scale(self.losses(model, rank, step)).backward()
        if step:
            self.rows = (self.topology.matrix(len(self.models), step, self.nodes) @ self.rows.double()).float()
        for rank in range(len(self.models)):
            self._update(rank)

    def _update(self, rank: int) -> None:
        scaler, named = self.scalers[rank], self.named[rank]
        for optimizer, names in zip(self.optimizers[rank], self.layout, strict=True):
            if self.clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([named[name] for name in names], self.clip)
            scaler.step(optimizer)
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


GRAPHS = topology.Ring(), STAR, DRAWN_PAIRS, topology.Hierarchical(topology.Ring()), UNEVEN_EDGES, ONE_WAY


@pytest.mark.parametrize(
    ("which", "hosts", "options"),
    [
        *((name, [size], {}) for name in ("complete", "ring", "one-peer-exp") for size in range(1, 7)),
        *((name, [3], {"param_as_bucket_view": False}) for name in ("complete", "ring")),
        *(("alternating-exp-ring", hosts, {}) for hosts in ([2, 2], [1, 3], [2, 2, 2])),
        ("alternating-exp-ring", [4], {"_local_world_size": 2}),
        *((graph, [1, 3], {"param_as_bucket_view": as_view}) for graph in GRAPHS for as_view in (True, False)),
    ],
    ids=str,
)
def test_each_step_is_that_of_the_simulation(thread_ranks, which, hosts, options):
    results = thread_ranks(sum(hosts), trained, {"topology": which, **options}, hosts=hosts)
    assert len(results[0][1]) > 1, "several buckets"
    sizes = [2, 2] if "_local_world_size" in options else hosts
    assert_equals_simulation(results, which, [node for node, size in enumerate(sizes) for _ in range(size)])


@pytest.mark.parametrize("optim_fn", [partial(optim_fn_adamw, lr=0.01), accum_adamw], ids=["adamw", "accum_adamw"])
@pytest.mark.parametrize("name", ["complete", "one-peer-exp"])
def test_each_optimizer_is_stepped_in_each_bucket(thread_ranks, name, optim_fn):
    options = {"optim_fn": optim_fn, "lr_scheduler_fn": decaying}
    assert_equals_simulation(thread_ranks(3, trained, {"topology": name, **options}), name, **options)


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
    ("made", "message"),
    [([[1.0, 0.0], [1.0, 0.0]], "do not sum to 1"), ([topology.Edge((0,), 1.0)], "exactly one edge")],
    ids=["sums", "edges"],
)
@on_ranks(2)
def test_topologies_that_do_not_fit(made, message):
    with pytest.raises(errors.ConfigurationError, match=message):
        wrap(topology=MadeTopology(lambda size, number, nodes: made))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim_fn": lambda named: sgd([p for name, p in named if "bias" not in name] or [nn.Parameter()])},
         r"none for .*4\.bias"),
        ({"optim_fn": lambda named: [parameter for _, parameter in named]}, "list"),
        ({"optim_fn": lambda named: sgd([*(p for _, p in named), nn.Parameter(torch.ones(1))])}, "1 more"),
        ({"lr_scheduler_fn": lambda optimizer: 0.1}, "float"),
    ],
)  # fmt: skip
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

    two_ways = Made(forward, left=lambda: nn.Linear(8, 8), right=lambda: nn.Linear(8, 8))
    model = DecentralizedDataParallel(two_ways, momentum)
    with pytest.raises(errors.CollectiveMismatchError, match=r"another order.*right\..*left\."):
        model(torch.ones(2, 8), turned=bagua.comm.get_rank() == 1).sum().backward()


@pytest.mark.parametrize("at_step", [0, 2])
@on_ranks(2)
def test_an_error_in_an_optimizer_ends_every_rank(at_step):
    class Fails(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            if bagua.comm.get_rank() == 1 and self.steps == at_step:
                raise ArithmeticError("for the test")
            self.steps += 1
            return super().step(closure)

    model = wrap(optim_fn=partial(plain_sgd, make=Fails))
    train(model, range(at_step))
    error = ArithmeticError if bagua.comm.get_rank() == 1 else errors.CommunicationError
    with pytest.raises(error, match="for the test"):
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


def train_and_average(name: str) -> tuple[list[State], list[list[str]], State]:
    model = wrap(topology=name)
    states = train(model, range(4))
    with model.global_avg() as average:
        assert 0 < average.distance < 1
        mean = snapshot(model)
    assert_same_on_all_ranks([states[-1], snapshot(model)])
    return states, layout_of(model), mean


@pytest.mark.parametrize("name", ["ring", "hierarchical_ring"])
def test_it_trains_alike_on_every_transport(ranks, name):
    results = ranks(3, train_and_average, name)
    assert_equals_simulation(results, name, None if name == "ring" else [0, 0, 0], 4)
    assert_same_on_all_ranks([mean for _, _, mean in results])


def wide() -> DecentralizedDataParallel:
    """Buckets that are large enough for memory of their own on every transport."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 160), nn.Linear(160, 160), nn.Linear(160, 4))
    return DecentralizedDataParallel(model, plain_sgd, topology="ring", bucket_size_in_mb=0.02)


def lose_a_peer() -> str:
    rank = bagua.comm.get_rank()
    model = wide()
    with pytest.raises(errors.PeerLostError) as caught:
        train(model, range(2))  # Its last exchanges are still under way when the other rank dies.
        if rank == 1:
            testing.die()
        train(model, range(2, 6))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert torch.isfinite(loss_of(model.module, rank, 6)), "the weights of this rank can be used and saved"
    assert list(model.state_dict()) == list(model.module.state_dict())
    assert model.optimizer_state_dict()["buckets"]
    with pytest.raises(errors.BaguaError):
        loss_of(model, rank, 7)
    return caught.typename


def test_survivors_keep_their_weights(rank_pool):
    outcomes = rank_pool.outcomes(lose_a_peer, size=2)
    assert outcomes[0].value == "PeerLostError", outcomes[0].trace


@on_ranks(2, pool="rank_pool")
def test_a_rank_that_is_done_waits_for_the_others():
    model = wide()
    train(model, [0])
    if bagua.comm.get_rank() == 0:
        time.sleep(1.5)  # The other rank closes meanwhile: more than a second, after which transports give up.
    train(model, [1])
    bagua.comm.destroy_process_group()


@pytest.mark.hybrid
def test_on_several_hosts():
    results = ProcessRanks(4, backend="hybrid").run(train_on_hosts, hosts=[2, 2])
    assert_equals_simulation(results, "alternating_exp_ring", [0, 0, 1, 1])


def train_on_hosts() -> tuple[list[State], list[list[str]]]:
    assert bagua.comm.get_default_group().global_communicator.backend == "hybrid"
    return trained({"topology": "alternating-exp-ring"})


@on_ranks(3)
def test_an_evaluation_in_between_changes_nothing():
    model, plain = (wrap(topology="one-peer-exp") for _ in range(2))
    for step in range(5):
        train(model, [step])
        model.eval()
        with model.global_avg() as average, torch.no_grad():
            loss_of(model, 0, 0)
        assert float(average) > 0
        model.train()
    assert_same_on_all_ranks([snapshot(model), train(plain, range(5))[-1]])


def test_the_distance_is_that_of_all_parameters(thread_ranks):
    def run() -> tuple[State, State, float]:
        model = wrap(topology="ring")
        own = train(model, range(3))[-1]
        average = model.global_avg()
        return own, snapshot(model), average.distance

    owns, means, distances = zip(*thread_ranks(3, run), strict=True)
    mean = {name: sum(own[name] for own in owns) / 3 for name in owns[0]}
    assert_same_on_all_ranks(means)
    torch.testing.assert_close(means[0], mean, rtol=1e-5, atol=1e-6)
    for own, distance in zip(owns, distances, strict=True):
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
    def run() -> list[float]:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        wrapped = DecentralizedDataParallel(model, plain_sgd, sync_buffer_in_global_avg=average_buffers)
        for step in range(2):
            wrapped(batch(bagua.comm.get_rank(), step)[0]).sum().backward()
        own = model[1].running_mean.tolist()
        with wrapped.global_avg():
            inside = model[1].running_mean.tolist()
        assert (model[1].running_mean.tolist(), int(model[1].num_batches_tracked)) == (own, 2)
        assert (inside == own) is not average_buffers
        return inside

    inside, other = thread_ranks(2, run)
    assert (inside == other) is average_buffers


@on_ranks(2)
def test_training_inside_the_block_is_refused_at_its_end():
    model = wrap()
    train(model, range(2))
    with pytest.raises(errors.ConfigurationError, match="trained on"), model.global_avg():
        train(model, [2])


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize(("topology", "size"), [("ring", 3), ("complete", 3), ("one-peer-exp", 1)])
@on_ranks("size")
def test_a_run_goes_on_bit_by_bit(topology, size, as_view):
    optimizers = {"optim_fn": accum_adamw, "lr_scheduler_fn": decaying}
    make = partial(wrap, topology=topology, param_as_bucket_view=as_view, **optimizers)
    model = make()
    train(model, range(3))
    states = model.state_dict(), model.optimizer_state_dict(), model.bagua_state_dict()
    methods = "load_state_dict", "load_optimizer_state_dict", "bagua_load_state_dict"
    parts = [*zip(methods, [torch.load(file_of(state), weights_only=True) for state in states], strict=True)]
    expected = train(model, range(3, 6))
    others = [(make(seed=99), order) for order in itertools.permutations(parts)]
    for again, order in (*others, (model, parts[::-1])):  # In the end, back to the past in the same object.
        for method, state in order:
            getattr(again, method)(state)
        for states in zip(train(again, range(3, 6)), expected, strict=True):
            assert_same_on_all_ranks(states)


@on_ranks(2)
def test_optimizers_go_on_in_other_buckets():
    options = {"topology": "complete", "optim_fn": accum_adamw, "lr_scheduler_fn": decaying}
    model = wrap(**options)
    train(model, range(3))
    weights, optimizers = model.state_dict(), model.optimizer_state_dict()
    again = wrap(seed=99, bucket_size_in_mb=25, **options)
    again.load_state_dict(weights)
    again.load_optimizer_state_dict(optimizers)
    model.load_state_dict(weights)  # Drops what was sent before, as it must be for a comparison.
    one, other = train(model, [3, 4])[-1], train(again, [3, 4])[-1]
    assert len(again.bagua_buckets) == 1 < len(model.bagua_buckets)
    assert all(torch.allclose(one[name], other[name], rtol=1e-6, atol=1e-7) for name in one)
    assert {round(rate, 12) for s in again.lr_schedulers for rate in s.get_last_lr()} == {round(0.01 * 0.8**5, 12)}


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


@pytest.mark.parametrize("way", ["no_sync", "set_accumulate_grad"])
@on_ranks(2)
def test_accumulated_gradients_are_one_step(way):
    rank = bagua.comm.get_rank()
    one, other = [wrap(topology="ring", optim_fn=plain_sgd) for _ in range(2)]
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


class Odd(nn.Module):
    """Tied weights, a frozen layer, a channels-last convolution, and a layer that is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.first, self.second, self.frozen, self.spare = (nn.Linear(12, 12) for _ in range(4))
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
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


@pytest.mark.parametrize("which", ["ring", "complete", UNEVEN_EDGES], ids=str)
def test_an_optimizer_may_look_before_the_mixing(thread_ranks, which):
    def run() -> list[tuple[Edge, float, list[torch.Tensor], list[torch.Tensor]]]:
        shown = []

        class Looks(torch.optim.SGD):
            def pre_average_hook(self, edge: Edge, weight: float) -> None:
                own = self.param_groups[0]["params"]
                shown.append((edge, weight, [p.detach().clone() for p in own], [p.comm_buffer.clone() for p in own]))

        model = wrap(topology=which, optim_fn=partial(plain_sgd, make=Looks), bucket_size_in_mb=25)
        plain = wrap(topology=which, optim_fn=plain_sgd, bucket_size_in_mb=25)
        for state, expected in zip(train(model, range(5)), train(plain, range(5)), strict=True):
            assert all(torch.allclose(state[name], expected[name], atol=1e-6) for name in state), "looking is free"
        return shown

    rounds = list(zip(*thread_ranks(4, run), strict=True))
    assert len(rounds) == 4, "before each mixing: in all steps but the first"
    for shown in rounds:
        for edge, weight, _, buffers in shown:
            share = (1 - weight) / (len(edge.ranks) - 1) if len(edge.ranks) > 1 else 0.0
            for position, buffer in enumerate(buffers):
                expected = sum(share * shown[rank][2][position] for rank in edge.ranks)
                assert torch.allclose(buffer, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("said", "asked", "expected"),
    [([2, 2, 2, 2], None, (0, 0, 1, 1)), ([2, 2, 2, 2], 1, (0, 1, 2, 3)),
     *((said, None, (0, 0, 0, 1)) for said in ([None] * 4, [3, 3, 3, 1], [3, 3, 3, 3]))],
    ids=str,
)  # fmt: skip
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
