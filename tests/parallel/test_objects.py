"""A wrapped module stays an ordinary object of its own class: names, copies, files, ``torch.compile``; its buffers."""

import contextlib
import copy
import logging
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import bagua.comm
from bagua.algorithms import GradientAllReduceAlgorithm, LocalSGDAlgorithm
from bagua.comm.transports.shm.memory import find
from bagua.errors import ConfigurationError
from bagua.parallel import allreduce_parameters, with_bagua
from bagua.torch_api import BaguaModule, bagua_init, unwrap
from tests import harness
from tests.harness import State, assert_close, assert_same_on_all_ranks, loss_of, mlp, seeded, sgd, snapshot
from tests.parallel.wrapping import WRAPS, Loop, by_bagua_init, by_with_bagua, file_of, on_ranks


def _trained(wrap: str) -> Loop:
    loop = Loop(wrap)
    loop.train(3)
    return loop


@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2)
def test_state_dict_has_the_keys_of_the_plain_module_or_ddps_prefix_and_loads_back(wrap):
    loop, plain = _trained(wrap), mlp(seed=3)
    prefix = "module." if wrap == "data_parallel" else ""
    inside = loop.wrapped.module if prefix else loop.wrapped
    assert list(loop.wrapped.state_dict()) == [prefix + name for name in plain.state_dict()]
    assert list(inside.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(inside.state_dict())
    loop.train(2)
    result = loop.wrapped.load_state_dict({prefix + name: value for name, value in plain.state_dict().items()})
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_on_all_ranks([snapshot(loop.model), snapshot(plain)])


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("what", [dict, lambda state: next(iter(state.values()))], ids=["state_dict", "one tensor"])
@on_ranks(2)
def test_saved_tensors_do_not_drag_a_bucket_into_the_file(wrap, what):
    saved, plain = (file_of(what(model.state_dict())) for model in (_trained(wrap).wrapped, mlp()))
    assert saved.getbuffer().nbytes <= plain.getbuffer().nbytes * 1.2 + 500


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size", assert_same_on_all_ranks)
def test_a_copy_is_a_plain_module_without_engine_and_the_original_trains_on(wrap, way, size) -> State:
    loop = _trained(wrap)
    copied = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda module: pickle.loads(pickle.dumps(module)),
        "torch.save": lambda module: torch.load(file_of(module), weights_only=False),
    }[way](loop.wrapped)
    before = snapshot(loop.model)
    assert_same_on_all_ranks([before, {n.removeprefix("module."): v for n, v in snapshot(copied).items()}])
    assert type(copied) is type(mlp()), "a plain unwrapped module of the user's class"
    assert vars(copied).keys() == vars(mlp()).keys(), "no attribute of ours"
    if loop.rank == 0:  # One rank alone: nothing of the engine can be left in the copy.
        harness.train_steps(copied, sgd(copied.parameters()), 0, range(2))
    assert_same_on_all_ranks([before, snapshot(loop.model)])
    return loop.train(3)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_one_rank_alone_has_no_hooks_on_its_parameters(wrap, size):
    loop = _trained(wrap)  # Without its wrapper, a model loses the hooks.
    assert {bool(parameter._post_accumulate_grad_hooks) for parameter in loop.model.parameters()} == {size > 1}


