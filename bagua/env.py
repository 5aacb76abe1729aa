"""The only reader of ``os.environ``. An explicit argument always beats what is found here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bagua.errors import ConfigurationError

#: Every variable of ours.
_OURS = (
    *("BAGUA_DEBUG", "BAGUA_FLIGHT_DIR", "BAGUA_ISLANDS", "BAGUA_LAUNCHER", "BAGUA_LOG"),
    *("BAGUA_SHM_STAGING_BYTES", "BAGUA_TIMEOUT_S", "BAGUA_TOKEN", "BAGUA_TRACE"),
)


def _integer(*names: str) -> int | None:
    """The first number that is set: what each launcher calls the same thing, in order of precedence."""
    for name in names:
        text = os.environ.get(name)
        if text is None or text == "":
            continue
        try:
            return int(text)
        except ValueError:
            raise _unusable(name, "not a whole number", "an integer", text) from None
    return None


def _unusable(name: str, problem: str, expected: str, text: str) -> ConfigurationError:
    problem = f"an environment variable is {problem}"
    return ConfigurationError(problem, argument=name, expected=expected, seen=repr(text))


def get_rank() -> int | None:
    """Rank that the launcher gave to this process, or None without a launcher."""
    return _integer("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def get_rank_or_local_rank() -> int | None:
    """Rank that the launcher gave to this process, its rank on this host if only that is known, or None."""
    # Where Lightning looks before ranks are connected: one rank of each host is better than all.
    return _integer("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def get_world_size() -> int | None:
    """Number of processes that the launcher started, or None without a launcher."""
    return _integer("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def get_local_rank() -> int | None:
    """Rank among the processes of this host as the launcher says, or None."""
    return _integer("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def get_local_world_size() -> int | None:
    """Number of processes on this host as the launcher says, or None."""
    return _integer("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def get_node_rank() -> int | None:
    """Index of this host as the launcher says, or None."""
    return _integer("GROUP_RANK", "NODE_RANK", "OMPI_COMM_WORLD_NODE_RANK", "SLURM_NODEID")


def launcher_variables() -> dict[str, str]:
    """The rendezvous variables of torchrun that are set, for messages and for the rendezvous."""
    of_agent = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
    names = ("MASTER_ADDR", "MASTER_PORT", *of_agent)
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def gloo_interfaces() -> list[str]:
    """``GLOO_SOCKET_IFNAME``: the network devices that Gloo is told to take, if it is."""
    return [name.strip() for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]


def islands() -> str | None:
    """``BAGUA_ISLANDS``: address of the store where islands meet, or None."""
    return os.environ.get("BAGUA_ISLANDS") or None


def timeout_s() -> float | None:
    """``BAGUA_TIMEOUT_S``: default deadline of every collective in seconds, or None."""
    text = os.environ.get("BAGUA_TIMEOUT_S")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:  # nan is no time either
        raise _unusable("BAGUA_TIMEOUT_S", "not a positive number of seconds", "seconds > 0", text)
    return seconds


def token() -> str:
    """``BAGUA_TOKEN``: begins every key in a store, so that only ranks that have it meet each other; empty for none."""
    return os.environ.get("BAGUA_TOKEN", "")


def _switch(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0", "false", "False", "off")


def debug_checks() -> bool:
    """``BAGUA_DEBUG=1``: compare every collective's description across ranks before it runs."""
    return _switch("BAGUA_DEBUG")


def log_level() -> str | None:
    """``BAGUA_LOG``: level of the logger ``bagua`` (``debug``, ``info``, ...), or None."""
    return os.environ.get("BAGUA_LOG") or None


def flight_dir() -> str | None:
    """``BAGUA_FLIGHT_DIR``: where each rank writes its last calls when one fails, or None."""
    return os.environ.get("BAGUA_FLIGHT_DIR") or None


def error_file() -> str | None:
    """``TORCHELASTIC_ERROR_FILE`` under ``baguarun`` (``BAGUA_LAUNCHER``): where it reads why a rank ended, or None."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") if _switch("BAGUA_LAUNCHER") else None


def trace_dir() -> str | None:
    """``BAGUA_TRACE``: where each rank writes what it does and when, or None."""
    return os.environ.get("BAGUA_TRACE") or None


def shm_staging_bytes() -> int:
    """``BAGUA_SHM_STAGING_BYTES``: size of each of the two staging areas of a communicator; 4 MiB if it is not set."""
    found = _integer("BAGUA_SHM_STAGING_BYTES")
    if found is None:
        return 4 * 1024 * 1024
    if found < 64 * 1024:
        name, problem = "BAGUA_SHM_STAGING_BYTES", "the staging areas are too small"
        raise ConfigurationError(problem, argument=name, expected="at least 65536", seen=found)
    return found


def unknown_variables() -> list[str]:
    """A sentence for each variable that begins with ``BAGUA_`` and has no meaning, with the one that may be meant."""
    found = sorted(name for name in os.environ if name.startswith("BAGUA_") and name not in _OURS)
    meant = (difflib.get_close_matches(name, _OURS, n=1) for name in found)
    return [
        f"{name} has no meaning" + "".join(f"; did you mean {close}?" for close in matches)
        for name, matches in zip(found, meant, strict=True)
    ]


def for_child(variables: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process to be started: this one's, with ``variables``, and ``defaults`` where unset."""
    return {**defaults, **os.environ, **variables}


def first_on_path(folder: str) -> dict[str, str]:
    """What lets Python look for modules in ``folder`` before it looks elsewhere."""
    return {"PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])}


def overlay(variables: Mapping[str, str]) -> None:
    """Set ``variables`` for the rest of this process: for ranks that a test pool started."""
    os.environ.update(variables)


@contextmanager
def with_defaults(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set those of ``defaults`` that are not set until the end of the block, for new processes and for torch."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def visible_gpus() -> str:
    """Which GPUs this process may see, in the words of CUDA; empty if nothing is said."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def may_share_gpus() -> bool:
    """Whether NCCL, from version 2.30 on, is told to connect ranks that share a GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def prefer_nccl_clean_up() -> None:
    """Make torch's NCCL watchdog clean up after an error instead of ending the process.

    bagua raises the error itself. A choice that the user made is kept.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
