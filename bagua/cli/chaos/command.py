"""The command line of ``bagua chaos``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bagua import env
from bagua.cli.arguments import (
    above_zero,
    argument,
    link,
    natural,
    positive,
    seconds,
    some_minutes,
    some_seconds,
)
from bagua.cli.chaos.places import FaultFunctions, Home, disks, links, open_places
from bagua.cli.chaos.processes import Processes
from bagua.cli.chaos.progress import STEP, MetricFiles, ProgressReader
from bagua.cli.chaos.referee import Referee
from bagua.cli.chaos.report import describe, plan, verdict
from bagua.cli.chaos.schedule import FaultSchedule, draw_schedule, parse_lasting, parse_mix, parse_rate
from bagua.cli.chaos.score import score
from bagua.cli.chaos.service import ServiceError, open_service, store_command
from bagua.cli.interrupts import terminated_like_interrupted, undisturbed
from bagua.cli.lab.network import LabUnavailableError
from bagua.link import LinkSettings

NOT_AVAILABLE = 3
INTERRUPTED = 130
EXAMPLES = """\
words that are replaced in the command: {member} is the number of the member, from 0; {members} how many there are;
{first} the address of member 0; {service} that of --service.

  bagua chaos --members 4 --faults 90/h --mix kill:28,stop:8 --minutes 30 -- python islands.py
  bagua chaos --members 4 --mix partition,slow --link 100mbit -- baguarun --nproc 2 islands.py
  bagua chaos --mix kill -- baguarun --standalone --nproc 4 --max-restarts 99 ddp.py    one rank dies, all start again
  bagua chaos --members 2 --service 'torchft_lighthouse --bind [::]:29510 --min_replicas 1' -- \\
      env TORCHFT_LIGHTHOUSE=http://{service}:29510 REPLICA_GROUP_ID={member} torchrun --nproc-per-node 1 torchft.py