@on_ranks(3, assert_same_on_all_ranks)
def test_wrapping_leaves_initial_values_of_rank_0_everywhere() -> State:
    rank = bagua.comm.get_rank()
    model = nn.Sequential(mlp(seed=rank), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(float(rank + 5))
    by_bagua_init(model, sgd(model.parameters()))
    assert model[1].running_mean.tolist() == [5.0] * 4
    return snapshot(model)


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@on_ranks(2)
def test_of_two_engines_on_one_model_only_the_later_one_works(find_unused_parameters):
    """The sum over ranks, unlike the mean, shows when gradients are exchanged twice."""
    rank, model, expected = bagua.comm.get_rank(), mlp(), mlp()
    optimizer, total = sgd(model.parameters()), GradientAllReduceAlgorithm(average=False)
    options = {"find_unused_parameters": find_unused_parameters, "bucket_bytes": 10**6}

    def backward(wrapped: nn.Module, *steps: int) -> None:
        for step in steps:
            model.zero_grad()
            loss_of(wrapped, rank, step).backward()

    first = by_with_bagua(model, optimizer, algorithm=total, **options)
    backward(first, 0, 1)
    second, _ = bagua_init(first, optimizer, total, **options)
    backward(second, 0, 1, 2)
    before = bagua.comm.stats()["allreduce"].calls
    backward(second, 3)
    assert bagua.comm.stats()["allreduce"].calls - before == (2 if find_unused_parameters else 1)
    harness.mean_gradients(expected, 2, lambda model, rank: 2 * loss_of(model, rank, 3))
    assert_close(harness.gradients(model), harness.gradients(expected))


@on_ranks(1)
def test_modules_of_one_class_are_still_of_one_class():
    first, second = (by_with_bagua(mlp(), []) for _ in range(2))
    assert type(first) is type(second)


@on_ranks(2)
def test_names_of_the_user_stay_the_users():
    class Named(nn.Module):
        """Has submodules and a method with names that other libraries would take for their own."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()
            self.join, self.no_sync, self.global_average = nn.Identity(), nn.Identity(), nn.Identity()

        def switch_to(self, task: str) -> str:
            return task

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layers(self.join(self.no_sync(self.global_average(inputs))))

    loop = Loop("with_bagua", Named)
    loop.train(2)
    assert loop.wrapped.switch_to("segment") == "segment"
    assert isinstance(loop.wrapped.join, nn.Identity)
    assert isinstance(copy.deepcopy(loop.wrapped).no_sync, nn.Identity)
    with BaguaModule.join(loop.wrapped):
        loop.train(1)
    assert loop.wrapped.bagua_step == 3


@on_ranks(2)
def test_a_registry_of_subclasses_sees_nothing_of_us():
    class Registered(nn.Sequential):
        """Keeps a registry of its subclasses, and asks each for a keyword."""

        known: ClassVar[list[str]] = []

        def __init_subclass__(cls, *, task: str) -> None:
            if task in cls.known:
                raise ValueError(f"{task} already registered")
            cls.known.append(task)

    class Classifier(Registered, task="classify"):
        pass

    loop = Loop("with_bagua", lambda: Classifier(*mlp()))
    loop.train(2)
    assert type(loop.wrapped) is Classifier
    assert Registered.known == ["classify"]


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_a_parametrized_root_is_copied_and_loses_its_parametrization(when):
    class Scaled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    model = nn.Linear(8, 4)
    if when == "before":
        parametrize.register_parametrization(model, "weight", Scaled())
    loop = Loop("with_bagua", lambda: model)
    if when == "after":
        parametrize.register_parametrization(model, "weight", Scaled())
    loop.train(2)
    copied = copy.deepcopy(loop.wrapped)
    assert not isinstance(copied, BaguaModule)
    torch.testing.assert_close(copied(torch.ones(1, 8)), loop.wrapped(torch.ones(1, 8)))
    parametrize.remove_parametrizations(loop.model, "weight")
    assert type(loop.model) is nn.Linear


def _globals_of(value: object) -> set[str]:
    """What a file of ``torch.save`` makes its reader import."""
    archive = zipfile.ZipFile(file_of(value))
    text = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return {str(argument) for code, argument, _ in pickletools.genops(text) if code.name == "GLOBAL"}


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd"])
@pytest.mark.parametrize("inside", [False, True])
def test_the_file_of_a_wrapped_model_is_that_of_the_plain_one(thread_ranks, algorithm, inside):
    def save() -> None:
        loop = Loop("with_bagua", algorithm=algorithm)
        loop.train(2)
        saved, plain = (nn.Sequential(one) if inside else one for one in (loop.wrapped, mlp()))
        assert _globals_of(saved) == _globals_of(plain)
        loaded = torch.load(file_of(saved), weights_only=True)
        assert_same_on_all_ranks([snapshot(saved), snapshot(loaded)])

    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU, set]):
        thread_ranks(2, save)


@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2)
def test_the_plain_module_behind_a_wrapped_one(wrap):
    loop = Loop(wrap)
    loop.train(2)
    plain = unwrap(loop.wrapped)
    assert type(plain) is nn.Sequential
    assert [*map(id, plain.parameters())] == [*map(id, loop.model.parameters())]
    assert "bagua" not in str(_globals_of(plain))
    assert unwrap(plain) is plain


@on_ranks(2)
def test_a_module_that_refers_to_itself_is_copied():
    class Referring(nn.Sequential):
        """Refers to itself, as a module with a table of its own methods does."""

        def __init__(self) -> None:
            super().__init__(*mlp())
            self.table = {"forward": self.forward, "self": [self]}

    loop = Loop("with_bagua", Referring)
    loop.train(1)
    copied = copy.deepcopy(loop.wrapped)
    assert copied.table["self"][0] is copied
    loop.train(1)
    assert type(copy.copy(loop.wrapped)) is Referring


@pytest.mark.parametrize("wrap", ["with_bagua", "data_parallel"])
@on_ranks(2, lambda rows: assert_same_on_all_ranks([state for row in rows for state in row]))
def test_the_switch_that_nanogpt_turns_does_what_no_sync_does(wrap) -> list[State]:
    """Gradients of two micro-steps, of which the first is not to be exchanged."""
    found = []
    for by_attribute in (False, True):
        loop = Loop(wrap)
        loop.train(1)
        loop.model.zero_grad()
        calls = bagua.comm.stats()["allreduce"].calls
        if by_attribute:
            loop.wrapped.require_backward_grad_sync = False
        with contextlib.nullcontext() if by_attribute else loop.wrapped.no_sync():
            assert not loop.wrapped.require_backward_grad_sync
            loop.backward()
        if by_attribute:
            loop.wrapped.require_backward_grad_sync = True
        assert bagua.comm.stats()["allreduce"].calls == calls
        assert loop.wrapped.require_backward_grad_sync
        loop.backward()
        found.append(harness.gradients(loop.model))
    return found


@on_ranks(1)
def test_a_plain_module_says_that_it_was_not_wrapped():
    loop = Loop("with_bagua")
    plain: Any = copy.deepcopy(loop.wrapped)
    assert plain.bagua_step is None
    assert [name for name in dir(plain) if not hasattr(plain, name)] == []
    with pytest.raises(ConfigurationError, match=r"bagua_finish is a call of a wrapped module.*Sequential"):
        plain.bagua_finish()
    outer: Any = torch.compile(loop.wrapped, backend="eager")
    assert outer.bagua_step == 0


class OwnForward(nn.Module):
    """Dynamo compiles frames of user code only; ``nn.Sequential`` alone has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0
        torch._dynamo.reset()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def _train_compiled(wrap: str, in_place: bool) -> tuple[State, int]:
    """The trained model, and how often it was compiled after the third step."""
    backend = Counting()

    def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        if in_place:
            model.compile(backend=backend)
        return WRAPS[wrap](model if in_place else torch.compile(model, backend=backend), optimizer)

    loop = Loop(compiled, OwnForward)
    loop.train(3)
    before = backend.graphs
    assert before > 0, "this test can fail"
    return loop.train(6), backend.graphs - before


def _export() -> None:
    """A wrapped model is exported, strictly or not, and trains on as before."""
    loop = Loop("with_bagua", OwnForward)
    loop.train()
    inputs = (torch.ones(1, 8),)
    for strict in (True, False):
        exported = torch.export.export(loop.wrapped, inputs, strict=strict).module()
        assert_close({"output": exported(*inputs)}, {"output": loop.model(*inputs)})
    loop.train()
    assert loop.wrapped.bagua_step == 2


def _graphs_of_the_optimizer(wrap: bool) -> int:
    backend = Counting()
    loop = Loop("with_bagua" if wrap else lambda model, _: model, OwnForward)
    step = torch.compile(loop.optimizer.step, backend=backend)
    for _ in range(4):
        loop.optimizer.zero_grad()
        loop.backward()
        with warnings.catch_warnings():  # Of torch, about its own ways to compile.
            warnings.simplefilter("ignore", DeprecationWarning)
            step()
    return backend.graphs


def _train_every_way() -> dict[str, tuple[State, int]]:
    # In one go: torch._dynamo takes seconds to import.
    _export()
    assert _graphs_of_the_optimizer(True) == _graphs_of_the_optimizer(False) > 0
    return {f"{wrap}, in place: {in_place}": _train_compiled(wrap, in_place) for wrap in WRAPS for in_place in (0, 1)}


def test_compiled_models_train_alike_and_are_compiled_once(process_ranks):
    first, second = process_ranks(2, _train_every_way)
    expected = harness.reference(OwnForward(), sgd, 2, range(9))
    for way, (state, compiled_again) in first.items():
        assert compiled_again == second[way][1] == 0, way
        assert_same_on_all_ranks([state, second[way][0]])
        assert_close(state, expected)


# Means of buffers, and the memory that a wrapped model needs.


class Masked(nn.Module):
    """A model with statistics, which have means, beside constants, which are equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 4)
        self.register_buffer("causal", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("lowest", torch.full((4, 4), torch.finfo(torch.float32).min).triu(1))
        self.register_buffer("table", torch.linspace(0.1, 0.9, 7).sin())
        self.register_buffer("narrow", torch.linspace(0.1, 0.9, 7).to(torch.bfloat16))
        self.register_buffer("peak", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(inputs)) @ (self.causal.exp() + self.lowest.exp())


#: Ways to the means of buffers, and the algorithm that trains meanwhile.
WAYS = {
    "average_buffers": LocalSGDAlgorithm(2, average_buffers=True),
    "finish of diloco": "diloco",
    "finish of decentralized": "decentralized",
    "global_average": "diloco",
    "allreduce_parameters": None,
}


def buffers_of(model: nn.Module) -> State:
    return {name: one.clone() for name, one in model.named_buffers()}


def averaged(model: nn.Module, way: str) -> State:
    """After two steps, other inputs on each rank; in the second, the peak of the last rank is not a number."""
    rank, optimizer = bagua.comm.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
    if WAYS[way] is not None:
        with_bagua(model, [optimizer], WAYS[way])
    for step in range(2):
        optimizer.zero_grad()
        model(torch.arange(24.0).view(6, 4) + 10 * rank).mean().backward()
        if step == 1:
            model.peak.fill_(torch.nan if rank == bagua.comm.get_world_size() - 1 else float(rank))
        optimizer.step()
    if way == "global_average":
        own = buffers_of(model)
        with model.bagua_global_average():
            inside = buffers_of(model)
        assert all(torch.equal(one, own[name]) or one.isnan().any() for name, one in model.named_buffers())
        return inside
    if way == "allreduce_parameters":
        allreduce_parameters(model)
    elif way != "average_buffers":
        model.bagua_finish()
    return buffers_of(model)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_each_buffer_is_averaged_by_itself_and_constants_stay(thread_ranks, way, ranks, caplog):
    def check() -> tuple[State, State]:
        with seeded():
            model = Masked()
        return buffers_of(model), averaged(model, way)

    with caplog.at_level(logging.WARNING, "bagua"):
        results = thread_ranks(ranks, check)
    constants, means = ("causal", "lowest", "table", "narrow"), ("norm.running_mean", "norm.running_var")
    for pair in results:
        assert_same_on_all_ranks([{name: state[name] for name in constants} for state in pair])
    assert_same_on_all_ranks([{name: after[name] for name in means} for _, after in results])
    middle = torch.tensor([10.0, 11.0, 12.0, 13.0]) + 5 * (ranks - 1)  # of the batches of all ranks
    assert torch.allclose(results[0][1]["norm.running_mean"], 0.19 * middle, rtol=1e-4)
    assert [after["peak"].item() for _, after in results[:-1]] == [float(rank) for rank in range(ranks - 1)]
    told = [one.getMessage() for one in caplog.records if "is not finite" in one.getMessage()]
    assert ["Buffer peak" in one for one in told] == [True] * (ranks - 1)


@pytest.mark.parametrize("inside", [False, True], ids=["finish", "global_average"])
@on_ranks(2)
def test_one_forward_pass_finds_the_singular_vectors_of_the_mean(inside):
    """The spectral norm of a layer is held at 1: by the mean over ranks it is not, until a forward pass in train()."""
    rank = bagua.comm.get_rank()
    with seeded():
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    wrapped = with_bagua(model, [optimizer], LocalSGDAlgorithm(100))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(60):
        optimizer.zero_grad()
        inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
        (wrapped(inputs * (1 + 2 * rank)) - 3 * targets).square().mean().backward()
        optimizer.step()

    vectors = [one.clone() for one in model.buffers()]
    if not inside:
        wrapped.bagua_finish()
    with wrapped.bagua_global_average() if inside else contextlib.nullcontext():
        norms = []
        for _ in range(2):
            norms.append(torch.linalg.matrix_norm(model.eval()[0].weight, 2).item())
            with torch.no_grad():
                model.train()(inputs)
    assert not inside or all(map(torch.equal, vectors, model.buffers()))
    of_mean, found = norms
    assert abs(found - 1) < min(0.03, abs(of_mean - 1))


def _train_within(extra_bytes: int) -> int:
    """Bytes of a model, its gradients and its optimizer after some steps; wrapped they take so many more at most."""
    for name in (*WRAPS, "plain"):
        kept = harness.live_tensors()  # What an earlier test left must not end meanwhile: its bytes would be missing.
        before = harness.live_bytes()
        loop = Loop(name if name in WRAPS else lambda model, _: model)
        loop.train(3)
        of_model = 3 * sum(parameter.nbytes for parameter in loop.model.parameters())
        if name in WRAPS:  # A thread of Gloo holds what it has sent for a moment longer than the call takes.
            harness.until(lambda before=before, most=of_model + extra_bytes: harness.live_bytes() - before <= most)
        held = harness.live_bytes() - before
        del loop, kept
    return held


def test_extra_memory_is_at_most_one_buffer_of_the_gradients_size(process_ranks):
    sizes = [parameter.nbytes for parameter in mlp().parameters()]
    gradient_bytes, alignment_bytes = sum(sizes), 64 * 2 * len(sizes)
    plain = process_ranks(2, _train_within, gradient_bytes + alignment_bytes)
    assert plain == [3 * gradient_bytes] * 2, "weights, gradients, momentum; this test can fail"


@on_ranks(2, pool="shm_pool")
def test_fused_gradients_lie_in_one_segment():
    """They are reduced where they lie."""
    wide = nn.Sequential(nn.Linear(8, 8192), nn.ReLU(), nn.Linear(8192, 4))
    loop = Loop("with_bagua", lambda: wide, bucket_bytes=10**7)
    loop.train(3)
    segments = {getattr(find(parameter.grad), "number", None) for parameter in wide.parameters()}
    assert None not in segments
    assert len(segments) == 1
