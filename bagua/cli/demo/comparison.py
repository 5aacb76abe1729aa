"""What the demo shows by itself: the same training with three algorithms, over a slow link."""

import dataclasses
import statistics
from dataclasses import dataclass

import torch

import bagua.torch_api as bagua
from bagua import comm
from bagua.cli.demo.shaping import SlowLink
from bagua.cli.demo.text import Text, read_standard_library
from bagua.cli.demo.training import Phase, Result, Settings, evaluate, train_together, trainer_class
from bagua.cli.launch import Rank
from bagua.parallel import BaguaModule

#: What is compared, with options: the exact mean, the same in 8 bits, and weights that are averaged now and then.
CONTESTANTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("gradient_allreduce", {}),
    ("bytegrad", {}),
    ("local_sgd", {"sync_every": 8}),
)
_TRIAL_STEPS = 3
#: The first contestant, which is the slowest, gets about so long.
_BUDGET_S = 18.0
_FEWEST = 16
MOST_STEPS = 120


@dataclass(frozen=True)
class Contest:
    """How one algorithm did.

    Args:
        algorithm: its name.
        result: result of rank 0.
        seconds: seconds of each step on rank 0.
    """

    algorithm: str
    result: Result
    seconds: list[float]

    @property
    def step_s(self) -> float:
        """Seconds of a step, exchanges that come now and then included."""
        return statistics.fmean(self.seconds)


def compare(rank: Rank, settings: Settings, link: SlowLink, steps: int | None) -> list[Contest]:
    """Train with each contestant, one after the other, on one of the processes.

    Args:
        rank: this process, as the launcher started it.
        settings: the same on all ranks.
        link: link of each process.
        steps: number of steps of each contestant; None for as many as fit into the demo's time.
    """
    link.join(rank, settings.timeout_s)
    text = read_standard_library()
    if steps is None:
        steps = _steps_that_fit(rank, settings, text)
    contests = []
    for name, options in CONTESTANTS:
        contest = dataclasses.replace(settings, algorithm=name, options=options, steps=steps)
        contests.append(_train(rank, contest, text))
    bagua.destroy_process_group()
    return contests


def _steps_that_fit(rank: Rank, settings: Settings, text: Text) -> int:
    """A number that is a multiple of the local steps, the same on all ranks."""
    if rank.rank == 0:
        rank.report(Phase("how long a step takes"))
    name, options = CONTESTANTS[0]
    trial = dataclasses.replace(settings, algorithm=name, options=options, steps=2 * _TRIAL_STEPS)
    trainer = trainer_class(name)(trial, text.training, rank.rank)
    trainer.distribute()
    seconds = torch.tensor([statistics.median(trainer.step_seconds(_TRIAL_STEPS))])
    bagua.broadcast(seconds, 0)
    assert isinstance(trainer.model, BaguaModule)
    trainer.model.bagua_close()
    return max(_FEWEST, min(MOST_STEPS, int(_BUDGET_S / float(seconds)))) // 8 * 8


def _train(rank: Rank, settings: Settings, text: Text) -> Contest:
    trainer = trainer_class(settings.algorithm)(settings, text.training, rank.rank)
    trainer.distribute()
    if rank.rank == 0:
        rank.report(Phase(settings.algorithm))
    steps = train_together(rank, trainer)
    trainer.finish()
    result = evaluate(rank, trainer, text, steps)
    assert isinstance(trainer.model, BaguaModule)
    trainer.model.bagua_close()
    comm.barrier()
    return Contest(settings.algorithm, result, steps.seconds)
