"""The command ``baguarun``: torchrun under a name that stands beside ``bagua``.

Every flag is torchrun's and means what it means there. Six things differ: ``--nproc`` is short for
``--nproc-per-node``, ``--version`` prints bagua's version, ``--help`` begins with how a script is started, the store
of a job of one host is reached from there alone, a failure ends with one summary, and ``--serve-islands`` starts no
script but keeps the store where islands meet.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua import __version__, env
from bagua.cli.interrupts import handled
from bagua.errors import ConfigurationError, how_it_ended

USAGE = """\
baguarun starts a training script on several processes. It is torchrun: all of its flags work here.

  baguarun --nproc 2 train.py --epochs 3                         on this machine
  baguarun --nnodes 2 --node-rank 0 --nproc 2 --master-addr 10.0.0.1 \\
           --master-port 29500 train.py                          on two machines: on the second, --node-rank 1
  baguarun --serve-islands host0:29600                           keep the store where islands meet, until Ctrl-C

"""
_ISLANDS = "--serve-islands"
_LAST_PORT = 65535
_LOOPBACK = "127.0.0.1"
_RUN = "bagua-run-"
_KEPT_S = 24 * 3600.0
_MOST_LINES = 16
#: The file in which ``bagua explain`` finds what was said.
SUMMARY = "summary.txt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a training script on several processes, as torchrun does.

    Args:
        arguments: words that follow ``baguarun`` on the command line; ``sys.argv[1:]`` when None.

    Returns:
        The exit status: 0, 1 when a rank failed, or 128 and the signal's number when a signal ended the run.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        print(f"baguarun (bagua {__version__})")
        return 0

    if given and given[0].partition("=")[0] == _ISLANDS:
        return _serve_islands(given)
    return _start(given)


def _start(given: list[str]) -> int:
    """Be torchrun, without its tracebacks where these add nothing."""
    from torch.distributed import run  # takes seconds to import
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    flags = run.get_args_parser()
    if given[:1] in (["--help"], ["-h"]):
        print(USAGE)
        flags.prog = "baguarun"
        flags.print_help()
        return 0
    flags.add_argument("--nproc", dest="nproc_per_node", default=SUPPRESS)
    job, store = flags.parse_args(given), None
    # What torchrun would say of these, the summary says, and torchrun's choice for OMP_NUM_THREADS needs no notice.
    for part in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{part}").setLevel(logging.CRITICAL)
    several = job.nproc_per_node.isdigit() and int(job.nproc_per_node) > 1
    threads = {"OMP_NUM_THREADS": "1"} if several else {}
    try:
        store = _served_by_us(job)
        with (
            _meeting(job),
            flight_folder() as folder,
            env.with_defaults({**threads, "BAGUA_FLIGHT_DIR": folder, "BAGUA_LAUNCHER": "1"}),
        ):
            try:
                record(run.run)(job)
            except ChildFailedError as failed:
                print(summary(failed.failures, env.flight_dir() or folder), file=sys.stderr)
                return 1
    except RuntimeError as failed:
        if "EADDRINUSE" not in str(failed):
            raise
        advice = "the port is taken: pass another --master-port, or none on a single machine"
        print(f"baguarun: {advice} ({failed})", file=sys.stderr)
    except SignalException as stopped:
        return 128 + stopped.sigval
    else:
        return 0
    finally:
        del store  # The ranks needed it until now.
    return 1


def _serve_islands(given: list[str]) -> int:
    """Keep the store of islands until somebody ends this process."""
    address = given[0].partition("=")[2] or "".join(given[1:2]) or f"{socket.gethostname()}:0"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > _LAST_PORT or len(given) > (1 if "=" in given[0] else 2):
        print(f"baguarun {_ISLANDS} takes host:port, as {socket.gethostname()}:29600; not {address}", file=sys.stderr)
        return 2
    ended = threading.Event()
    # Before the address is known: who reads it may end this process.
    with handled(lambda *_: ended.set(), signal.SIGINT, signal.SIGTERM):
        from bagua.comm import serve_store_at

        try:
            store, where = serve_store_at(host.strip("[]"), int(port))
        except ConfigurationError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"Islands meet at {where}.", flush=True)
        ended.wait()
        del store
    return 0


def _served_by_us(job: Namespace) -> object:
    """The store of a job of one host, where torch finds it: it listens at the address of the job, by default loopback.

    The store of torch itself would listen on all interfaces.
    """
    from bagua.comm import serve_store

    if job.standalone:
        job.standalone, job.rdzv_backend, job.rdzv_endpoint, job.node_rank = False, "static", "", 0
        job.nnodes, job.master_addr, job.master_port, job.rdzv_id = "1", _LOOPBACK, 0, "none"
    if job.rdzv_backend != "static" or job.rdzv_endpoint or job.nnodes not in ("1", "1:1"):
        return None
    store, job.master_port = serve_store(job.master_addr, job.master_port or 0, shared=True)
    job.rdzv_id = str(uuid.uuid4()) if job.rdzv_id == "none" else job.rdzv_id
    return store


@contextlib.contextmanager
def _meeting(job: Namespace) -> Iterator[None]:
    """Say where the machines of a job meet, and let Ctrl-C end the wait for them.

    Torch waits in C++, where Python hears no signal. When ranks run, torch has handlers of its own.
    """
    if job.nnodes in ("1", "1:1"):
        yield
        return
    where = job.rdzv_endpoint or f"{job.master_addr}:{job.master_port}"
    print(f"baguarun: the script starts when all machines (--nnodes {job.nnodes}) have met at {where}", file=sys.stderr)
    with handled(signal.SIG_DFL, signal.SIGINT):
        yield


@contextlib.contextmanager
def flight_folder() -> Iterator[str]:
    """A folder of this run for flight records. It goes at the end if nothing is in it, else after a day."""
    for old in Path(tempfile.gettempdir()).glob(f"{_RUN}*"):
        with contextlib.suppress(OSError):
            found = old.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _KEPT_S:
                shutil.rmtree(old)  # It does not follow a link.
    folder = tempfile.mkdtemp(prefix=f"{_RUN}{time.strftime('%H%M%S')}-")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # It is not empty: a rank has failed.
            Path(folder).rmdir()


def summary(failures: Mapping[int, Any], folder: str) -> str:
    """Which rank was the cause, with its own traceback, a line for each other rank, and where to read more.

    Args:
        failures: a ``ProcessFailure`` of ``torch.distributed.elastic`` by global rank.
        folder: folder with the flight records, where full tracebacks and the summary are written, too.
    """
    told = {rank: _facts(failure) for rank, failure in failures.items()}
    # An error in which a rank blames itself comes before a death, a death before an error that blames another rank.
    cause = min(failures, key=lambda one: (_distance(one, failures[one], told[one]), failures[one].timestamp, one))
    lines = [f"baguarun: rank {cause} {_how(failures[cause], told[cause])}"]
    lines += [f"  {line}" for line in told[cause].get("own", "").splitlines()]
    others = [rank for rank in sorted(failures) if rank != cause]
    lines += [f"rank {rank} {_how(failures[rank], told[rank])}" for rank in others[:_MOST_LINES]]
    if len(others) > _MOST_LINES:
        lines.append(f"and {len(others) - _MOST_LINES} other ranks")
    lines.append(f"Full tracebacks and last calls: bagua explain {folder}")
    with contextlib.suppress(OSError):
        for rank, facts in told.items():
            if facts:
                (Path(folder) / f"traceback_{rank}.txt").write_text(facts["py_callstack"], encoding="utf-8")
        (Path(folder) / SUMMARY).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "\n".join(lines)


def _facts(failure: Any) -> dict[str, Any]:
    """What the rank has written of its error; empty if it ended without a word."""
    message = failure.message if isinstance(failure.message, dict) else {}
    facts: dict[str, Any] = message.get("extraInfo", {})
    return {"message": message.get("message", ""), "own": "", "culprit": None, **facts} if facts else {}


def _distance(rank: int, failure: Any, facts: Mapping[str, Any]) -> int:
    if facts:
        return 0 if facts["culprit"] in (rank, None) else 2
    return 3 if failure.exitcode == -signal.SIGTERM else 1


def _how(failure: Any, facts: Mapping[str, Any]) -> str:
    if facts:
        return f"failed: {facts['message']}"
    if failure.exitcode == -signal.SIGTERM:  # the launcher's own way to end what is left
        return "was ended by SIGTERM, which baguarun sends when another rank fails"
    said = "" if failure.exitcode < 0 else "; what it said is above"
    return how_it_ended(failure.exitcode) + said


if __name__ == "__main__":
    sys.exit(main())
