"""What counts as a step, what happens to gradients in it, and ranks that make fewer steps than others."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, DifferenceMix, Flight, LowPrecisionDecentralizedAlgorithm, TopKAlgorithm
from bagua.comm import ProcessGroup
from bagua.engine.buckets.registration import has_finite_gradients
from bagua.errors import BaguaError, CollectiveMismatchError, ConfigurationError, PeerLostError
from bagua.parallel import with_bagua
from tests.algorithms.stacked import Anchored
from tests.algorithms.test_toys import QuickOneBitAdam, QuickOneBitLamb, QuickQAdam
from tests.contract.algorithms import optimizer_maker
from tests.harness import State, assert_same_on_all_ranks, batch, loss_of, mlp, reference, sgd, snapshot, train_steps
from tests.parallel.test_models import ALGORITHMS, declared
from tests.parallel.wrapping import WRAPS, Branches, Loop, Made, assert_trained, branch_loss, by_with_bagua, on_ranks

BY_WEIGHTS = ["local_sgd", "slowmo", "diloco", "sparse_loco", "decentralized", "low_precision_decentralized"]
STEPS = 8


class Heads(nn.Module):
    """The head that is registered last is trained later, if ever."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.last = mlp(), nn.Linear(4, 4), nn.Linear(4, 4)
        for parameter in self.parameters():  # Threads share the generator.
            nn.init.constant_(parameter, 0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(inputs))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return nn.functional.mse_loss(self.first(self.body(inputs)), targets)


def by_a_method(model: Any, rank: int, step: int) -> None:
    model.loss(rank, step).backward()


def by_parts(model: Any, rank: int, step: int) -> None:
    inputs, targets = batch(rank, step)
    nn.functional.mse_loss(model.first(model.body(inputs)), targets).backward()


def by_assigning(model: Any, rank: int, step: int) -> None:
    parameters = [*model.body.parameters(), *model.first.parameters()]
    for one, gradient in zip(parameters, torch.autograd.grad(model.loss(rank, step), parameters), strict=True):
        one.grad = gradient


class Steps(Loop):
    """Each of its steps makes gradients in some way."""

    def __init__(self, name: str, way: Callable[..., None] = by_a_method) -> None:
        algorithm, self.way = declared(name), way
        options = {"algorithm": algorithm, "find_unused_parameters": True}
        super().__init__("with_bagua", Heads, optimizer_maker(algorithm), **options)

    def backward(self) -> None:
        self.step += 1
        self.way(self.model, self.rank, self.step - 1)


@pytest.mark.parametrize(
    ("name", "way", "size"),
    [*((name, way, 2) for name in ALGORITHMS for way in (by_a_method, by_parts)),
     *((name, by_assigning, 2) for name in BY_WEIGHTS),
     *((name, by_a_method, 1) for name in ("gradient_allreduce", "bytegrad", "local_sgd"))],
)  # fmt: skip
@on_ranks("size", assert_same_on_all_ranks)
def test_every_step_of_an_optimizer_counts(name, way: Callable[..., None], size: int) -> State:
    loop = Steps(name, way)
    state = loop.train(STEPS)
    assert loop.wrapped.bagua_step == STEPS
    if name in ("local_sgd", "slowmo", "diloco", "sparse_loco"):
        return state  # The last exchange was due after the last step.
    loop.wrapped.bagua_finish()
    return snapshot(loop.model)


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "gradient_allreduce"])
@pytest.mark.parametrize("trained", [["first"], ["last"], ["first", "last"]])
@on_ranks(2, assert_same_on_all_ranks)
def test_parts_of_a_container_train_in_turns(name, trained) -> State:
    """As the two networks of a GAN, which have an optimizer each."""
    rank = bagua.comm.get_rank()
    parts = nn.ModuleDict({"first": mlp(1), "last": mlp(2)})
    optimizers = {key: sgd(part.parameters()) for key, part in parts.items()}
    options = {"algorithm": declared(name), "find_unused_parameters": True}
    model: Any = by_with_bagua(parts, list(optimizers.values()), **options)
    for step in range(STEPS):
        for key in trained:
            train_steps(parts[key], optimizers[key], rank, [step])
    assert model.bagua_step == STEPS * len(trained)
    return snapshot(model)


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
@on_ranks(2, assert_same_on_all_ranks)
def test_an_update_that_one_rank_skips_is_a_step_also_by_a_method(name) -> State:
    loop = Steps(name)
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        loop.backward()
        if loop.rank or step:  # As a GradScaler after an overflow.
            loop.optimizer.step()
        else:
            loop.model.first.weight.grad.fill_(torch.inf)
    assert loop.wrapped.bagua_step == STEPS
    return snapshot(loop.model)


