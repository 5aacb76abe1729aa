"""Chapter 1: results and arguments. Every collective against plain tensors; what cannot work is refused."""

import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

import bagua.comm
from bagua.comm import Communicator, ReduceOp
from bagua.errors import BaguaError, ConfigurationError, InvalidRankError, InvalidReduceOpError, InvalidTensorError
from tests.contract import exercises
from tests.contract.exercises import FLOATS, LEGAL, TENSOR_KINDS, CallSetting, communicator, home, perform

REDUCING = ("allreduce", "reduce", "reduce_scatter")
COPYING = tuple(kind for kind in TENSOR_KINDS if kind not in REDUCING)
ROOTED = ("reduce", "broadcast", "gather", "scatter", "broadcast_coalesced")
#: Above every threshold at which a transport changes its algorithm, and no multiple of anything.
LARGE = 300_007


def exercise_all(setting: CallSetting) -> None:
    for kind in TENSOR_KINDS:
        perform(kind, communicator(), setting)


def reduce_all_of_it(
    comm: Communicator | None = None, *, numels: Sequence[int] = (7,), rounds_once: bool = False
) -> None:
    comm = comm or communicator()
    for op, dtypes in LEGAL:
        for dtype, kind, numel in itertools.product(dtypes, REDUCING, numels):
            setting = CallSetting(shape=(numel,), dtype=dtype, op=op, root=comm.size - 1, rounds_once=rounds_once)
            perform(kind, comm, setting)
    perform("allreduce", comm, CallSetting(op=ReduceOp(ReduceOp.MAX)))  # An object in place of the value.


def carry_everything(comm: Communicator | None = None, shapes: Sequence[tuple[int, ...]] = ((2, 3),)) -> None:
    for dtype, kind, shape in itertools.product((*exercises.COPIED, torch.uint32), COPYING, shapes):
        perform(kind, comm or communicator(), CallSetting(shape=shape, dtype=dtype))


def use_every_root() -> None:
    comm = communicator()
    for root, kind in itertools.product(range(comm.size), ROOTED):
        perform(kind, comm, CallSetting(root=root, seed=root + 1))


# Layouts: each gives a tensor of the same values.


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    backwards = list(range(tensor.dim()))[::-1]
    return tensor.permute(backwards).contiguous().permute(backwards)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


def with_offset(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype, device=tensor.device)
    wide[2:-1] = tensor.reshape(-1)
    return wide[2:-1].view(tensor.shape)


