"""From ranks that know their store to a connected group: who is there, on which hosts, with which transport."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.distributed as dist

from bagua import env
from bagua.comm.group import Ledger, ProcessGroup
from bagua.comm.startup.choice import ASKED_FOR, abilities
from bagua.comm.startup.hosts import host_identity, nodes_from_identities, nodes_from_local_size
from bagua.comm.startup.rendezvous import exchange
from bagua.comm.transports.shm.transport import shm_expected
from bagua.errors import CollectiveMismatchError, ConfigurationError, TransportUnavailableError

__all__ = ["configure_log", "first_that_connects", "fresh", "layout", "meet"]

_log = logging.getLogger("bagua")


def first_that_connects(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    nodes: Sequence[int],
    choices: Sequence[tuple[str, str]],
    timeout_s: float,
    ledger: Ledger,
    label: str = "world",
) -> ProcessGroup:
    """The group on the first backend that all of its members can use.

    A transport that cannot connect says so on every rank, hence all go on to the same next one.

    Args:
        store: of these ranks alone.
        rank: of this process in the group.
        ranks: global rank of each member.
        nodes: index of the host of each member.
        choices: backends and the reasons for them, as ``candidates`` orders them.
        timeout_s: default deadline of every call, in seconds.
        ledger: where the counters go.
        label: what messages call the group.
    """
    refused = ""
    for number, (backend, reason) in enumerate(choices):
        members = dist.PrefixStore(f"world{number}", store)
        try:
            group = ProcessGroup(members, rank, ranks, nodes, backend, timeout_s, label, ledger)
        except TransportUnavailableError as error:
            if number == len(choices) - 1:
                raise
            _log.info("rank %d of %d: not %s: %s", rank, len(ranks), backend, error)
            refused = str(error)
        else:
            _log.info(
                "rank %d of %d: backend %s because %s; hosts of %s",
                rank, len(ranks), backend, reason, group.node_sizes,
            )  # fmt: skip
            if backend == "gloo" and reason != ASKED_FOR and group.local_rank == 0 and max(group.node_sizes) > 1:
                _warn_of_gloo(refused or reason)
            return group
    raise AssertionError("there is always a last choice")


@cache
def _warn_of_gloo(reason: str) -> None:
    """Say once for each reason why Gloo connects ranks of one host that usually share memory."""
    if shm_expected():
        _log.warning(
            "processes of this host cannot share memory, so Gloo connects them: small calls take about ten times as "
            "long. If this is as it should be, backend='gloo' silences this warning. The reason: %s",
            reason,
        )


def configure_log() -> None:
    """Show the messages of ``bagua`` from the level that ``BAGUA_LOG`` names, and warn of variables without meaning."""
    level = env.log_level()
    if level is not None:
        _show_from(level)
    if not env.get_local_rank():  # Once for each host is enough.
        for sentence in env.unknown_variables():
            _log.warning("environment: %s", sentence)


def _show_from(level: str) -> None:
    try:
        _log.setLevel(level.upper())
    except ValueError:
        raise ConfigurationError(
            "an environment variable is not a log level",
            argument="BAGUA_LOG",
            expected="debug, info, warning or error",
            seen=repr(level),
        ) from None
    if not _log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("bagua %(levelname)s: %(message)s"))
        _log.addHandler(handler)


def fresh(store: dist.Store, rank: int) -> dist.Store:
    """A part of ``store`` that no earlier initialization has written to.

    The generation is counted per rank, so it agrees when all ranks start anew, and a
    single rank that was restarted waits for the others instead of reading old keys.
    """
    generation = store.add(f"bagua/generation/{rank}", 1)
    return dist.PrefixStore(f"bagua/{generation}", store)


def meet(
    store: dist.Store, rank: int, ranks: Sequence[int], backend: str | None, timeout_s: float
) -> list[dict[str, Any]]:
    """Wait for everyone, and learn what each of them has and wants.

    Args:
        store: of these ranks alone.
        rank: of this process in the group.
        ranks: global rank of each member.
        backend: what this process was asked for.
        timeout_s: how long to wait for the others, in seconds.
    """
    own = {
        "backend": backend,
        "world_size": len(ranks),
        "host": host_identity(),
        **abilities(),
    }
    answers: list[dict[str, Any]] = exchange(store, "init_process_group", rank, ranks, own, timeout_s)
    for member, answer in enumerate(answers):
        for fact in ("backend", "world_size"):
            if answer[fact] != own[fact]:
                raise CollectiveMismatchError(
                    f"ranks were started with different values of {fact}",
                    rank=rank,
                    call="init_process_group",
                    peers=(ranks[member],),
                    expected=own[fact],
                    seen=answer[fact],
                )
    return answers


def layout(answers: list[dict[str, Any]], world_size: int, local_world_size: int = -1) -> tuple[int, ...]:
    """Index of the host of each rank, from what ``meet`` returned unless ``local_world_size`` says it."""
    if local_world_size >= 0:
        return nodes_from_local_size(world_size, local_world_size)
    return nodes_from_identities([answer["host"] for answer in answers])