@pytest.mark.parametrize("times", [1, 3])
def test_gradients_that_were_not_exchanged_are_told_at_once(thread_ranks, caplog, times):
    thread_ranks(2, lambda: Steps("gradient_allreduce", by_assigning).train(times))
    assert caplog.text.count("optimizer 0 (SGD) steps with gradients that no backward pass has brought") == 1


@on_ranks(2)
def test_a_loss_that_is_a_method_stays_inside_no_sync_and_its_gradients_have_come(caplog):
    loop = Steps("gradient_allreduce")
    for step in range(3):
        loop.optimizer.zero_grad()
        before = bagua.comm.stats().get("allreduce")
        with loop.wrapped.no_sync():
            loop.backward()
        assert (bagua.comm.stats().get("allreduce"), loop.wrapped.bagua_step) == (before, step)
        loop.backward()
        loop.optimizer.step()
    assert "no backward pass" not in caplog.text


@on_ranks(2)
def test_a_change_that_no_forward_pass_could_take_in_is_an_error():
    loop = Steps("gradient_allreduce")
    loop.train()
    loop.model.first.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigurationError, match=r"first\.weight is another tensor now.*without a forward pass"):
        loop.backward()


# Sharpness-aware minimization: each rank steps up its own gradient, and down that of all.


def _climb(model: Any, rank: int, step: int, synchronized: bool = True) -> None:
    """Leave the gradient of a place a little further uphill; that by which it climbs is exchanged or not."""
    model.zero_grad()
    with contextlib.nullcontext() if synchronized else model.no_sync():
        loss_of(model, rank, step).backward()
    old = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=0.05)
    model.zero_grad()
    loss_of(model, rank, step).backward()
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), old, strict=True):
            parameter.copy_(before)


def _climb_and_descend(loop: Loop, synchronized: bool = False) -> State:
    for step in range(5):
        _climb(loop.wrapped, loop.rank, step, synchronized)
        loop.optimizer.step()
    return snapshot(loop.model)


def _sharpness_aware() -> State:
    """What two ranks come to, on one."""
    model = mlp()
    optimizer = sgd(model.parameters())
    for step in range(5):
        found = []
        for rank in range(2):
            _climb(model, rank, step)
            found.append([parameter.grad for parameter in model.parameters()])
        for parameter, *both in zip(model.parameters(), *found, strict=True):
            parameter.grad = sum(both) / 2
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("check_every", [0, 1, None])
@pytest.mark.parametrize("given", [True, False], ids=["with the optimizer", "without"])
def test_weights_may_differ_until_the_optimizer_has_stepped(thread_ranks, check_every, given):
    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return by_with_bagua(model, [optimizer] if given else [], check_every=check_every)

    assert_trained(thread_ranks(2, lambda: _climb_and_descend(Loop(wrap))), _sharpness_aware())


@on_ranks(2)
def test_unused_parameters_are_an_error_that_lists_them_on_every_rank():
    loop = Loop(make=Branches)
    with pytest.raises(BaguaError, match=r"never\.weight") as caught:
        branch_loss(loop.wrapped, loop.rank).backward()
    assert ("right.bias", "left.bias")[loop.rank] in str(caught.value)
    assert "find_unused_parameters" in str(caught.value)