def conjugated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj().resolve_conj().conj()


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def with_history(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_() * 1


def use_every_layout() -> None:
    comm = communicator()
    for kind in TENSOR_KINDS:
        for present in (transposed, with_offset, negated):
            perform(kind, comm, CallSetting(present=present))
        perform(kind, comm, CallSetting(dtype=torch.complex64, present=conjugated))
        # A single element is "contiguous" whatever its stride; each dtype may take another path.
        dtypes = (torch.float32, torch.int16, torch.bool, torch.complex64)
        for shape, dtype in itertools.product(((2, 3), (1,), ()), dtypes):
            for tensor in perform(kind, comm, CallSetting(shape=shape, dtype=dtype, present=strided)).touched:
                between = tensor._base[..., 1]  # type: ignore[index]
                assert not between.any(), f"{kind} wrote between the elements of its tensor"


def use_tensors_with_history() -> None:
    for present, kind in itertools.product((as_leaf, with_history), TENSOR_KINDS):
        for tensor in perform(kind, communicator(), CallSetting(present=present)).touched:
            assert tensor.requires_grad, f"{kind} made a tensor forget that it requires gradients"


def exercise_in_inference_mode() -> None:
    with torch.inference_mode():
        for kind in TENSOR_KINDS:
            perform(kind, communicator(), CallSetting())
            perform(kind, communicator(), CallSetting(present=strided))


def made_in_inference_mode(tensor: torch.Tensor) -> torch.Tensor:
    """As outputs of a model are that ran in inference mode."""
    with torch.inference_mode():
        return tensor.clone()


def strided_in_inference_mode(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return strided(tensor)


def exercise_on_inference_tensors() -> None:
    """Outside of inference mode, with results that are written by the thread that completes the call."""
    for kind in TENSOR_KINDS:
        for shape, async_op in (((2, 3), False), ((2, 3), True), ((LARGE,), True)):
            setting = CallSetting(shape=shape, options={"async_op": async_op})
            perform(kind, communicator(), replace(setting, present=made_in_inference_mode))
        perform(kind, communicator(), CallSetting(present=strided_in_inference_mode))
        dtype = torch.int16 if kind in REDUCING else torch.float8_e4m3fn
        perform(kind, communicator(), CallSetting(dtype=dtype, present=made_in_inference_mode))
    threes = [torch.ones(3, dtype=dtype, device=home(communicator())) for dtype in FLOATS]
    work = communicator().allreduce_coalesced([made_in_inference_mode(one) for one in threes], async_op=True)
    for tensor in work.get_future().wait():
        assert tensor.tolist() == [communicator().size] * 3


def send_to_oneself() -> None:
    comm = communicator()
    received = torch.zeros(3, device=home(comm))
    comm.sendrecv(received, torch.full_like(received, comm.rank + 1.0), comm.rank, comm.rank)
    assert received.tolist() == [comm.rank + 1.0] * 3


def use_other_shapes() -> None:
    """Only the number of elements counts."""
    comm = communicator()
    device = home(comm)
    tensor = torch.full((6,) if comm.rank % 2 else (2, 3), 1.0, device=device)
    comm.allreduce(tensor)
    assert tensor.tolist() == ([float(comm.size)] * 6 if comm.rank % 2 else [[float(comm.size)] * 3] * 2)
    output = torch.zeros(comm.size * 6, device=device)
    comm.allgather(output, tensor)
    assert output.tolist() == [float(comm.size)] * 6 * comm.size


def return_results() -> list[torch.Tensor]:
    """Everything that must be the same bits on all ranks, on numbers where order and rounding matter."""
    comm = communicator()
    results = [*perform("allreduce", comm, CallSetting(shape=(LARGE,))).results]
    for shape in ((5,), (1023,), (40_001,)):
        for dtype, op in itertools.product(FLOATS, (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)):
            results += perform("allreduce", comm, CallSetting(shape=shape, dtype=dtype, op=op)).results
        for kind in ("broadcast", "allgather", "allreduce_coalesced", "broadcast_coalesced"):
            results += perform(kind, comm, CallSetting(shape=shape)).results
    return [result.cpu() if result.numel() < 10_000 else _digest(result) for result in results]


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A few numbers in place of many: two different tensors hardly share them."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).to(torch.int64)
    places = torch.arange(1, raw.numel() + 1)
    return torch.stack([raw.sum(), (raw * places).sum(), (raw * (places % 65_521) * places).sum()])


def add_small_to_large() -> None:
    """256 and the spacing of numbers there: each 1 alone is lost in bfloat16, all of them together are not."""
    comm = communicator()
    own = 256.0 if comm.rank == 0 else 1.0
    for shape, kind in itertools.product(((3,), (LARGE,)), REDUCING):
        result = tensor = torch.full((comm.size, *shape), own, dtype=torch.bfloat16, device=home(comm))
        if kind == "allreduce":
            comm.allreduce(tensor)
        elif kind == "reduce":
            comm.reduce(tensor, 0)
            result = tensor if comm.rank == 0 else tensor[:0]
        else:
            result = tensor[0].clone()
            comm.reduce_scatter(result, tensor)
        expected = torch.tensor(256.0 + comm.size - 1).to(torch.bfloat16).item()
        assert bool((result == expected).all()), f"{kind}: {result.flatten()[:3]} instead of {expected}"


def reduce_own_memory() -> None:
    comm = communicator()
    for numel in (0, 5, LARGE):
        tensor = comm.empty(numel, dtype=torch.float32, device=home(comm))
        assert tensor.shape == (numel,)
        for _ in range(2):
            tensor.fill_(comm.rank + 1.0)
            comm.allreduce(tensor)
            assert bool((tensor == comm.size * (comm.size + 1) / 2).all())
        part = tensor[: numel // 2]
        comm.broadcast(part, comm.size - 1)


def exercise_in_subgroups() -> None:
    """Ranks in a call are ranks inside the communicator; ranks outside need not know."""
    size = communicator().size
    members = ([*range(size)], [size - 1], [*range(size // 2, size)], [*range(0, size, 2)])
    groups = [bagua.comm.new_group(some) for some in members]
    for number, group in enumerate(groups, start=1):
        for kind in TENSOR_KINDS if group else ():
            comm = group.global_communicator
            perform(kind, comm, CallSetting(seed=number, root=comm.size - 1))
    perform("allreduce", communicator(), CallSetting())


#: A call, the error it gets, and the argument that the error names.
Refused = tuple[Callable[[Communicator], Any], type[BaguaError], str]
RANKS = ("root", "dst", "src")
TENSORS = ("output", "tensor", "tensors")
MESSAGES = ("send", "recv", "send_object", "recv_object")


def expect(call: Callable[[Communicator], Any], kind: type[BaguaError], argument: str) -> None:
    """Fail unless ``call`` is refused with this error, which names the argument and both sides."""
    comm = communicator()
    before = comm.history()
    try:
        call(comm)
    except kind as error:
        named = getattr(error, "argument", None)
        assert named is not None, f"{error!r} names no argument"
        assert argument in named, f"{error!r} names {named}, not {argument}"
        assert all(part in str(error) for part in (argument, "expected", "seen")), str(error)
    else:
        raise AssertionError(f"nothing was refused where {kind.__name__} about {argument} is due")
    assert comm.usable, "a refused argument broke the communicator"
    assert comm.history() == before, "a refused call was counted"


def good_calls(dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Any]]:
    """For each kind of call, arguments that work. All ranks would have to make it together."""
    comm = communicator()
    size, first, other = comm.size, comm.rank == 0, (comm.rank + 1) % comm.size

    def ones(shares: int) -> torch.Tensor:
        return torch.ones(2 * shares).to(home(comm), dtype)

    counts = {"output_counts": [2] * size, "input_counts": [2] * size}
    return {
        "allreduce": {"tensor": ones(size)}, "reduce": {"tensor": ones(size), "dst": 0},
        "broadcast": {"tensor": ones(size)}, "allgather": {"output": ones(size), "tensor": ones(1)},
        "gather": {"output": ones(size) if first else None, "tensor": ones(1)},
        "scatter": {"output": ones(1), "tensor": ones(size) if first else None},
        "reduce_scatter": {"output": ones(1), "tensor": ones(size)},
        "alltoall": {"output": ones(size), "tensor": ones(size)},
        "alltoall_v": {"output": ones(size), "tensor": ones(size), **counts},
        "sendrecv": {"output": ones(1), "tensor": ones(1), "src": other, "dst": other},
        "send": {"tensor": ones(1), "dst": other}, "recv": {"tensor": ones(1), "src": other}, "barrier": {},
        "allreduce_coalesced": {"tensors": [ones(1), ones(2)]}, "broadcast_coalesced": {"tensors": [ones(1), ones(2)]},
        "broadcast_object": {}, "allgather_object": {"obj": "x"}, "gather_object": {"obj": "x"},
        "scatter_object": {"objs": ["x"] * size if first else None},
        "send_object": {"obj": "x", "dst": other}, "recv_object": {"src": other},
    }  # fmt: skip


def refuse_everywhere(names: Sequence[str], bad: Any, error: type[BaguaError], **making: Any) -> None:
    """Expect ``error`` wherever a call has an argument of one of these names, and ``bad`` stands there."""
    calls = good_calls(**making)
    given = [tensor for call in calls.values() for tensor in call.values() if isinstance(tensor, torch.Tensor)]
    before = [tensor.clone() for tensor in given]
    for kind, good in calls.items():
        parameters = inspect.signature(getattr(Communicator, kind)).parameters
        for name in names:
            absent = name not in parameters or (name in good and good[name] is None)
            if absent or (kind in MESSAGES and communicator().size == 1 and name not in RANKS):
                continue
            value = [good["tensors"][0], bad] if name == "tensors" else bad
            expect(operator.methodcaller(kind, **{**good, name: value}), error, name)
    for tensor, old in zip(given, before, strict=True):
        exercises.assert_same(tensor, old, f"what was passed beside {names}")


def try_meaningless_reductions() -> None:
    for op, legal in LEGAL:
        for dtype in [dtype for dtype in exercises.REDUCED if dtype not in legal] + [torch.float8_e5m2]:
            refuse_everywhere(["op"], op, InvalidReduceOpError, dtype=dtype)
    for unknown in ("sum", None, 17, ReduceOp.PREMUL_SUM, torch.ones(2)):
        refuse_everywhere(["op"], unknown, InvalidReduceOpError)
    perform("allreduce", communicator(), CallSetting())


def try_wrong_tensors() -> None:
    device = home(communicator())
    foreign = torch.empty(2, dtype=torch.bits16, device=device)
    for bad in ([1.0, 2.0], None, 3.0, torch.ones(2, device="meta"), torch.eye(2, device=device).to_sparse(), foreign):
        refuse_everywhere(TENSORS, bad, InvalidTensorError)
    try_outputs_that_overlap_themselves()
    for given, kind in itertools.product((torch.ones(2, device=device), 5, None), ("allreduce", "broadcast")):
        expect(operator.methodcaller(f"{kind}_coalesced", given), InvalidTensorError, "tensors")
    perform("allreduce", communicator(), CallSetting())


def try_outputs_that_overlap_themselves() -> None:
    """What is only read may overlap itself."""
    size, good = communicator().size, good_calls()
    repeated = torch.ones(1, device=home(communicator())).expand(2 * size)
    windows = torch.ones(2 * size, device=repeated.device).as_strided((size, 2), (1, 1))
    for bad in (repeated, windows) if size > 1 else (repeated,):
        for kind in ("allreduce", "reduce", "allgather", "alltoall", "scatter", "allreduce_coalesced"):
            name = next(iter(good[kind]))
            call = operator.methodcaller(kind, **{**good[kind], name: [bad] if name == "tensors" else bad})
            expect(call, InvalidTensorError, name)
        assert bool((bad == 1).all())


def try_wrong_ranks() -> None:
    comm = communicator()
    for bad in (-1, comm.size, True, "0", None, 0.0):
        refuse_everywhere(RANKS, bad, InvalidRankError)
    tensor = torch.ones(2, device=home(comm))
    expect(lambda c: c.send(tensor, c.rank), InvalidRankError, "dst")
    expect(lambda c: c.recv(tensor, c.rank), InvalidRankError, "src")
    if comm.size > 1:
        other = (comm.rank + 1) % comm.size
        expect(lambda c: c.sendrecv(tensor, tensor.clone(), c.rank, other), InvalidRankError, "src")
        expect(lambda c: c.sendrecv(tensor, tensor.clone(), other, c.rank), InvalidRankError, "dst")
    perform("allreduce", comm, CallSetting())


def try_wrong_sizes() -> None:
    comm = communicator()
    size, device = comm.size, home(comm)
    share, whole = torch.ones(3, device=device), torch.ones(3 * size, device=device)
    halves = torch.ones(3 * size, dtype=torch.float16, device=device)
    ones = [1] * size
    fractions: Any = [1.0] * size
    flags: Any = [True] * size
    refused: list[Refused] = [
        (lambda c: c.allgather(whole[1:], share), InvalidTensorError, "output"),
        (lambda c: c.allgather(halves, share), InvalidTensorError, "output"),
        (lambda c: c.gather(whole[1:] if c.rank == 0 else share, share), InvalidTensorError, "output"),
        (lambda c: c.gather(None if c.rank == 0 else whole, share), InvalidTensorError, "output"),
        (lambda c: c.scatter(share, whole[1:] if c.rank == 0 else share), InvalidTensorError, "tensor"),
        (lambda c: c.scatter(share, None if c.rank == 0 else whole), InvalidTensorError, "tensor"),
        (lambda c: c.reduce_scatter(share, whole[1:]), InvalidTensorError, "tensor"),
        (lambda c: c.reduce_scatter(share, halves), InvalidTensorError, "tensor"),
        (lambda c: c.alltoall(whole[1:], whole), InvalidTensorError, "output"),
        (lambda c: c.alltoall(halves, whole), InvalidTensorError, "output"),
        (lambda c: c.alltoall_v(whole[:size], whole[:size], ones, ones[1:]), ConfigurationError, "input_counts"),
        (lambda c: c.alltoall_v(whole[:size], whole[:size], ones[1:], ones), ConfigurationError, "output_counts"),
        (lambda c: c.alltoall_v(whole, whole[:size], ones, ones), ConfigurationError, "output_counts"),
        (lambda c: c.alltoall_v(whole[:size], whole, ones, ones), ConfigurationError, "input_counts"),
        (lambda c: c.alltoall_v(whole[:size], whole[:size], ones, fractions), ConfigurationError, "input_counts"),
        (lambda c: c.alltoall_v(whole[:size], whole[:size], ones, flags), ConfigurationError, "input_counts"),
        (lambda c: c.alltoall_v(whole[:size], whole[:size], ones, [*ones, 0]), ConfigurationError, "input_counts"),
        (lambda c: c.alltoall_v(halves[:size], whole[:size], ones, ones), InvalidTensorError, "output"),
        (lambda c: c.sendrecv(halves, whole, (c.rank - 1) % size, (c.rank + 1) % size), InvalidTensorError, "output"),
    ]
    if size > 1:
        negative = [-1, *ones[2:], 3]
        refused += [
            (lambda c: c.alltoall(whole[1:], whole[1:]), InvalidTensorError, "tensor"),
            (lambda c: c.alltoall_v(whole[:size], whole[:size], ones, negative), ConfigurationError, "input_counts"),
        ]
    for case in refused:
        expect(*case)
    assert share.tolist() + whole.tolist() == [1.0] * (3 + 3 * size)
    perform("allreduce", comm, CallSetting())


def refuse_the_root() -> None:
    """What only the root passes is wrong there only. The others wait for its next call."""
    comm = communicator()
    share, whole = torch.ones(3, device=home(comm)), torch.ones(3 * comm.size, device=home(comm))
    for kind, call, argument in (
        ("gather", lambda c: c.gather(whole[1:], share), "output"),
        ("scatter", lambda c: c.scatter(share, whole[1:]), "tensor"),
    ):
        if comm.rank == 0:
            expect(call, InvalidTensorError, argument)
        perform(kind, comm, CallSetting())


def try_wrong_timeouts() -> None:
    for bad in (0, -1.0, float("nan"), "1", True, timedelta(0)):
        refuse_everywhere(["timeout"], bad, ConfigurationError)
    perform("allreduce", communicator(), CallSetting())


def use_endless_timeouts() -> None:
    """Longer than the clocks of a transport can tell is as long as they can."""
    for timeout in (float("inf"), 1e15, timedelta.max):
        for async_op, kind in itertools.product((False, True), ("allreduce", "allgather", "barrier")):
            perform(kind, communicator(), CallSetting(options={"timeout": timeout, "async_op": async_op}))
        work = communicator().barrier(async_op=True)
        assert work.wait(timeout)
