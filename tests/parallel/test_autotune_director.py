"""Rank 0's part of tuning, with a clock that only moves when told to."""

from __future__ import annotations

import csv
import dataclasses

import pytest

from bagua.engine.autotune.director import Decision, Director, Report
from bagua.engine.autotune.search import Setting
from bagua.engine.autotune.settings import AutotuneSettings, TuningMode, tuning_from
from bagua.engine.autotune.tuner import Stopwatch
from bagua.errors import ConfigurationError

LADDER = [Setting(1024), Setting(2048), Setting(4096)]
SPEEDS = {LADDER[0]: 1.0, LADDER[1]: 2.0, LADDER[2]: 3.0}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Training:
    """Ranks that report and do what they are told."""

    def __init__(self, settings: AutotuneSettings, ranks: int = 2) -> None:
        self.clock = Clock()
        self.director = Director(settings, self.clock)
        self.ranks = ranks
        self.step = 0
        self.setting = LADDER[0]

    def ask(self, *, wait_s: float = 0.0, fresh: bool = False, **facts) -> Decision:
        self.clock.now += wait_s
        self.step += 1
        report = Report(self.step, fresh=fresh, formed=True, score=SPEEDS[self.setting])
        posts = [dataclasses.asdict(dataclasses.replace(report, **facts)) for _ in range(self.ranks)]
        decision = Decision(**self.director.answer(posts, self.setting, lambda: [LADDER]))
        self.setting = decision.setting
        return decision


def test_samples_are_taken_after_the_warm_up_when_the_confidence_time_is_over():
    training = Training(AutotuneSettings(warmup_time_s=30, sampling_confidence_time_s=5, max_samples=60))
    seen = [training.ask(wait_s=1.0, fresh=step == 0).setting for step in range(100)]
    changes = [number + 1 for number in range(1, 100) if seen[number] != seen[number - 1]]
    # The first question after 30 s starts the clock of the first sample.
    assert changes[:2] == [35, 40]
    assert seen[-1] == LADDER[2]


def test_the_engine_is_told_to_ask_again_when_the_time_will_be_over():
    training = Training(AutotuneSettings(warmup_time_s=30, sampling_confidence_time_s=10))
    assert training.ask(fresh=True, score=2.0).pause_steps == 60
    training.ask(wait_s=30, score=2.0)
    assert training.ask(wait_s=2, score=2.0).pause_steps == 16
    assert training.ask(wait_s=2, score=2.0, manual=True).pause_steps == 4, "a score of the user's is no speed"
    assert training.ask(wait_s=6, score=2.0).pause_steps == 4, "a new setting may be much slower"


def test_what_was_measured_before_a_change_does_not_count():
    training = Training(AutotuneSettings(0, 5))
    assert training.ask(fresh=True).restart
    assert not training.ask(wait_s=3).restart
    assert training.ask(wait_s=3).restart, "another setting"


def test_no_more_than_the_allowed_samples_are_taken_and_the_best_is_the_final_choice(tmp_path):
    log = tmp_path / "samples.csv"
    training = Training(AutotuneSettings(0, 0, max_samples=3, log_file=str(log)))
    decisions = [training.ask(fresh=number == 0) for number in range(4)]
    assert [decision.final for decision in decisions] == [False, False, False, True]
    assert decisions[-1].setting == LADDER[2]
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [(int(row["bucket_bytes"]), float(row["score"]), row["final"]) for row in rows] == [
        (1024, 1.0, "0"),
        (4096, 3.0, "0"),
        (2048, 2.0, "0"),
        (4096, 3.0, "1"),
    ]
    assert [int(row["train_iter"]) for row in rows] == [2, 3, 4, 4]


def test_two_models_share_a_log(tmp_path):
    log = tmp_path / "samples.csv"
    for _ in range(2):
        training = Training(AutotuneSettings(0, 0, max_samples=1, log_file=str(log)))
        training.ask(fresh=True)
        training.ask()
    assert log.read_text().count("train_iter") == 1
    assert len(log.read_text().splitlines()) == 5


def test_a_log_that_cannot_be_written_is_an_answer_as_well(tmp_path):
    training = Training(AutotuneSettings(0, 0, log_file=str(tmp_path / "missing" / "samples.csv")))
    training.ask(fresh=True)
    assert "FileNotFoundError" in training.ask().failure