@pytest.mark.parametrize("fusion", [True, False])
@on_ranks(2)
def test_what_error_feedback_brings_for_unused_parameters_is_not_lost(fusion):
    """A quarter of what is left is sent in each step, also when nobody uses the parameter any more."""

    def one_side(self: Any, side: str) -> torch.Tensor:
        return (self.left * torch.arange(1.0, 65.0)).sum() if side == "left" else (self.right * 0.0).sum()

    model = Made(one_side, **dict.fromkeys(("left", "right"), lambda: nn.Parameter(torch.zeros(64))))
    algorithm = TopKAlgorithm(ratio=0.125, warmup_steps=0, density_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = with_bagua(model, optimizer, algorithm, find_unused_parameters=True, do_flatten=fusion)
    for side in ("left", *("right",) * 4):
        optimizer.zero_grad()
        wrapped(side).backward()
        optimizer.step()
    assert (model.left.tolist(), model.left.grad is None) == ([-float(one) for one in range(1, 65)], True)


@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2, assert_same_on_all_ranks)
def test_lbfgs_calls_its_closure_several_times_in_a_step(wrap) -> State:
    loop = Loop(wrap, make_optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4))

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loss_of(loop.wrapped, loop.rank, loop.step)
        loss.backward()
        mean = loss.detach().clone()
        bagua.comm.allreduce(mean, bagua.comm.ReduceOp.AVG)
        return mean

    for loop.step in range(2):
        loop.optimizer.step(closure)
    return snapshot(loop.model)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("steps", [0, 2])
@on_ranks(2)
def test_backward_with_create_graph_is_refused(steps):
    loop = Loop()
    loop.train(steps)
    with pytest.raises(ConfigurationError, match="create_graph"):
        loop.loss().backward(create_graph=True)


def test_a_wrapped_module_inside_another_module(thread_ranks):
    """Only the backbone is wrapped; the head on top of it stays local."""

    def train() -> tuple[State, State]:
        backbone, head = mlp(), nn.Linear(4, 4)
        optimizer = sgd([*backbone.parameters(), *head.parameters()])
        model = nn.Sequential(by_with_bagua(backbone, sgd(backbone.parameters())), head)
        train_steps(model, optimizer, bagua.comm.get_rank(), range(3))
        return snapshot(backbone), snapshot(head)

    backbones, (head, other) = zip(*thread_ranks(2, train), strict=True)
    assert_same_on_all_ranks(backbones)
    assert not torch.equal(head["weight"], other["weight"])


def test_several_models_and_optimizers_in_one_process(thread_ranks):
    """Two models trained in turns, one of them with two optimizers, as in adversarial training."""

    def train() -> State:
        rank, both = bagua.comm.get_rank(), nn.ModuleList([mlp(1), mlp(2)])
        *halves, whole = [sgd(part.parameters()) for part in (both[0][:2], both[0][2:], both[1])]
        one, two = WRAPS["with_bagua"](both[0], halves), WRAPS["bagua_init"](both[1], whole)
        for step in range(4):
            both.zero_grad()
            (loss_of(one, rank, step) + loss_of(two, rank, step)).backward()
            for optimizer in (*halves, whole):
                optimizer.step()
        return snapshot(both)

    expected = [reference(mlp(seed), sgd, 2, range(4)) for seed in (1, 2)]
    merged = {f"{number}.{name}": value for number, state in enumerate(expected) for name, value in state.items()}
    assert_trained(thread_ranks(2, train), merged)


@pytest.mark.parametrize("attribute", ["_ddp_params_and_buffers_to_ignore", "_bagua_params_and_buffers_to_ignore"])
def test_ignored_parameters_stay_local(thread_ranks, attribute):
    def train() -> State:
        model = mlp(seed=bagua.comm.get_rank())
        setattr(model, attribute, ["0.weight"])
        Loop(make=lambda: model).backward()
        return snapshot(model) | {f"{name}.grad": one.grad for name, one in model.named_parameters()}

    first, second = thread_ranks(2, train)
    for name in first:
        assert torch.equal(first[name], second[name]) != (name in ("0.weight", "0.weight.grad")), name


