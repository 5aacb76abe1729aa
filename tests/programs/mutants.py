"""Wrong collectives: a copy of the transport of threads, or of what stands above it, with one mistake each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua.comm import Communicator, communicator, composed, group, operands, reduction
from bagua.comm.call import Call
from bagua.comm.group import NonMember
from bagua.comm.operands import Intake
from bagua.comm.transports import registry
from bagua.comm.transports.contract import DONE, Handle
from bagua.comm.transports.memory.exchange import SMALL_BYTES
from bagua.comm.transports.threads import ThreadsTransport

Mutant = Callable[[pytest.MonkeyPatch], None]
Tensor = torch.Tensor
Request = tuple[Call, Tensor | None, Tensor | None]


class Spoiled(Handle):
    """A call whose result is changed when it is waited for."""

    def __init__(self, handle: Handle, spoil: Callable[[], None]) -> None:
        self._handle, self._spoil = handle, [spoil]

    def wait(self, timeout_s: float | None = None) -> None:
        self._handle.wait(timeout_s)
        if self._spoil:
            self._spoil.pop()()

    def is_completed(self) -> bool:
        return self._handle.is_completed()

    def notify(self, callback: Callable[[], None]) -> bool:
        return self._handle.notify(callback)


def starts(start: Callable[..., Handle]) -> Mutant:
    """A transport whose ``start`` is this function; it gets the true one as its last argument."""

    class Wrong(ThreadsTransport):
        def start(self, call: Call, source: Any, target: Any, timeout_s: float, asynchronous: bool) -> Handle:
            def true(call: Call, source: Any, target: Any) -> Handle:
                return ThreadsTransport.start(self, call, source, target, timeout_s, asynchronous)

            return start(self, call, source, target, true)

    return lambda patch: patch.setattr(registry, "ThreadsTransport", Wrong)


def _asks(change: Callable[[Any, Call, Any, Any], Request | None]) -> Mutant:
    return starts(lambda t, call, source, target, true: true(*(change(t, call, source, target) or (call, source, target))))  # fmt: skip  # noqa: E501


def _reduces(old: str, new: str, when: Callable[[Any, Call], bool] = lambda t, call: True) -> Mutant:
    def change(t: Any, call: Call, source: Any, target: Any) -> Request | None:
        return (call._replace(reduction=new), source, target) if call.reduction == old and when(t, call) else None

    return _asks(change)


def _becomes(kind: str, change: Callable[[Call], Call]) -> Mutant:
    return _asks(lambda t, call, source, target: (change(call), source, target) if call.kind == kind else None)


def spoils(kind: str, spoil: Callable[[Any, Call, Tensor], None], when: Callable[[Any], bool] | None = None) -> Mutant:
    def start(t: Any, call: Call, source: Any, target: Any, true: Callable[..., Handle]) -> Handle:
        handle = true(call, source, target)
        if call.kind != kind or target is None or not target.numel() or not (when is None or when(t)):
            return handle
        spoiled = Spoiled(handle, lambda: _in_inference_mode(lambda: spoil(t, call, target.view(-1)), target))
        spoiled.wait() if handle is DONE else None
        return spoiled

    return starts(start)


def _in_inference_mode(change: Callable[[], None], target: Tensor) -> None:
    with torch.inference_mode(target.is_inference()):
        change()


def skips(when: Callable[[Any, Call], bool]) -> Mutant:
    return starts(lambda t, call, source, target, true: DONE if when(t, call) else true(call, source, target))


def _sends(kind: str, change: Callable[[Any, Tensor], Tensor], when: Callable[[Any], bool] | None = None) -> Mutant:
    """Shares are sent to other ranks than those they are for."""

    def altered(t: Any, call: Call, source: Any, target: Any) -> Request | None:
        if call.kind != kind or source is None or not (when is None or when(t)):
            return None
        return call, change(t, source.view(t.size, -1)).contiguous().view(-1), target

    return _asks(altered)


def _root(kind: str, root: Callable[[Any, Call], int]) -> Mutant:
    def change(t: Any, call: Call, source: Any, target: Any) -> Request | None:
        if call.kind != kind:
            return None
        call = call._replace(root=root(t, call))
        return call, target if kind == "reduce" or t.rank == call.root else None, target

    return _asks(change)


def _in_group(t: Any) -> bool:
    return "/group" in t.membership.label


def _next_in_group(t: Any, call: Call) -> int:
    return (call.root + 1) % t.size if _in_group(t) else call.root


def patched(place: Any, name: str, value: Any) -> Mutant:
    return lambda patch: patch.setattr(place, name, value, raising=False)


def around(place: Any, name: str, change: Callable[..., Any]) -> Mutant:
    """A function that gets the true one as its first argument."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        true = getattr(place, name)
        patch.setattr(place, name, lambda *arguments, **options: change(true, *arguments, **options))

    return apply


def _rows(t: Any, flat: Tensor) -> Tensor:
    return flat.view(t.size, -1)


def _reverse_rows(t: Any, call: Call, target: Tensor) -> None:
    target.copy_(_rows(t, target).flip(0).reshape(-1))


