"""How much later islands make their next outer step when a member is killed, and the leader of etcd with it.

``python -m benchmarks.leader --rounds 5`` starts three servers of etcd and four islands for each round, and kills one
island in the middle of a period; in as many rounds the leading server, too. Lateness is measured against the median
period of the same islands before. Needs ``etcd``.
"""

import argparse
import itertools
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.chaos import Member, wait_for
from tests.membership.servers import ETCD, cluster, leader

ISLANDS, SYNC_EVERY, PAUSE_S = 4, 40, 0.05
#: Outer steps before the kill, and after it.
BEFORE, AFTER = 4, 2


class Island(Member):
    """One island, and when it made its outer steps."""

    def __init__(self, where: str) -> None:
        options = [f"--size={ISLANDS}", f"--sync-every={SYNC_EVERY}", f"--pause={PAUSE_S}"]
        super().__init__([sys.executable, "-m", "tests.membership.chaos_island", *options], {"BAGUA_ISLANDS": where})
        self.start()

    @property
    def outer_steps(self) -> list[tuple[float, int]]:
        found = [(at_s, re.search(r"contributed=(\d+)", line)) for at_s, line in self.lives[-1]]
        return [(at_s, int(contributed[1])) for at_s, contributed in found if contributed]


def play(*, with_leader: bool) -> float:
    """Seconds by which the slowest survivor makes its next outer step later than planned."""
    with tempfile.TemporaryDirectory() as folder, cluster(3, Path(folder)) as (servers, processes):
        where = "etcd://" + ",".join(f"{host}:{port}" for host, port in servers)
        islands = [Island(where) for _ in range(ISLANDS)]
        try:
            wait_for(lambda: all(len(one.outer_steps) >= BEFORE for one in islands))
            time.sleep(SYNC_EVERY * PAUSE_S / 2)
            islands[0].send(signal.SIGKILL)
            if with_leader:
                leader(servers, processes).kill()
            made = len(islands[1].outer_steps)
            wait_for(lambda: all(len(one.outer_steps) >= made + AFTER for one in islands[1:]))
        finally:
            for one in islands:
                one.end()
    return max(_lateness(one.outer_steps, made) for one in islands[1:])


def _lateness(steps: list[tuple[float, int]], made: int) -> float:
    times = [at for at, _ in steps]
    period = statistics.median(after - before for before, after in itertools.pairwise(times[1:made]))
    assert [contributed for _, contributed in steps[made : made + AFTER]] == [ISLANDS - 1] * AFTER
    return times[made] - times[made - 1] - period


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if ETCD is None:
        raise SystemExit("etcd is not installed: apt-get install etcd-server")
    late = {with_leader: [play(with_leader=with_leader) for _ in range(rounds)] for with_leader in (False, True)}
    for with_leader, found in late.items():
        what = "a member and the leader of etcd" if with_leader else "a member"
        shown = ", ".join(f"{seconds:.2f}" for seconds in sorted(found))
        print(f"{what} killed: the next outer step came {shown} s later than planned")
    medians = {with_leader: statistics.median(found) for with_leader, found in late.items()}
    print(f"the leader costs {medians[True] - medians[False]:.2f} s more, by medians")


if __name__ == "__main__":
    main()