def test_buckets_that_something_else_has_formed_are_tuned_from_the_start():
    training = Training(AutotuneSettings(0, 0, max_samples=3))
    for number in range(4):
        last = training.ask(fresh=number == 0)
    assert last.final
    again = training.ask(fresh=True)
    assert not again.final
    assert again.setting == training.setting


def test_without_a_measurement_everything_stays_as_it_is():
    training = Training(AutotuneSettings(0, 0))
    training.ask(fresh=True)
    assert training.ask(score=None).setting == LADDER[0]
    assert training.ask().setting != LADDER[0]


def test_a_single_candidate_is_the_choice_at_once():
    director = Director(AutotuneSettings(0, 0), Clock())
    report = dataclasses.asdict(Report(1, fresh=True, formed=True))
    answer = director.answer([report], LADDER[0], lambda: [LADDER[:1]])
    assert answer["final"]


def test_ranks_at_different_steps_or_without_scores_are_named():
    director = Director(AutotuneSettings(0, 0), Clock())

    def told(*reports: Report):
        answer = director.answer([dataclasses.asdict(report) for report in reports], LADDER[0], lambda: [LADDER])
        return list(answer["steps"]), list(answer["missing"])

    first, second = (
        Report(step, fresh=False, formed=True, manual=True, score=score) for step, score in [(3, 1.0), (4, None)]
    )
    assert told(first, second)[0] == [3, 4]
    assert told(dataclasses.replace(first, step=4), second) == ([], [1])
    assert told(dataclasses.replace(second, manual=False)) == ([], [])


def test_a_stopwatch_counts_whole_steps_only():
    clock = Clock()
    watch = Stopwatch(clock)
    assert watch.speed is None
    for step in (0, 0, 1, 1, 2, 3):  # steps with several forward passes
        watch.forward(step)
        clock.now += 1.0
    assert (watch.steps, watch.speed) == (3, 3 / 5.0)
    watch.interrupt()
    clock.now += 100.0
    watch.forward(4)
    assert watch.steps == 3, "an evaluation is no part of a step"
    clock.now += 100.0
    watch.forward(9)
    assert watch.steps == 3, "a checkpoint was loaded"
    watch.restart()
    clock.now += 100.0
    watch.forward(10)
    assert watch.steps == 0, "buckets were made in this step"
    clock.now += 0.5
    watch.forward(11)
    assert watch.speed == 2.0


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_time_s": -1},
        {"warmup_time_s": float("nan")},
        {"sampling_confidence_time_s": float("inf")},
        {"sampling_confidence_time_s": "5"},
        {"max_samples": 0},
        {"max_samples": 2.5},
        {"search": "exhaustive"},
    ],
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        AutotuneSettings(**options)


def test_optuna_is_asked_for_when_it_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"bagua-torch\[autotune\]"):
        AutotuneSettings(search="optuna")


def test_the_environment_is_read_where_there_is_no_argument(monkeypatch):
    for name in ("AUTOTUNE_MAX_SAMPLES", "AUTOTUNE_WARMUP_TIME_S", "IS_OUTPUT_AUTOTUNE_LOG", "AUTOTUNE"):
        monkeypatch.delenv(f"BAGUA_{name}", raising=False)
    assert tuning_from(None) == (TuningMode.Manual, AutotuneSettings(30.0, 5.0, 60))
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    monkeypatch.setenv("BAGUA_AUTOTUNE_MAX_SAMPLES", "7")
    monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", "0")
    monkeypatch.setenv("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", "0.5")
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "1")
    mode, settings = tuning_from(None)
    assert mode is TuningMode.Automatic
    assert dataclasses.replace(settings, log_file=None) == AutotuneSettings(0.0, 0.5, 7)
    assert "bagua_autotune_" in settings.log_file
    assert tuning_from(False)[0] is TuningMode.Off
    assert tuning_from(AutotuneSettings()) == (TuningMode.Automatic, AutotuneSettings())
    monkeypatch.setenv("BAGUA_AUTOTUNE", "0")
    assert tuning_from(None)[0] is TuningMode.Off
    monkeypatch.setenv("BAGUA_AUTOTUNE_MAX_SAMPLES", "0")
    with pytest.raises(ConfigurationError, match="max_samples"):
        tuning_from(True)
    monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", "long")
    with pytest.raises(ConfigurationError, match="BAGUA_AUTOTUNE_WARMUP_TIME_S"):
        tuning_from(True)


def test_what_is_no_setting_is_refused():
    with pytest.raises(ConfigurationError, match="autotune"):
        tuning_from("yes")