def _lose_own(t: Any, call: Call, target: Tensor) -> None:
    _rows(t, target)[t.rank].view(torch.uint8).zero_()


def _lose_end(t: Any, call: Call, target: Tensor) -> None:
    if target.numel() * target.element_size() > SMALL_BYTES:
        target[-1:].view(torch.uint8).bitwise_not_()


def _misplace_after_empty(t: Any, call: Call, target: Tensor) -> None:
    if 0 in call.recv_counts:
        target.copy_(target.roll(1))


def _by_gathering(fold: Callable[[Any, Call, list[Tensor], Tensor], None], when: Callable[[Call], bool]) -> Mutant:
    """An allreduce that gathers everything, and reduces it in a way of its own."""

    def start(t: Any, call: Call, source: Any, target: Any, true: Callable[..., Handle]) -> Handle:
        if call.kind != "allreduce" or not when(call) or not call.numel:
            return true(call, source, target)
        everything = torch.empty(t.size * target.numel(), dtype=target.dtype)
        true(call._replace(kind="allgather", reduction=""), source, everything).wait()
        _in_inference_mode(lambda: fold(t, call, list(_rows(t, everything)), target.view(-1)), target)
        return DONE

    return starts(start)


def _saturating(t: Any, call: Call, parts: list[Tensor], target: Tensor) -> None:
    wide = [part.to(torch.int64) for part in parts]
    limits = torch.iinfo(target.dtype)
    target.copy_(reduction.fold(wide, call.reduction, wide[0].clone()).clamp(limits.min, limits.max))


def _as_signed(t: Any, call: Call, parts: list[Tensor], target: Tensor) -> None:
    reduction.fold([part.view(torch.int8) for part in parts], call.reduction, target.view(torch.int8))


def _reads(change: Callable[[Tensor], Tensor]) -> Mutant:
    def apply(patch: pytest.MonkeyPatch) -> None:
        true = operands.readable
        for place in (operands, communicator):
            patch.setattr(place, "readable", lambda tensor: true(change(tensor.detach())))

    return apply


def _swap_equal_pieces(true: Any, outputs: Any, pieces: Any) -> None:
    order = sorted(range(len(pieces)), key=lambda number: (pieces[number].numel(), -number))
    equal = sorted(range(len(pieces)), key=lambda number: (pieces[number].numel(), number))
    true([outputs[number] for number in equal], [pieces[number] for number in order])


def _bytes_of_bool(name: str, other: str) -> Mutant:
    return lambda patch: patch.setitem(operands.BOOL_AS_BYTES, name, other)


def _reversed_list(true: Any, *arguments: Any, **options: Any) -> Any:
    found = true(*arguments, **{**options, "async_op": False})
    return finished(found[::-1] if found else found) if options.get("async_op") else found and found[::-1]


def finished(found: Any) -> SimpleNamespace:
    """A work."""
    return SimpleNamespace(wait=lambda: True, result=lambda: found)


class _NeverWaits(Handle):
    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def wait(self, timeout_s: float | None = None) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def _forget(true: Any, *arguments: Any, **options: Any) -> Any:
    """What would bring a result back to a strided tensor."""
    return true(*arguments, **options)[0], None


def _tuples_as_lists(true: Any, data: Any, **options: Any) -> Any:
    def changed(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: changed(part) for key, part in found.items()}
        return [changed(part) for part in found] if isinstance(found, list | tuple) else found

    return changed(true(data, **options))


def _spoil_outside(self: Any, tensor: Tensor, *_: Any, **__: Any) -> None:
    tensor.detach().view(-1).zero_() if tensor.is_contiguous() else None


