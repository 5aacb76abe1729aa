"""From ranks that know their store to a connected group, in this order.

``fresh`` gives them a part of the store, ``plan`` says who is on which host and what all of them can use: a function
of what all ranks have and see, so the same on each. Hosts are found out, not assumed. Then
``connect_first`` connects them. ``init_process_group`` and the backend ``bagua`` of torch both go this way. With
shared memory that is three barriers at the store: the plan, the addresses, and that all are attached.

``group_of_seats`` connects processes that no launcher numbered, and ``rehearsal_group`` one rank that is alone.
"""

from __future__ import annotations

import ipaddress
import logging
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from bagua import env
from bagua.comm.addresses import advice_on_interfaces, own_address
from bagua.comm.call import Call
from bagua.comm.group import ProcessGroup
from bagua.comm.pieces.fetching import PhaseDeadline
from bagua.comm.records.recorder import Recorder
from bagua.comm.store.asking import come_together, gather_values, meeting, raise_refusals, refuse_together
from bagua.comm.store.keys import behind_token, bounded
from bagua.comm.transports.contract import DONE, Data, Handle, Transport
from bagua.comm.transports.registry import backend_refusal, register_transport
from bagua.comm.transports.shm.attach import host_identity
from bagua.comm.transports.shm.transport import shm_refusal, shm_unsupported
from bagua.errors import (
    CollectiveMismatchError,
    CommunicationError,
    ConfigurationError,
    PeerLostError,
    TransportUnavailableError,
)
from bagua.topology import ranks_by_node


def nodes_from_identities(identities: Sequence[str]) -> tuple[int, ...]:
    """Index of the host of each rank; hosts are numbered by their lowest rank.

    Example:
        >>> nodes_from_identities(["b", "a", "b", "c"])
        (0, 1, 0, 2)
    """
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(identity, len(numbers)) for identity in identities)