"""


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = argparse.ArgumentParser(
        prog="bagua chaos",
        description="Run a training command under a schedule of faults, and say what became of it. Needs Linux.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--members", type=positive, default=1, metavar="N", help="how often the command is started; default 1")
    add("--faults", type=argument(parse_rate), default="90/h", metavar="N/h", help="over all members; default 90/h")
    add(
        "--mix",
        type=argument(parse_mix),
        default="kill:28,stop:8",
        metavar="KIND:WEIGHT,...",
        help="kill, stop (and continue), partition, slow (links; root), disk (full; root); default kill:28,stop:8",
    )
    add("--minutes", type=some_minutes, default=5.0, help="from when all members train; default 5")
    add("--seed", type=int, default=0, help="of the schedule; default 0")
    add("--lasting", type=argument(parse_lasting), default="5-15", metavar="SECONDS", help="of a fault; default 5-15")
    add("--schedule", type=Path, metavar="FILE", help="replay this one, which --print-schedule json has printed")
    add("--print-schedule", choices=("text", "json"), help="print the schedule, and run nothing")
    add("--hit", choices=("member", "rank"), help="what is killed or stopped; default: rank if --members is 1")
    add("--keep", type=natural, help="members that are always left well; default 1, or 0 if --members is 1")
    add("--restart-after", type=seconds, default=1.0, metavar="SECONDS", help="default 1")
    add("--warm-up", type=seconds, default=120.0, metavar="SECONDS", help="begin then at the latest")
    add("--hang", type=some_seconds, default=60.0, metavar="SECONDS", help="silence of all; default 60")
    add("--progress", type=argument(ProgressReader), default=STEP, metavar="REGEX", help='default: "step 12" and so on')
    add("--metrics", metavar="PATH", help="file of bagua's CsvWriter, with {member} in its name")
    add("--pace", type=above_zero, help="steps in a second of one member alone; default: as measured")
    add(
        "--link",
        type=link,
        default="unlimited",
        metavar="RATE",
        help="of each member, as in bagua lab",
    )
    add(
        "--slow-link",
        type=link,
        default="1mbit",
        metavar="RATE",
        help="while it is slow; default 1mbit",
    )
    add("--disk", metavar="FOLDER", help="folder of the checkpoints, which may contain {member}; for the fault disk")
    add("--disk-mb", type=positive, default=64, metavar="MB", help="its size; default 64")
    add(
        "--service",
        type=shlex.split,
        metavar="COMMAND",
        help="a program that no fault hits; default: a store of islands",
    )
    add("--report", type=Path, metavar="FILE", help="write schedule and figures as JSON")
    add("--quiet", action="store_true", help="do not show what members print")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="starts one member")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a training command under faults.

    Args:
        arguments: words that follow ``bagua chaos`` on the command line.

    Returns:
        0; 1 if members hung, differed, or could not start; 2 for options that do not fit together; 3
        where a fault cannot be made; 130 after Ctrl-C. No process is left in any case.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        schedule = _schedule(options)
        if options.print_schedule:
            print(json.dumps(schedule.to_json(), indent=1) if options.print_schedule == "json" else plan(schedule))
            return 0
        _check(options, schedule)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        with terminated_like_interrupted():
            return _run(options, schedule)
    except (LabUnavailableError, ServiceError) as error:
        print(f"bagua chaos: {error}", file=sys.stderr)
        return NOT_AVAILABLE
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return INTERRUPTED


def _schedule(options: argparse.Namespace) -> FaultSchedule:
    if options.schedule is None:
        duration_s = 60 * options.minutes
        return draw_schedule(options.seed, options.members, duration_s, options.faults, options.mix, options.lasting)
    found = FaultSchedule.from_json(json.loads(options.schedule.read_text(encoding="utf-8")))
    if found.members != options.members:
        raise ValueError(f"{options.schedule} is for --members {found.members}")
    return found


def _check(options: argparse.Namespace, schedule: FaultSchedule) -> None:
    """Refuse what cannot be meant.

    Raises:
        ValueError: reason, in words.
    """
    links_fail = bool({"partition", "slow"} & set(schedule.kinds))
    own_store = not options.service and env.islands() is not None
    fewest, most = 0, options.members - 1
    refusals = [
        (not options.command, "the command is missing: bagua chaos [OPTIONS] -- COMMAND"),
        (not Path("/proc/self/environ").exists(), "processes of members are found through /proc, which only Linux has"),
        (most == 0 and links_fail, "links are between members: partition and slow need --members 2 or more"),
        (
            _wants_network(options, schedule) and own_store,
            "members on hosts of their own do not reach the store that BAGUA_ISLANDS names; unset it",
        ),
        (
            "disk" in schedule.kinds and not options.disk,
            "the fault disk needs --disk FOLDER, where the command writes its checkpoints",
        ),
        (
            options.metrics and most > 0 and "{member}" not in options.metrics,
            "--metrics needs {member} in its path: each member writes a file of its own",
        ),
        (
            options.keep is not None and not fewest <= options.keep <= most,
            f"--keep {options.keep}; expected {fewest} to {most}",
        ),
        (options.report and not options.report.parent.is_dir(), f"--report {options.report}: there is no such folder"),
        *(
            (_is_unknown(words), f"there is no command {words[0]}")
            for words in (options.command, options.service)
            if words
        ),
    ]
    for refused, why in refusals:
        if refused:
            raise ValueError(why)


def _is_unknown(words: Sequence[str]) -> bool:
    return "{" not in words[0] and shutil.which(words[0]) is None


def _wants_network(options: argparse.Namespace, schedule: FaultSchedule) -> bool:
    return bool({"partition", "slow"} & set(schedule.kinds)) or options.link != LinkSettings()


def _run(options: argparse.Namespace, schedule: FaultSchedule) -> int:
    with contextlib.ExitStack() as stack:
        processes = _open(options, schedule, stack)
        stack.callback(undisturbed, processes.close)
        began = time.monotonic()
        processes.clock = lambda: time.monotonic() - began
        referee = Referee(
            schedule,
            processes,
            clock=processes.clock,
            sleep=time.sleep,
            tell=lambda what: print(f"[{processes.clock():.1f} s] {what}", file=sys.stderr, flush=True),
            keep=int(schedule.members > 1) if options.keep is None else options.keep,
            restart_s=options.restart_after,
            warm_up_s=options.warm_up,
            hang_s=options.hang,
        )
        found = score(referee.run(), options.pace)
    print(describe(schedule, found), file=sys.stderr)
    if options.report is not None:
        written = {"command": options.command, "schedule": schedule.to_json(), **found}
        options.report.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return int(bool(verdict(found)))


def _open(options: argparse.Namespace, schedule: FaultSchedule, stack: contextlib.ExitStack) -> Processes:
    """The members, none of them started, and all that they need."""
    kinds, members, run = set(schedule.kinds), schedule.members, f"chaos-{uuid.uuid4().hex}"
    link = options.link if _wants_network(options, schedule) else None
    places, network = stack.enter_context(open_places(members, link))
    functions: dict[str, FaultFunctions] = {}
    if network is not None:
        functions |= links(network, options.link, options.slow_link)
    *homes, beside = places
    if "disk" in kinds:
        functions |= disks(
            [options.disk.replace("{member}", str(member)) for member in range(members)], options.disk_mb
        )
    echo: Callable[[Any, str], object] = (lambda _who, _line: None) if options.quiet else _echo
    variables = _variables(options, beside, run, functools.partial(echo, "service"), stack)
    return Processes(
        command=options.command,
        places=homes,
        run=run,
        words={"first": homes[0].address, "service": beside.address},
        variables=variables,
        reader=options.progress,
        files=_files(options),
        faults=functions,
        hits_ranks=(options.hit or ("rank" if members == 1 else "member")) == "rank",
        clock=time.monotonic,
        echo=echo,
    )


def _files(options: argparse.Namespace) -> MetricFiles | None:
    if options.metrics is None:
        return None
    return MetricFiles({member: options.metrics.replace("{member}", str(member)) for member in range(options.members)})


def _variables(
    options: argparse.Namespace, place: Home, run: str, echo: Callable[[str], object], stack: contextlib.ExitStack
) -> dict[str, str]:
    """What members are told of the program beside them, which is started."""
    if options.service:
        stack.enter_context(open_service(options.service, place, f"{run}/service", echo, is_store=False))
        return {}
    if options.members == 1 or env.islands() is not None:
        return {}
    command = store_command(place)
    where = stack.enter_context(open_service(command, place, f"{run}/service", echo, is_store=True))
    return {"BAGUA_ISLANDS": where}


def _echo(who: Any, line: str) -> None:
    print(f"[{who}] {line}", end="" if line.endswith("\n") else "\n", flush=True)
