"""Islands that are processes: one is killed, or stopped, at any request to a bucket; and what memory they need."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua.comm import get_default_group, group_of_seats
from bagua.membership import Islands
from bagua.testing import ProcessRanks, RankDiedError, this_rank
from tests.harness import until
from tests.launching import REPOSITORY, environment, launched
from tests.membership import forked_islands
from tests.membership.servers import is_counted, needs_moto, needs_obstore, new_s3, opened, s3_server
from tests.membership.training import PERIOD, QUICK, RANKS, Outer, _judge, check_equal, check_rows, train, wrapped

ALONE = ("unshare", "--net", "--map-root-user")
SIZE, PERIODS = 3, 3
#: The cell of the second exchange, in which the sixth call brings the contributions.
CLOSED = "closed/1/2.cell"
CAN_PART = shutil.which("unshare") and subprocess.call([*ALONE, "true"], stderr=subprocess.DEVNULL) == 0


@needs_obstore
@pytest.mark.skipif(not CAN_PART, reason="unshare makes no network namespace here")
def test_islands_without_a_network_train_as_one_and_who_was_stopped_comes_in_again(tmp_path):
    command = [*ALONE, sys.executable, "-u", str(REPOSITORY / "examples/through_a_bucket.py"), f"file://{tmp_path}"]
    stays, sleeps = islands = [
        subprocess.Popen([*command, "--steps", "1000"], stdout=subprocess.PIPE, text=True, env=environment())
        for _ in range(2)
    ]
    try:
        before = list(itertools.takewhile(lambda line: "step 60" not in line, sleeps.stdout))
        sleeps.send_signal(signal.SIGSTOP)
        assert any("1 islands" in line for line in stays.stdout)
        sleeps.send_signal(signal.SIGCONT)
        lines = [island.communicate(timeout=200)[0].splitlines() for island in islands]
    finally:
        for island in islands:
            island.kill()
    assert [line.rpartition(", ")[2].strip() for line in before] == ["2 islands"] * 2
    assert "left out: comes in again as a newcomer" in lines[1]
    assert lines[0][-2].startswith("step 1000")
    assert lines[0][-2].endswith("2 islands")
    assert lines[0][-1] == lines[1][-1]
    assert lines[0][-1].startswith("norm of the weights")


@dataclasses.dataclass
class Kill:
    """Kills this process before or after (``moment``) request number ``at`` in the second period; -1 is none.

    Of several requests of one kind for one object the first counts.
    """

    at: int
    moment: str
    before_contributions: Callable[[], object] | None = None
    closed: bool = False
    _seen: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    _thread: int | None = None

    def arm(self, step: int) -> None:
        """Called before each step."""
        if step % PERIOD == 1:
            self._thread = threading.get_ident() if step == PERIOD + 1 else None

    def hook(self, kind: str, name: str, moment: str) -> None:
        self.closed |= (kind, moment) == ("create", "after") and name.endswith(CLOSED)
        if self.before_contributions and kind == "get" and "/6/" in name:
            wait, self.before_contributions = self.before_contributions, None
            wait()
        # Who waits for long looks for the reason; a record may be put by any thread.
        extra = kind == "list" or name.endswith("/end") or "/record/" in name
        if self._thread and moment == self.moment and not extra and is_counted(name, self._thread):
            if (kind, name) not in self._seen and len(self._seen) == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self._seen.add((kind, name))


def member(where: str, objects: Any, algorithm: str, at: int, moment: str, learns: str) -> list[Any]:
    """Train. The last rank is killed; the others learn it at once, when the exchange is closed, or by its silence."""
    rank = this_rank.get().rank
    kill = Kill(at if rank == SIZE - 1 else -1, moment)
    deadlines = None if learns == "by silence" else dataclasses.replace(QUICK, beat_s=0.05)
    options = {"size": SIZE, "minimum": 1, "name": "a run", "timeout_s": 60.0, "deadlines": deadlines}
    store = opened(where, objects, kill.hook)
    with Islands(store, "the store", **options) as islands:
        roster, looks = islands._state.roster, []

        def dead() -> set[int]:
            heard = learns == "at once" or kill.closed
            looks.append(heard)
            homes = {seat: Path("/proc", one.host.split()[-1]) for seat, one in roster.records.items() if one.host}
            return {seat for seat, home in homes.items() if heard and not home.exists()}

        def be_last() -> None:
            until(lambda: store.bucket.get(f"islands/a=20run/{CLOSED}"))
            kill.closed = True
            until(lambda: sum(looks) > 4)

        if deadlines:
            _judge(roster, dead)
        if learns == "when it is closed" and rank == 0:
            kill.before_contributions = be_last
        return train(islands, wrapped(islands, algorithm), PERIODS * PERIOD, kill.arm)


def contributed_after(where, at, moment, algorithm="diloco", learns="at once", objects=None):
    """Who contributed to each outer step; survivors make all of them, and have the same. None if nobody was killed."""
    pool = ProcessRanks(SIZE, backend=None, deadline_s=200.0)
    *ends, last = pool.outcomes(member, where, objects, algorithm, at, moment, learns)
    assert not [end.trace for end in ends if end.error], ends
    assert [len(end.value) for end in ends] == [PERIODS] * (SIZE - 1)
    found = check_rows(algorithm, [end.value for end in ends])
    if last.error is None:
        return None
    assert isinstance(last.error, RankDiedError), last
    assert found[0] == (0, 1, 2)
    assert len(found[2]) == 2
    return found


@needs_obstore
@pytest.mark.parametrize(("algorithm", "stride", "least"), [("diloco", 1, 10), ("diloco, beside training", 4, 3)])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_request_costs_the_others_no_outer_step(tmp_path, moment, algorithm, stride, least):
    def kills(at):
        return contributed_after(f"file://{tmp_path}/{at}", at, moment, algorithm) is not None

    assert least <= sum(1 for _ in itertools.takewhile(kills, itertools.count(0, stride))) < 20


@needs_obstore
@pytest.mark.parametrize("learns", ["when it is closed", "by silence"])
def test_a_contribution_of_who_is_killed_after_its_put_counts(tmp_path, learns):
    """Also for one that has yet to get it when it learns of the death, and another one has closed the exchange."""
    found = contributed_after(f"file://{tmp_path}/run", 6, "after", learns=learns)
    assert found[1] == (0, 1, 2)


@needs_obstore
@needs_moto
def test_a_kill_at_a_request_to_s3_costs_the_others_no_outer_step():
    with s3_server() as endpoint:
        for at, moment in itertools.product((3, 6), ("before", "after")):
            assert contributed_after("s3://b/run", at, moment, objects=new_s3(endpoint))


def status_of(field):
    """Bytes that the system says of this process."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def peaks(where):
    """Contributions of 128 MB that an exchange adds to the memory of a rank, at most: through Gloo, and a folder."""
    gloo = get_default_group()
    options = {"backend": "bucket", "timeout_s": 60.0, "meet_s": 60.0}
    bucket = group_of_seats(opened(where), range(gloo.size), gloo.rank, "epoch1", **options)
    contribution, found = torch.ones(32_000_000), []
    for group in (gloo, bucket):
        gloo.global_communicator.barrier()
        before = status_of("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
        group.global_communicator.allreduce(contribution)
        found.append((status_of("VmHWM") - before) / contribution.nbytes)
    bucket.close()
    return found


@needs_obstore
@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not forget a peak")
def test_contributions_stream_through_a_folder(tmp_path):
    """Less than one contribution is in memory beside what Gloo needs: pieces of two others, and one that arrives."""
    for gloo, bucket in ProcessRanks(SIZE).run(peaks, f"file://{tmp_path}/run"):
        assert bucket < gloo + 1


@pytest.mark.gloo
def test_a_killed_rank_takes_its_island_out_and_a_new_island_takes_part():
    said, islands, listeners = [], [], []

    def listen(rank):
        # An error is no object, nor is what Gloo in old versions of torch prints.
        said.extend(json.loads(line) for line in rank.stdout if line.startswith("{"))

    def outer_steps(number):
        """Of each rank of an island."""
        return [sum((one["number"], one["rank"]) == (number, rank) for one in said) for rank in range(RANKS)]

    def start(number):
        command = "-m", "tests.membership.forked_islands", where, str(number)
        islands.append(stack.enter_context(launched(RANKS, *command)))
        listeners.extend(threading.Thread(target=listen, args=(rank,)) for rank in islands[-1])
        for listener in listeners[-RANKS:]:
            listener.start()

    serve = [sys.executable, "-m", "bagua.cli.baguarun", "--serve-islands", "127.0.0.1:0"]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=environment())
    with server, contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        where = server.stdout.readline().split()[3].rstrip(".")
        start(0)
        start(1)
        until(lambda: min(outer_steps(0) + outer_steps(1)) >= 3)
        islands[1][1].kill()
        seen = max(outer_steps(0))
        until(lambda: min(outer_steps(0)) >= seen + 2)
        start(2)
        until(lambda: min(outer_steps(2)) >= 2)
        for rank in (*islands[0], *islands[2]):
            rank.stdin.close()
        for listener in listeners:
            listener.join(60)
        assert [[rank.wait(60) for rank in ranks] for ranks in islands] == [[0, 0], [1, -signal.SIGKILL], [0, 0]]
        server.terminate()
        assert server.wait(60) == 0
    rows = [Outer(one["step"], torch.tensor(one["sum"], dtype=torch.float64), one["contributed"]) for one in said]
    by_step = check_equal([rows])
    assert sorted(by_step) == [forked_islands.PERIOD * (number + 1) for number in range(len(by_step))]
    stayed, new = (next(one["seat"] for one in said if one["number"] == number) for number in (0, 2))
    crowds = [tuple(by_step[step].contributed) for step in sorted(by_step)]
    wanted = [(0, 1), (stayed,), (stayed, new)]
    assert [crowd for crowd in dict.fromkeys(crowds) if crowd in wanted] == wanted