def nodes_from_local_size(world_size: int, local_world_size: int) -> tuple[int, ...]:
    """Index of the host of each rank when hosts hold consecutive blocks of ranks.

    Raises:
        ConfigurationError: the blocks do not fit the world.

    Example:
        >>> nodes_from_local_size(4, 2)
        (0, 0, 1, 1)
    """
    if not 1 <= local_world_size <= world_size or world_size % local_world_size:
        raise ConfigurationError(
            "the world does not split into hosts of this size",
            argument="local_world_size",
            expected=f"a divisor of the world size {world_size}",
            seen=local_world_size,
            advice="Leave it out: hosts are found out, also uneven ones.",
        )
    return tuple(rank // local_world_size for rank in range(world_size))


#: The reason for a backend that the user chose.
ASKED_FOR = "it was asked for"
#: Gloo carries CUDA tensors by way of the CPU.
SHARED_GPUS = "a host has more ranks than GPUs, and NCCL connects one rank for each GPU"


def abilities(use_cuda: bool) -> dict[str, Any]:
    """What this process can do, to be told to all others; anything that JSON can hold."""
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return {
        "gpus": torch.cuda.device_count() if use_cuda and has_nccl else 0,
        "visible": env.visible_gpus(),
        "may_share_gpus": env.may_share_gpus(),
        "no_shared_memory": str(shm_refusal() or ""),
    }


def sharing_a_gpu(answers: Sequence[dict[str, Any]], nodes: Sequence[int]) -> list[int]:
    """Ranks of one host that are more than the GPUs they see, which NCCL does not connect; none if there are none.

    Example:
        >>> able = {"gpus": 1, "visible": "", "may_share_gpus": False}
        >>> sharing_a_gpu([able] * 3, [0, 1, 1])
        [1, 2]
        >>> sharing_a_gpu([able, {**able, "visible": "1"}], [0, 0])
        []
    """
    seen: dict[tuple[int, str], list[int]] = {}
    for rank, (answer, node) in enumerate(zip(answers, nodes, strict=True)):
        members = seen.setdefault((node, answer["visible"]), [])
        members.append(rank)
        if answer["gpus"] and not answer["may_share_gpus"] and len(members) > answer["gpus"]:
            return members
    return []


def candidates(answers: Sequence[dict[str, Any]], nodes: Sequence[int]) -> list[tuple[str, str]]:
    """Backends to try, the best first, and why each of them; the last one works everywhere.

    Args:
        answers: the ``abilities`` of each rank.
        nodes: index of the host of each rank.

    Example:
        >>> able = {"gpus": 0, "visible": "", "may_share_gpus": False, "no_shared_memory": ""}
        >>> [backend for backend, _ in candidates([able, able], [0, 0])]
        ['shm', 'gloo']
        >>> [backend for backend, _ in candidates([able] * 3, [0, 0, 1])]
        ['hybrid', 'gloo']
        >>> [backend for backend, _ in candidates([able, able], [0, 1])]
        ['gloo']
    """
    if all(answer["gpus"] for answer in answers):
        shared = sharing_a_gpu(answers, nodes)
        return [("gloo", SHARED_GPUS) if shared else ("cpu:gloo,cuda:nccl", "there is CUDA on all ranks")]
    if len(answers) == 1:
        return [("gloo", "there is one rank")]
    for rank, answer in enumerate(answers):
        if answer["no_shared_memory"]:
            return [("gloo", f"on rank {rank} {answer['no_shared_memory']}")]
    sizes = [len(members) for members in ranks_by_node(nodes)]
    last = ("gloo", "the ranks could not share memory")
    if len(sizes) == 1:
        return [("shm", "all ranks are on one host"), last]
    if max(sizes) > 1:
        return [("hybrid", f"there are several ranks on some of {len(sizes)} hosts"), last]
    return [("gloo", f"each rank is on a host of its own, {len(sizes)} in all")]


_log = logging.getLogger("bagua")


def configure_log() -> None:
    """Show messages of ``bagua``, from the level that ``BAGUA_LOG`` names, and warn of variables without meaning."""
    if (level := env.log_level()) is not None:
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
        _log.addHandler(_Shown())
    _warn_of_variables()


class _Shown(logging.Handler):
    """Writes each message to a line of its own, with its rank, unless the program has set up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or len(_log.handlers) > 1:
            return
        rank = env.get_rank()
        where = "" if rank is None else f"[rank{rank}] "
        text = f"{where}bagua {record.levelname}: {self.format(record)}"
        bars = sys.modules.get("tqdm")
        try:
            if bars is None:
                sys.stderr.write(f"{text}\n")
            else:  # Progress bars leave the cursor at the end of their line.
                bars.tqdm.write(text, file=sys.stderr)
        except Exception:  # noqa: BLE001  # as handlers do
            self.handleError(record)


@cache
def _warn_of_variables() -> None:
    if not env.get_local_rank():  # Once for each host is enough.
        for sentence in env.unknown_variables():
            _log.warning("environment: %s", sentence)


def fresh(store: dist.Store, rank: int, ranks: Sequence[int], timeout_s: float) -> dist.Store:
    """A part of ``store`` that no earlier initialization has written to, once all ranks have come.

    Raises:
        CollectiveTimeoutError: some ranks did not come; ``peers`` names them.
    """
    store = behind_token(store)
    with meeting("init_process_group", rank, ranks), bounded(store, timeout_s) as asked:
        attempt = come_together(asked, "init_process_group", rank, ranks, timeout_s)
    return dist.PrefixStore(f"bagua/{attempt}", store)


def new_job() -> str:
    """A name for a job that begins now, in order of time."""
    return f"job-{datetime.now(timezone.utc):%Y%m%d-%H%M%S-%f}"


class StartupPlan(NamedTuple):
    """What all ranks know of each other before they connect; equal on all of them.

    Attributes:
        nodes: index of the host of each rank.
        choices: backends to try, the best first, and the reason for each.
        job: name of what begins here.
    """

    nodes: tuple[int, ...]
    choices: list[tuple[str, str]]
    job: str


def plan(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    backend: str | None,
    timeout_s: float,
    *,
    nodes: Sequence[int] | None = None,
    local_world_size: int = -1,
    use_cuda: bool = True,
) -> StartupPlan:
    """Wait for everyone, and find out together who is on which host and which backends all can use.

    All questions are asked in one exchange through the store, so ranks answer alike, and refuse together.

    Args:
        store: store that these ranks alone write to.
        rank: rank of this process in the group.
        ranks: global rank of each member.
        backend: name of the backend this process was asked for; None leaves the choice to all.
        timeout_s: seconds to wait for the others.
        nodes: index of the host of each rank, if it is known already.
        local_world_size: number of ranks on each host, if hosts hold consecutive blocks of ranks.
        use_cuda: True if the backend must serve CUDA tensors where all ranks have CUDA.

    Raises:
        CollectiveTimeoutError: some ranks did not come; ``peers`` names them.
        CollectiveMismatchError: ranks were started with different arguments.
        TransportUnavailableError: a rank cannot use the backend.
    """
    obstacle = backend_refusal(backend or "gloo", len(ranks))
    own = {
        "backend": backend,
        "world_size": len(ranks),
        "local_world_size": local_world_size,
        "BAGUA_DEBUG": env.debug_checks(),
    }
    here = {"host": host_identity(), "refusal": str(obstacle or ""), "job": new_job()}
    facts = {**own, **here, **abilities(use_cuda)}
    answers = gather_values(store, "init_process_group", rank, ranks, facts, timeout_s)
    _compare(answers, own, rank, ranks)
    if len({answer["host"] for answer in answers}) > 1:
        refuse_together(store, "addresses", rank, ranks, _unreachable(), timeout_s)
    if nodes is None:
        by_size = local_world_size >= 0
        hosts = [answer["host"] for answer in answers]
        nodes = nodes_from_local_size(len(ranks), local_world_size) if by_size else nodes_from_identities(hosts)
    if backend is not None and "nccl" in backend and (sharing := sharing_a_gpu(answers, nodes)):
        raise TransportUnavailableError(
            f"ranks {', '.join(str(ranks[one]) for one in sharing)} of a host are more than its GPUs "
            f"({answers[sharing[0]]['gpus']}), and NCCL connects one rank for each GPU",
            rank=ranks[rank],
            call="init_process_group",
            advice="Start as many ranks as GPUs, or use backend='gloo', which carries CUDA tensors by way of the CPU.",
        )
    choices = candidates(answers, nodes) if backend is None else [(backend, ASKED_FOR)]
    if backend is not None or "gloo" in choices[0][0]:
        raise_refusals([answer["refusal"] for answer in answers], rank, ranks, obstacle)
    return StartupPlan(tuple(nodes), choices, answers[0]["job"])


def _unreachable() -> TransportUnavailableError | None:
    """Why no other host reaches this one, if that is so: some ranks would fail, and the others wait."""
    address = own_address()
    if not ipaddress.ip_address(address).is_loopback:
        return None
    return TransportUnavailableError(
        f"Gloo would tell other hosts the address {address}, which none of them reaches",
        call="init_process_group",
        advice=advice_on_interfaces(),
    )


def _compare(answers: list[dict[str, Any]], own: dict[str, Any], rank: int, ranks: Sequence[int]) -> None:
    for member, answer in enumerate(answers):
        for fact, value in own.items():
            if answer[fact] != value:
                raise CollectiveMismatchError(
                    f"ranks were started with different values of {fact}",
                    rank=rank,
                    call="init_process_group",
                    peers=(ranks[member],),
                    expected=value,
                    seen=answer[fact],
                )


def connect_first(
    store: dist.Store, rank: int, ranks: Sequence[int], planned: StartupPlan, timeout_s: float, label: str = "world"
) -> ProcessGroup:
    """The group on the first backend that all of its members can use.

    If all ranks agree that a transport cannot connect them, all go on to the same next one. What fails on some of them
    only, is an error there, and the others find that these ranks are gone.

    Args:
        store: store that these ranks alone write to.
        rank: rank of this process in the group.
        ranks: global rank of each member.
        planned: hosts of the members, and the backends to try, as ``plan`` found them.
        timeout_s: default deadline of every call, in seconds.
        label: name of the group in messages.
    """
    refused, recorder = "", Recorder()
    nodes, choices, recorder.job = planned
    for number, (backend, reason) in enumerate(choices):
        members = dist.PrefixStore(f"world{number}", store)
        try:
            group = ProcessGroup(members, rank, ranks, nodes, backend, timeout_s, label, recorder)
        except TransportUnavailableError as error:
            if number == len(choices) - 1 or error.agreed != tuple(ranks):
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
    if reason == SHARED_GPUS:
        _log.warning("%s: Gloo carries CUDA tensors by way of the CPU. backend='gloo' silences this warning", reason)
    elif not shm_unsupported():
        _log.warning(
            "processes of this host cannot share memory, so Gloo connects them: small calls take about ten times as "
            "long. If this is as it should be, backend='gloo' silences this warning. The reason: %s",
            reason,
        )


def group_of_seats(
    store: Store,
    seats: Sequence[int],
    own: int,
    name: str,
    *,
    backend: str,
    timeout_s: float,
    meet_s: float,
    look: Callable[[], None] | None = None,
    connecting: PhaseDeadline | None = None,
) -> ProcessGroup:
    """A group of the processes on ``seats``, each on a host of its own. Collective among them alone.

    Messages and errors number the members by their seats.

    Args:
        store: key-value store of all; somebody keeps a reference to it as long as the group lives.
        seats: members, in ascending order.
        own: seat of this process.
        name: used once for each store.
        backend: as for ``init_process_group``.
        timeout_s: default deadline of every call, in seconds.
        meet_s: how long to wait for all members to come, in seconds.
        look: called until all have come. It raises a ``CommunicationError`` if there is no use in waiting.
        connecting: how long they may take to connect when all have come, which nothing can interrupt; None for
            ``meet_s``.

    Raises:
        CollectiveTimeoutError: some did not come.
        PeerLostError: one that had come has gone before all were there.
        TransportUnavailableError: they cannot be connected.

    Example:
        >>> from bagua.comm.store.serving import thread_store
        >>> group = group_of_seats(thread_store(), [7], 7, "epoch1", backend="gloo", timeout_s=60.0, meet_s=5.0)
        >>> group.ranks
        (7,)
    """
    members, place, recorder = PrefixStore(name, store), list(seats).index(own), Recorder()
    try:
        recorder.job = members.compare_set("job", "", new_job()).decode()
        _meet(members, place, seats, meet_s, look)
        deadline, started = connecting or PhaseDeadline(meet_s), time.monotonic()
        try:
            group = ProcessGroup(members, place, seats, range(len(seats)), backend, deadline.seconds, name, recorder)
        except BaseException:
            deadline.forget()
            raise
        deadline.note(time.monotonic() - started)
    except (DistNetworkError, DistStoreError) as error:
        raise TransportUnavailableError(f"{name}: the store does not answer: {error}", rank=own) from error
    group.set_timeout(timeout_s)
    return group


def _meet(members: Store, place: int, seats: Sequence[int], meet_s: float, look: Callable[[], None] | None) -> None:
    """Wait until all have come. Then all connect, or none does: to connect cannot be interrupted."""
    if look is not None:
        look()
    try:
        gather_values(members, "here", place, seats, seats[place], meet_s, look)
    except CommunicationError:
        if members.compare_set("meeting", "", "off") == b"on":
            return  # The others have seen this process: they are connecting with it.
        raise
    if members.compare_set("meeting", "", "on") != b"on":
        raise PeerLostError("a process that had come has gone before all were there", rank=seats[place])


_NAME = "rehearsal"
#: Default deadline of calls, which none of them ever needs.
_TIMEOUT_S = 1800.0


class RehearsalTransport(Transport):
    """Answers at once for peers that are not there, as if each of them held what this rank holds."""

    name = _NAME
    compares_calls = True
    #: As on Gloo, whose place it takes.
    executor = "caller"
    overlaps = True

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:  # noqa: ARG002
        """Fill the target."""
        if target is not None:
            with torch.no_grad():
                self._fill(call, source, target)
        elif call.kind == "recv" and source is not None:
            source.fill_(call.root)
        return DONE

    def _fill(self, call: Call, source: Data, target: torch.Tensor) -> None:
        flat = target.view(-1)
        if source is None or call.kind == "alltoall_v" or (call.kind == "recv" and call.root < 0):
            flat.zero_()  # What a peer would send alone is not known here.
        elif source is not target:
            takes_share = call.kind in ("alltoall", "scatter", "reduce_scatter")
            given = source.view(self.size, -1)[self.rank] if takes_share else source.view(-1)
            if call.kind in ("alltoall", "allgather", "gather"):
                flat.view(self.size, -1).copy_(given.expand(self.size, -1))
            elif given.numel() == flat.numel():
                flat.copy_(given)
        if call.reduction == "sum":
            flat.mul_(self.size)

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """There is no rank to tell."""

    def close(self) -> None:
        """Nothing is held."""


class _RehearsalGroup(ProcessGroup):
    """A process group whose other members agree to everything."""

    def _agree(self, store: dist.Store, wanted: list[object], obstacle: Exception | None) -> list[str]:  # noqa: ARG002
        return [""] * self.size


def rehearsal_group(host_sizes: Sequence[int]) -> ProcessGroup:
    """Rank 0 of a group whose other ranks do not exist. Calls return at once, with what this rank put in.

    What is made of other ranks' data has no meaning. Which calls are made, in which order and with how many bytes, and
    what is computed between them, is as among real ranks.

    Args:
        host_sizes: number of ranks on each host.

    Example:
        >>> group = rehearsal_group([2, 2])
        >>> group.size, group.node_sizes, group.inter_node_communicator.ranks
        (4, (2, 2), (0, 2))
        >>> tensor = torch.ones(1)
        >>> group.global_communicator.allreduce(tensor)
        >>> tensor
        tensor([4.])
    """
    register_transport(_NAME, RehearsalTransport)
    nodes = [host for host, size in enumerate(host_sizes) for _ in range(size)]
    ranks = range(len(nodes))
    return _RehearsalGroup(dist.HashStore(), 0, ranks, nodes, _NAME, _TIMEOUT_S, _NAME, Recorder())
