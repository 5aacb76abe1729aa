"""Tuning during training: settings change on all ranks in the same step, and training is what it was."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import GradientAllReduceAlgorithm
from bagua.engine.autotune import Sweep, settings_of
from bagua.engine.options import Setting
from bagua.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError, ConfigurationError
from bagua.torch_api import bagua_init
from tests.algorithms.test_toys import LocalSgd, Rounded
from tests.harness import OptimizerMaker, State, adam, assert_same_on_all_ranks, mlp, reference, sgd, snapshot
from tests.parallel.wrapping import Loop, Made, assert_trained, on_ranks

#: The settings that give mlp() different buckets: each parameter alone, weights with their bias, half, everything.
SIZES = [1, 1024, 2048]


def score_of(setting: Setting) -> float:
    """Made up: buckets of 1 KiB are best, the hierarchical form is better."""
    return {1: 1.0, 1024: 3.0, 2048: 2.0}[setting.bucket_bytes] + 0.5 * setting.hierarchical


def tuned(*algorithm: object, make_optimizer: OptimizerMaker = sgd, **options: object) -> Loop:
    """A model whose buckets hold one parameter each, to begin with."""
    return Loop(lambda *made: bagua_init(*made, *algorithm, **{"message_size": 1, **options})[0], mlp, make_optimizer)


def setting_of(loop: Loop) -> Setting:
    return loop.reducer.formation.setting


def tune_by_hand(loop: Loop, steps: int, score=score_of) -> list[Setting]:
    """Train, report and ask after every step; the setting of each step."""
    settings = []
    for _ in range(steps):
        loop.train()
        before = setting_of(loop)
        settings.append(before)
        loop.wrapped.report_metrics([score(before)])
        assert loop.wrapped.ask_and_update_hyperparameters() == (setting_of(loop) != before)
    return settings


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1]], ids=str)
def test_the_best_setting_is_found_and_training_does_not_notice(thread_ranks, caplog, hosts):
    caplog.set_level("INFO", logger="bagua.autotune")

    def train():
        loop = tuned(make_optimizer=adam)
        settings = tune_by_hand(loop, 30)
        assert loop.wrapped.bagua_algorithm.options.hierarchical == setting_of(loop).hierarchical
        assert len(loop.wrapped.bagua_buckets) == {1: 6, 1024: 2}[setting_of(loop).bucket_bytes]
        return settings, snapshot(loop.model)

    (settings, *others), states = zip(*thread_ranks(sum(hosts), train, hosts=hosts), strict=True)
    several_levels = max(hosts) > 1
    assert all(other == settings for other in others), "all ranks change in the same step"
    assert {setting.bucket_bytes for setting in settings} == set(SIZES)
    assert {setting.hierarchical for setting in settings} == {False, True} if several_levels else {False}
    assert settings[-5:] == [Setting(1024, several_levels)] * 5
    (told,) = [record.message for record in caplog.records if record.name == "bagua.autotune"]
    assert told.startswith(f"chose {Setting(1024, several_levels)} after "), "rank 0 says it, once"
    assert_trained(states, reference(mlp(), adam, sum(hosts), range(30)))


@pytest.mark.parametrize(("size", "algorithm"), [(1, "allreduce"), (2, "async")])
@on_ranks("size")
def test_where_there_is_nothing_to_tune_asking_changes_nothing(size, algorithm):
    assert set(tune_by_hand(tuned(algorithm), 8)) == {Setting(1)}


@on_ranks(2, assert_same_on_all_ranks)
def test_what_an_algorithm_remembers_survives_every_change() -> State:
    """Rounding leaves a residual for each element; were it lost or mixed up, the weights would differ."""
    still, loop = (tuned(Rounded(grain=2.0**-4)) for _ in range(2))
    assert len(set(tune_by_hand(loop, 20))) == 3
    assert_same_on_all_ranks([still.train(20), snapshot(loop.model)])
    return snapshot(loop.model)


@on_ranks(3, hosts=[2, 1])
def test_an_algorithm_with_a_memory_keeps_its_form():
    loop = tuned(GradientAllReduceAlgorithm())
    loop.backward()
    assert len({one.hierarchical for one in settings_of(loop.reducer.formation)}) == 2
    loop.reducer.scheduler.places[0].memory.state["residual"] = torch.zeros(1)
    assert len({one.hierarchical for one in settings_of(loop.reducer.formation)}) == 1


@on_ranks(2)
def test_a_change_of_the_model_is_tuned_anew():
    loop = tuned(find_unused_parameters=True)
    tune_by_hand(loop, 20)
    assert loop.wrapped._bagua_engine.tuner._final
    loop.model[4].requires_grad_(False)
    first, *_ = tune_by_hand(loop, 20, lambda setting: float(setting.bucket_bytes))
    assert loop.wrapped._bagua_engine.tuner._final
    assert (first, setting_of(loop)) == (Setting(1024), Setting(2048))


@on_ranks(2)
def test_a_loaded_layout_makes_way():
    """A checkpoint brings the buckets of its time; tuning begins with those of the size in force."""
    loop = tuned(message_size=2048)
    loop.train(2)
    saved = loop.wrapped.bagua_state_dict()
    loop = tuned()
    loop.wrapped.bagua_load_state_dict(saved)
    assert len(loop.wrapped.bagua_buckets) == 1
    loop.wrapped.report_metrics([1.0])
    assert loop.wrapped.ask_and_update_hyperparameters() is False, "the size is what it was"
    assert len(loop.wrapped.bagua_buckets) == 6
    tune_by_hand(loop, 18)
    assert setting_of(loop) == Setting(1024)


@on_ranks(3, hosts=[2, 1])
def test_buckets_that_the_user_wants_stay():
    names = [name for name, _ in mlp().named_parameters()]
    loop = tuned(buckets=[names[3:], names[:3]])
    settings = tune_by_hand(loop, 8, lambda setting: float(setting.hierarchical))
    assert [sorted(bucket.names) for bucket in loop.wrapped.bagua_buckets] == [sorted(names[3:]), sorted(names[:3])]
    assert {setting.hierarchical for setting in settings} == {False, True}


@on_ranks(2)
def test_mixed_dtypes_keep_the_order_of_their_gradients():
    """Settings with few buckets must not spoil the order for settings with many."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs.to(layer.weight.dtype))
        return inputs

    dtypes = (torch.float32, torch.float64) * 2
    alternating = Made(forward, layers=lambda: nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)))
    wrapped, _ = bagua_init(alternating, [], message_size=1)
    wrapped(torch.ones(1, 4)).sum().backward()
    reducer = wrapped._bagua_engine.reducer
    before = [bucket.names for bucket in wrapped.bagua_buckets]
    reducer.formation.recut(Setting(2**20))
    assert len(wrapped.bagua_buckets) == 2
    reducer.formation.recut(Setting(1))
    assert [bucket.names for bucket in wrapped.bagua_buckets] == before


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@on_ranks(2)
def test_buckets_that_are_no_longer_used_are_gone_at_once():
    """Not when the garbage collector finds them: several generations of a large model's buckets would not fit."""
    loop = tuned()
    loop.train(2)
    loop.wrapped.report_metrics([1.0])
    assert loop.wrapped.ask_and_update_hyperparameters() is False, "it only begins"
    before = [weakref.ref(bucket) for bucket in loop.wrapped.bagua_buckets]
    loop.reducer.formation.recut(Setting(2048))
    assert [bucket() for bucket in before] == [None] * 6


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_sweep_measures_all_and_the_best_again(noise):
    settings = [Setting(2**power) for power in range(10, 20)]
    scores = {setting: 1.0 - 0.2 * abs(power - 14) for setting, power in zip(settings, range(10, 20), strict=True)}
    sweep, random = Sweep(settings), torch.Generator().manual_seed(0)
    while (setting := sweep.following()) is not None:
        sweep.samples[setting].append(scores[setting] + noise * float(torch.rand(1, generator=random)))
    assert sweep.best == Setting(2**14)
    assert [len(samples) for samples in sweep.samples.values()] == [3 if one == sweep.best else 1 for one in settings]