#: Mistakes that the programs of the everyday profile find. Not among them, as it changes nothing: to add in another
#: order where one rank alone reduces each slice.
MUTANTS: dict[str, Mutant] = {
    "average is not divided": _reduces("avg", "sum"),
    "average of complex numbers is not divided": _reduces("avg", "sum", lambda t, call: call.dtype.is_complex),
    "average of three ranks is not divided": _reduces("avg", "sum", lambda t, call: t.size == 3),
    "minimum is the maximum": _reduces("min", "max"),
    "maximum is the minimum": _reduces("max", "min"),
    "product is the sum": _reduces("product", "sum"),
    "and is or": _reduces("band", "bor"),
    "or is exclusive": _reduces("bor", "bxor"),
    "exclusive or is not exclusive": _reduces("bxor", "bor"),
    "exclusive or of bool is or": _reduces("bxor", "max", lambda t, call: call.dtype is torch.bool),
    "sum of bool is exclusive": _bytes_of_bool("sum", "bxor"),
    "product of bool is or": _bytes_of_bool("product", "max"),
    "and of bool is or": _bytes_of_bool("band", "max"),
    "minimum of bool is the maximum": _bytes_of_bool("min", "max"),
    "minimum of reduce_scatter is the maximum": _reduces("min", "max", lambda t, call: call.kind == "reduce_scatter"),
    "product of reduce is the sum": _reduces("product", "sum", lambda t, call: call.kind == "reduce"),
    "16-bit floats are added in 16 bits": patched(reduction, "wide_dtype", lambda dtype, name: dtype),
    "integers saturate": _by_gathering(_saturating, lambda call: call.dtype in (torch.int8, torch.int16)),
    "bytes have a sign": _by_gathering(_as_signed, lambda c: c.dtype is torch.uint8 and c.reduction in ("min", "max")),
    "each rank adds from itself on": _by_gathering(
        lambda t, call, parts, out: reduction.fold(parts[t.rank :] + parts[: t.rank], call.reduction, out),
        lambda call: call.nbytes <= SMALL_BYTES,
    ),
    "reduce writes everywhere": _becomes("reduce", lambda call: call._replace(kind="allreduce", root=-1)),
    "reduce to another rank in a group": _root("reduce", _next_in_group),
    "reduce to a global rank": _root("reduce", lambda t, call: t.membership.ranks[call.root] % t.size),
    "broadcast is always from 0": _root("broadcast", lambda t, call: 0),
    "broadcast from another rank in a group": _root("broadcast", _next_in_group),
    "gather is reversed": spoils("gather", _reverse_rows),
    "gather is reversed in a group": spoils("gather", _reverse_rows, _in_group),
    "allgather is reversed in a group": spoils("allgather", _reverse_rows, _in_group),
    "allgather lacks the own share": spoils("allgather", _lose_own),
    "alltoall lacks the own share": spoils("alltoall", _lose_own),
    "alltoall is reversed": spoils("alltoall", _reverse_rows),
    "alltoall is reversed in a group": spoils("alltoall", _reverse_rows, _in_group),
    "alltoall_v is misplaced after an empty share": spoils("alltoall_v", _misplace_after_empty),
    "alltoall_v is reversed in a group": spoils(
        "alltoall_v", lambda _, call, out: out.copy_(torch.cat(out.split(list(call.recv_counts))[::-1])), _in_group
    ),
    "scatter is shifted": _sends("scatter", lambda t, rows: rows.roll(1, 0)),
    "scatter is shifted in a group": _sends("scatter", lambda t, rows: rows.roll(1, 0), _in_group),
    "reduce_scatter gives others' slices": _sends("reduce_scatter", lambda t, rows: rows.flip(0)),
    "reduce_scatter gives others' slices in a group": _sends("reduce_scatter", lambda t, rows: rows.flip(0), _in_group),
    "sendrecv goes around the other way": _becomes("sendrecv", lambda c: c._replace(root=c.source, source=c.root)),
    "a message loses its end": spoils("recv", lambda t, call, target: target[-1:].view(torch.uint8).bitwise_not_()),
    "a large allreduce loses its end": spoils("allreduce", _lose_end),
    "an allreduce of one element is left out": skips(lambda t, call: call.kind == "allreduce" and call.numel == 1),
    "a barrier does not wait": skips(lambda t, call: call.kind == "barrier"),
    "a barrier does not wait in a group": skips(lambda t, call: call.kind == "barrier" and _in_group(t)),
    "wait does not wait": starts(
        lambda t, call, source, target, true: (
            handle if (handle := true(call, source, target)) is DONE else _NeverWaits(handle)
        )
    ),
    "results do not come back to strided tensors": around(Intake, "in_place", _forget),
    "results do not come back to strided outputs": around(Intake, "output", _forget),
    "a conjugate is ignored": _reads(lambda tensor: tensor.conj() if tensor.is_conj() else tensor),
    "a negation is ignored": _reads(lambda tensor: -tensor if tensor.is_neg() else tensor),
    "overlap is ignored": patched(communicator, "apart", lambda source, target: source),
    "coalesced pieces of one size are swapped": around(composed, "copy_pieces", _swap_equal_pieces),
    "coalesced broadcast is always from 0": around(
        Communicator, "broadcast_coalesced", lambda true, self, tensors, root=0, **o: true(self, tensors, 0, **o)
    ),
    "coalesced allreduce always adds": around(
        Communicator, "allreduce_coalesced", lambda true, self, tensors, op=None, **o: true(self, tensors, **o)
    ),
    "objects are gathered backwards": around(Communicator, "allgather_object", _reversed_list),
    "objects are gathered backwards on one rank": around(Communicator, "gather_object", _reversed_list),
    "an object is always that of 0": around(
        Communicator, "broadcast_object", lambda true, self, obj=None, root=0, **o: true(self, obj or [], 0, **o)
    ),
    "objects are scattered backwards": around(
        Communicator, "scatter_object", lambda true, c, objs=None, root=0, **o: true(c, objs and objs[::-1], root, **o)
    ),
    "tuples arrive as lists": around(composed, "decode", _tuples_as_lists),
    "members are numbered backwards": patched(group, "sorted", lambda ranks: sorted(ranks)[::-1]),
    "the last rank of a host speaks for it": patched(
        group, "ranks_by_node", lambda nodes, true=group.ranks_by_node: [members[::-1] for members in true(nodes)]
    ),
    "a call of a rank that is no member writes": patched(NonMember, "allreduce", _spoil_outside),
}