@pytest.mark.parametrize("parts", [[slice(5)], [slice(1), slice(1, 5)]], ids=["one optimizer", "two"])
def test_ranks_leave_training_for_something_else_together(thread_ranks, parts):
    def train(together: bool) -> tuple[State, State, float]:
        """Weights, what neighbours know of them, and the scale at the end."""
        rank, model = bagua.comm.get_rank(), mlp()
        optimizers = [sgd(model[part].parameters()) for part in parts]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        wrapped = with_bagua(model, optimizers, "low_precision_decentralized", bucket_bytes=1000)
        for step in range(3):
            if (rank, step) == (1, 2):  # The gradients of one rank overflow in the last step.
                model[0].weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
            model.zero_grad()
            scaler.scale(loss_of(wrapped, rank, step)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        if together:
            bagua.comm.get_default_group().global_communicator.barrier()
        weights = snapshot(model) if together else wrapped.state_dict()
        known = wrapped.bagua_state_dict()[f"rank{rank}"]["parameters"]
        return weights, {name: state["estimate"] for name, state in known.items()}, scaler.get_scale()

    left, asked = thread_ranks(2, train, True, timeout_s=20), thread_ranks(2, train, False)
    assert [scale for *_, scale in left] == [4.0, 2.0], "one update was skipped, on one rank"
    for (weights, known, _), (same, _, _) in zip(left, asked, strict=True):
        # The last thing that changed weights is the exchange.
        assert_same_on_all_ranks([weights, known, same])


@pytest.mark.parametrize(
    ("value", "finite"), [(1.0, True), (3e38, True), (torch.inf, False), (-torch.inf, False), (torch.nan, False)]
)
def test_gradients_whose_norm_overflows_are_finite_all_the_same(value, finite):
    gradients = [torch.tensor([0.0, value, value]), torch.zeros(2, dtype=torch.float64), torch.empty(0)]
    gradients.append(torch.tensor([0.0, value]).to_sparse())
    parameters = [nn.Parameter(torch.zeros(one.shape, dtype=one.dtype)) for one in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    assert has_finite_gradients(sgd(parameters)) is finite


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_what_is_owed_survives_further_backward_passes(thread_ranks, monkeypatch, interval):
    """Two losses, one update: each backward pass is a step, and each update pays what the steps before it owe."""
    counted, run = Counter[int](), DifferenceMix.run

    def count(self: DifferenceMix, flight: Flight, group: ProcessGroup) -> None:
        counted[group.rank] += 1
        run(self, flight, group)

    def train() -> None:
        algorithm = LowPrecisionDecentralizedAlgorithm(communication_interval=interval)
        loop = Loop("with_bagua", algorithm=algorithm, bucket_bytes=10**6)
        for _ in range(6):
            loop.optimizer.zero_grad()
            loss = loop.loss()
            loss.backward(retain_graph=True)
            loss.square().backward()
            loop.optimizer.step()
        snapshot(loop.model)

    monkeypatch.setattr(DifferenceMix, "run", count)
    thread_ranks(2, train)
    due = [t for t in range(1, 13) if (t - 1) % interval == 0]
    assert counted == {rank: len({(t - 1) // 2 for t in due}) for rank in (0, 1)}


def test_weights_that_were_changed_by_no_optimizer_are_not_sent(thread_ranks):
    def train(synchronized: bool) -> State:
        return _climb_and_descend(Loop("with_bagua", algorithm="low_precision_decentralized"), synchronized)

    with pytest.raises(ConfigurationError, match=r"weights were changed.*no_sync"):
        thread_ranks(2, train, True)
    for state in thread_ranks(2, train, False):
        assert all(value.isfinite().all() for value in state.values())


@on_ranks(2)
def test_weights_may_be_loaded_in_place_of_an_update():
    loop = Loop("with_bagua", algorithm="low_precision_decentralized")
    before, started = snapshot(loop.wrapped), []
    for step in range(4):
        loop.optimizer.zero_grad()
        loop.backward()
        loop.model.load_state_dict(before) if step == 2 else loop.optimizer.step()
        started.append(all(torch.equal(one, before[name]) for name, one in loop.model.named_parameters()))
    assert started == [False, False, True, False]


# Ranks with more data than others: no rank waits without end, and results are those of torch.

ONE_BUCKET_BYTES = 10**9
RANKS = 3
#: Batches of each rank.
BATCHES = (2, 6, 4)


def joined(loop, batches, **options):
    """The weights after so many batches of each rank in a ``join`` block."""
    with loop.wrapped.join(**options):
        loop.train(batches[loop.rank])
    return snapshot(loop.model)


def losses_of(batches, by_initial_size=True):
    """Ranks that have no data left have gradients of zero; the mean is that of all ranks, or of those who have data."""

    def loss(model, rank, step):
        here = len(batches) if by_initial_size else sum(step < one for one in batches)
        return loss_of(model, rank, step) * (step < batches[rank]) * len(batches) / here

    return loss


@pytest.mark.parametrize("by_initial_size", [True, False])
@pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET_BYTES, 64])
def test_gradients_of_those_who_have_data_are_averaged_as_in_torch(thread_ranks, by_initial_size, bucket_bytes):
    def rank_trains():
        loop = Loop(with_bagua, bucket_bytes=bucket_bytes, check_every=1)
        in_the_end = joined(loop, BATCHES, divide_by_initial_world_size=by_initial_size)
        return in_the_end, loop.train()  # All go on together, and are compared.

    ends, later = zip(*thread_ranks(RANKS, rank_trains), strict=True)
    expected = reference(mlp(), sgd, RANKS, range(max(BATCHES)), losses_of(BATCHES, by_initial_size))
    torch.testing.assert_close(ends, (expected,) * RANKS)
    assert_same_on_all_ranks(later)


PERIOD = 3
#: Batches of each rank in the three periods of a run. The ``join`` block begins after one step of the second.
IN_PERIOD = ((3, 3, 3), (1, 3, 3), (0, 3, 1))


def expected_alone(outer):
    """In plain torch: ranks train alone, and all count alike in a mean, with data or without."""
    ranks, made = Anchored(RANKS, outer, make_optimizer=sgd), [0] * RANKS
    for batches in IN_PERIOD:
        for rank, (model, optimizer) in enumerate(zip(ranks.models, ranks.optimizers, strict=True)):
            train_steps(model, optimizer, rank, range(made[rank], made[rank] + batches[rank]))
            made[rank] += batches[rank]
        ranks.outer_step()
    return snapshot(ranks.models[0])


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_ranks_that_train_alone_all_count_alike(thread_ranks, name):
    options = {"outer_lr": 0.7, "outer_momentum": 0.5} if name == "diloco" else {}
    inside = {"lr": 0.7, "momentum": 0.5, "nesterov": True} if options else {"lr": 1.0}

    def rank_trains():
        loop = Loop(with_bagua, algorithm=Algorithm.init(name, sync_every=PERIOD, **options))
        loop.train(PERIOD + 1)  # Nothing is due in the next step.
        return joined(loop, [sum(batches) - 1 for batches in zip(*IN_PERIOD[1:], strict=True)])

    expected = expected_alone(functools.partial(torch.optim.SGD, **inside))
    torch.testing.assert_close(thread_ranks(RANKS, rank_trains), [expected] * RANKS)


JOINED = [QuickQAdam(), QuickOneBitAdam(), QuickOneBitLamb()]
JOINED += map(Algorithm.init, ("gradient_allreduce", "bytegrad", "dion"))


@pytest.mark.parametrize("batches", [(0, 8), (1, 8), (5, 8)])
@pytest.mark.parametrize("algorithm", JOINED, ids=repr)
def test_a_rank_without_data_is_one_whose_gradients_are_zero(thread_ranks, algorithm, batches):
    """Momenta, too: one that stood still would add what is old in every step that follows."""

    def rank_trains(joins):
        options = {"algorithm": algorithm, "bucket_bytes": ONE_BUCKET_BYTES}
        loop = Loop("with_bagua", mlp, optimizer_maker(algorithm), losses_of(batches), **options)
        return joined(loop, batches if joins else [max(batches)] * 2, enable=joins)

    assert_same_on_all_ranks(thread_ranks(2, rank_trains, True) + thread_ranks(2, rank_trains, False))


@on_ranks(2, assert_same_on_all_ranks)
def test_weights_are_exchanged_although_no_optimizer_tells_of_its_steps():
    loop = Loop(lambda model, _: with_bagua(model, [], Algorithm.init("local_sgd", sync_every=1)))
    return joined(loop, (1, 3))


@on_ranks(2)
def test_state_of_the_optimizer_comes_from_a_rank_that_has_stepped():
    loop = Loop("with_bagua", mlp, torch.optim.Adam)
    joined(loop, (1, 3))
    assert [float(state["step"]) for state in loop.optimizer.state_dict()["state"].values()] == [3.0] * 6


@on_ranks(2, assert_same_on_all_ranks)
def test_buffers_come_from_a_rank_that_has_data():
    loop = Loop("data_parallel", lambda: nn.Sequential(mlp(), nn.BatchNorm1d(4)))
    joined(loop, (1, 4))
    assert int(loop.model[1].num_batches_tracked) == 4
    return snapshot(loop.model[1])


@on_ranks(2, assert_same_on_all_ranks)
def test_accumulated_gradients_are_no_steps():
    loop = Loop(with_bagua)
    with loop.wrapped.join():
        for _ in range((2, 3)[loop.rank]):
            with loop.wrapped.no_sync():
                loop.backward()
            loop.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        with loop.wrapped.no_sync():  # What is left over of the data.
            loop.backward()
    return snapshot(loop.model)


@on_ranks(RANKS, assert_same_on_all_ranks)
def test_early_ends_are_errors_on_all_ranks_if_that_is_wanted():
    loop = Loop(with_bagua)
    caught = pytest.raises(CollectiveMismatchError, match="some ranks have no data left")
    with caught as told, loop.wrapped.join(throw_on_early_termination=True):
        loop.train(BATCHES[loop.rank])
    assert told.value.peers == (0,)
    return loop.train()


@on_ranks(2, assert_same_on_all_ranks)
def test_a_forward_pass_without_a_backward_pass_is_made_a_step():
    loop = Loop(with_bagua)
    with loop.wrapped.join():
        loop.train((1, 3)[loop.rank])
        if loop.rank == 0:
            loop.loss()
    return snapshot(loop.model)


@pytest.mark.parametrize(
    ("algorithm", "options", "why"),
    [("diloco", {"divide_by_initial_world_size": False}, "only gradients of the same step"),
     ("gradient_allreduce", {"enable": 1}, "argument enable"), ("async", {}, "do not wait for each other's steps")],
)  # fmt: skip
@on_ranks(2)
def test_bad_use_is_refused(algorithm, options, why):
    with pytest.raises(ConfigurationError, match=why), Loop(with_bagua, algorithm=algorithm).wrapped.join(**options):
        pass


@on_ranks(2)
def test_a_step_that_ranks_without_data_do_not_know_of_is_refused():
    """Two forward passes announce one step, so two backward passes behind them would be one too many."""
    loop = Loop(with_bagua)
    why, error = ("without a forward pass of its own", ConfigurationError) if loop.rank else ("rank 1", PeerLostError)
    with pytest.raises(error, match=why), loop.wrapped.join():
        first, second = loop.loss(), loop.loss()
        first.backward()
        if loop.rank:
            second.backward()