def test_one_lucky_sample_decides_nothing():
    first, second = Setting(1), Setting(2)
    sweep = Sweep([first, second])
    for score in (1.0, 1.05, 1.0, 0.7, 1.0):  # The second one is lucky the first time.
        sweep.samples[sweep.following()].append(score)
    assert sweep.best == first
    assert sweep.following() is None


# What goes wrong.


@pytest.mark.parametrize("scores", [[float("nan")], [1.0, float("inf")]], ids=str)
@on_ranks(2)
def test_scores_that_cannot_be_compared_are_refused_and_do_not_count(scores):
    loop = tuned()
    loop.train(2)
    if loop.rank == 1:
        with pytest.raises(ConfigurationError, match="score_record_list"):
            loop.wrapped.report_metrics(scores)
    else:
        loop.wrapped.report_metrics([1.0])
    with pytest.raises(ConfigurationError, match="ranks 1 "):
        loop.wrapped.ask_and_update_hyperparameters()


@on_ranks(2)
def test_asking_at_different_steps_is_an_error_on_all_ranks_and_can_be_survived():
    loop = tuned(LocalSgd(period=100))
    loop.train(2 + loop.rank)
    loop.wrapped.report_metrics([1.0])
    with pytest.raises(CollectiveMismatchError, match="step") as caught:
        loop.wrapped.ask_and_update_hyperparameters()
    assert (caught.value.expected, caught.value.peers) == (f"step {2 + loop.rank}", (1 - loop.rank,))
    loop.train(2 - loop.rank)
    assert loop.wrapped.ask_and_update_hyperparameters() is False


@on_ranks(3)
def test_a_rank_that_does_not_ask_is_named_and_set_free():
    loop = tuned()
    loop.train(2)
    bagua.comm.barrier()
    if loop.rank == 1:
        with pytest.raises(CommunicationError, match="did not come"):
            loop.train(2)
        return
    loop.reducer.group.timeout_s = 0.2  # rank 1 has much longer
    loop.wrapped.report_metrics([1.0])
    with pytest.raises(CollectiveTimeoutError, check=lambda error: 1 in error.peers):
        loop.wrapped.ask_and_update_hyperparameters()


@on_ranks(3, pool="process_pool", hosts=[2, 1])
def test_processes_tune_through_their_store():
    loop = tuned()
    tune_by_hand(loop, 20)
    assert setting_of(loop) == Setting(1024, True)
