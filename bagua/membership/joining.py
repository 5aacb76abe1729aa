"""How a process, or the ranks of a job together, become one of the islands."""

from __future__ import annotations

import os
from datetime import timedelta

from bagua import env
from bagua.checks import check_kind, check_whole
from bagua.comm import (
    DEFAULT_TIMEOUT_S,
    Group,
    KeyStore,
    ProcessGroup,
    as_group,
    as_seconds,
    close_store,
    get_default_group,
    is_initialized,
    open_store,
)
from bagua.errors import BaguaError, ConfigurationError, StoreLostError
from bagua.membership.checkpoint import check_place
from bagua.membership.island import Island, different
from bagua.membership.islands import Islands


def join_islands(
    where: str | None = None,
    size: int | None = None,
    minimum: int | None = None,
    name: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    process_group: Group | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> Islands:
    """Join the islands that train together and may come and go. Returns at once, as soon as the store answers.

    An island is one process, or all ranks of a launcher's job, which then call this together: if one of them is lost,
    the island is. ``with_bagua(..., between=islands)`` then waits until this island takes part: with the others at the
    beginning, or as a newcomer, which receives the state.

    Args:
        where: ``tcp://host:port``, as ``baguarun --serve-islands`` prints it, or ``etcd://host:port,host:port,...``
            with the servers of an etcd cluster; None for ``BAGUA_ISLANDS``.
        size: islands that begin together; None for ``minimum``, or for one, which others may join.
        minimum: islands that may go on when others are lost; None for more than half.
        name: name of the run; another run over the same store needs another one. None for ``default``.
        timeout: how long to wait for others, in seconds; None for ``BAGUA_TIMEOUT_S``, or 30 minutes.
        process_group: ranks of this island, as many as of each other one; None for all of the default group if there is
            one, and for this process alone otherwise.
        checkpoint: file in which this process saves its state when training ends because the store is lost: the shared
            state after the last exchange that counts, and its own weights and optimizers. ``{seat}`` and ``{rank}``
            stand for its numbers; the ranks of one island need the latter. None for no file.
        resume: such a file, from which the run begins, over a new store. All islands pass one; that of the island with
            the lowest seat counts. Who comes when the run has begun reads none. None to begin with the model as it is.

    Returns:
        The islands, with the seat of this one.

    Raises:
        ConfigurationError: an argument that cannot be used.
        StoreLostError: no store answers there.
        CollectiveMismatchError: the others have joined with other arguments, or another version.

    Example:
        >>> import bagua.torch_api as bagua
        >>> islands = bagua.join_islands("tcp://head:29600", size=3)  # doctest: +SKIP
        >>> model = model.with_bagua(optimizer, "diloco", between=islands)  # doctest: +SKIP
    """
    found = env.islands() if where is None else where
    if found is None:
        raise ConfigurationError(
            "no store where islands meet",
            argument="where",
            expected="an address, or one in BAGUA_ISLANDS",
            seen="neither",
            advice="Start a store with: baguarun --serve-islands",
        )
    for option, value in (("size", size), ("minimum", minimum)):
        if value is not None:
            check_whole(1, **{option: value})
    check_kind((str, type(None)), "a word", name=name)
    if size is not None and minimum is not None and minimum > size:
        raise ConfigurationError(
            "fewer begin than may go on", argument="minimum", expected=f"at most size, which is {size}", seen=minimum
        )
    chosen = env.timeout_s() if timeout is None else timeout
    timeout_s = DEFAULT_TIMEOUT_S if chosen is None else as_seconds(chosen)
    begin, chosen_name = size or minimum or 1, name or "default"
    facts = [f"where={found}", f"size={begin}", f"minimum={minimum}", f"name={chosen_name}", f"timeout={timeout_s:g}"]
    group = _ranks_of_island(process_group)
    store: KeyStore | None = None
    try:
        check_place(1 if group is None else group.size, checkpoint=checkpoint, resume=resume)
        store = _opened_together(found, facts, timeout_s, group)
        return Islands(
            store, found, size=begin, minimum=minimum, name=chosen_name, timeout_s=timeout_s, group=group,
            checkpoint=checkpoint, resume=resume,
        )  # fmt: skip
    except BaseException:
        if store is not None:
            close_store(store)
        if group is not None:
            group.close()
        raise


def _ranks_of_island(process_group: Group | None) -> ProcessGroup | None:
    """The ranks of this island, over connections of their own; None for one. Collective."""
    if process_group is None and not is_initialized():
        return None
    group = get_default_group() if process_group is None else as_group(process_group, "process_group")
    return group.duplicate("islands") if group.size > 1 else None


def _opened_together(where: str, facts: list[str], timeout_s: float, group: ProcessGroup | None) -> KeyStore:
    """The store, if all ranks of the island ask for the same one, and reach it. Collective.

    Raises:
        StoreLostError: some rank does not reach it.
        CollectiveMismatchError: ranks ask for different things.
    """
    failure: BaguaError | None = None
    try:
        store = open_store(where, timeout_s)
    except BaguaError as error:
        failure = error
    stranger = Island(group).compare(facts, "" if failure is None else failure.problem)
    if failure is not None:
        raise failure
    if stranger is None:
        return store
    close_store(store)
    rank, theirs, problem = stranger
    if problem:
        raise StoreLostError(f"rank {rank} of this island: {problem}", peers=[rank])
    raise different(
        "the ranks of this island join different islands", "join_islands", rank, facts, theirs,
        "Call join_islands with the same arguments on all ranks of the process group.",
    )  # fmt: skip
