"""What ranks do in the tests of torch's names: run a script, and make one call in torch and here."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import torch
import torch.distributed

import bagua.comm
import bagua.distributed
from tests.versions import TORCH, lacks, renamed

SCRIPTS = Path(__file__).with_name("scripts")
_IMPORT = "import torch.distributed as dist\n"


def run_script(name, module):
    """What ``run`` of a script returns when it communicates through ``module``; nothing else of it changes."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(_IMPORT) == 1
    names = {}
    exec(compile(text.replace(_IMPORT, f"import {module} as dist\n"), f"{name}.py", "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Torch renames some of what scripts use.
        return names["run"](bagua.comm.get_rank(), bagua.comm.get_world_size())


def run_all_in_both(names):
    """The results of each script, by its name."""
    return {name: run_script_in_both(name) for name in names}


def run_script_in_both(name):
    """The results through bagua; they equal those through torch where torch has these ranks, too."""
    ours = run_script(name, "bagua.distributed")
    if torch.distributed.is_initialized():
        theirs = ours
        with _what_gloo_has():
            theirs = run_script(name, "torch.distributed")
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype is other.dtype
            # With more ranks, the sums of random numbers depend on the order of addition.
            exact = bagua.comm.get_world_size() == 2 or not one.is_floating_point()
            assert torch.equal(one, other) if exact else torch.allclose(one, other)
    return ours


@contextlib.contextmanager
def _what_gloo_has():
    """Leave a comparison out where Gloo in an old torch refuses, on all ranks, what newer versions have."""
    try:
        yield
    except RuntimeError as error:
        if not lacks(error):
            raise


# One call in both.

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [torch.uint8, torch.int8, torch.int32, torch.int64]
DTYPES = [*FLOATS, *COMPLEX, *WHOLE, torch.bool]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def kinds_of(name):
    """The kinds of calls that torch has on Gloo, as (dtype, reduction)."""
    if name in REDUCING:
        # Before 2.13, Gloo's reduce_scatter adds, whatever it is asked for.
        adds = TORCH < (2, 13) and name.startswith("reduce_scatter")
        operations = ["SUM"] if adds else OPS
        return [(dtype, op) for dtype in DTYPES for op in operations if legal(op, dtype)]
    return [(dtype, "") for dtype in DTYPES if not (name == "gather" and dtype.is_complex)]


def legal(op, dtype):
    """Whether both have this reduction; Gloo lacks bool, and bits of what is no whole number."""
    if op in ("BAND", "BOR", "BXOR"):
        return dtype in WHOLE
    if op == "AVG":
        return dtype in FLOATS
    return dtype is not torch.bool and (op == "SUM" or dtype not in COMPLEX)


def values(dtype, numel, rank):
    """Any values on two ranks, where a sum has one order; whole numbers on more, whose sums are exact."""
    generator = torch.Generator().manual_seed(1000 + rank)
    exact = bagua.comm.get_world_size() > 2
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if exact or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0 if dtype is torch.uint8 else -3, 5, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def _in_place(call):
    def compare(dist, dtype, op):
        tensor = values(dtype, 6, dist.get_rank())
        call(dist, tensor, op)
        return [tensor]

    return compare


def _reduce(dist, dtype, op):
    last = dist.get_world_size() - 1
    tensor = values(dtype, 6, dist.get_rank())
    dist.reduce(tensor, last, getattr(dist.ReduceOp, op))
    return [tensor] if dist.get_rank() == last else []


def _reduce_scatter(dist, dtype, op):
    size, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty(3, dtype=dtype)
    dist.reduce_scatter(output, list(values(dtype, 3 * size, rank).split(3)), getattr(dist.ReduceOp, op))
    return [output]


def _reduce_scatter_tensor(dist, dtype, op):
    size, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty(3, dtype=dtype)
    renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")(
        output, values(dtype, 3 * size, rank), getattr(dist.ReduceOp, op)
    )
    return [output]


def _all_reduce_async(dist, dtype, op):
    tensor = values(dtype, 6, dist.get_rank())
    work = dist.all_reduce(tensor, getattr(dist.ReduceOp, op), async_op=True)
    assert work.wait()
    assert work.is_completed()
    # Torch's future holds complex numbers as pairs.
    return [tensor] if dtype.is_complex else [tensor, *work.get_future().wait()]


def _all_reduce_coalesced(dist, dtype, op):
    tensors = [values(dtype, numel, dist.get_rank()) for numel in (2, 5)]
    dist.all_reduce_coalesced(tensors, getattr(dist.ReduceOp, op))
    return tensors


REDUCING = {
    "all_reduce": _in_place(lambda dist, tensor, op: dist.all_reduce(tensor, getattr(dist.ReduceOp, op))),
    "all_reduce_async": _all_reduce_async,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_tensor,
}


def _broadcast(dist, tensor):
    dist.broadcast(tensor, dist.get_world_size() - 1)
    return [tensor]


def _all_gather(dist, tensor):
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    work = dist.all_gather(outputs, tensor, async_op=True)
    work.wait()
    return outputs


def _all_gather_single(dist, tensor):
    output = tensor.new_empty(dist.get_world_size() * tensor.numel())
    renamed(dist, "all_gather_single", "all_gather_into_tensor")(output, tensor)
    return [output]


def _gather(dist, tensor):
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if dist.get_rank() == 1 else None
    dist.gather(tensor, outputs, 1)
    return outputs or []


def _scatter(dist, tensor):
    size = dist.get_world_size()
    output = tensor.new_empty(tensor.numel() // size)
    dist.scatter(output, list(tensor.chunk(size)) if dist.get_rank() == 1 else None, 1)
    return [output]


def _all_to_all_single(dist, tensor):
    output = torch.empty_like(tensor)
    dist.all_to_all_single(output, tensor)
    return [output]


def _uneven(dist, tensor):
    size, rank = dist.get_world_size(), dist.get_rank()
    sent = [tensor.numel() - (size - 1), *[1] * (size - 1)]
    received = [sent[rank]] * size
    output = tensor.new_empty(sum(received))
    dist.all_to_all_single(output, tensor, received, sent)
    return [output]


def _all_to_all(dist, tensor):
    inputs = list(tensor.chunk(dist.get_world_size()))
    outputs = [torch.empty_like(one) for one in inputs]
    dist.all_to_all(outputs, inputs)
    return outputs


def _message(dist, tensor):
    rank, received = dist.get_rank(), torch.empty_like(tensor)
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        assert dist.recv(received, 0) == 0
        return [received]
    return []


COPYING = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single_uneven": _uneven,
    "all_to_all": _all_to_all,
    "send_recv": _message,
}


def compare_with_torch():
    """Each kind of call gives the same bits in torch and here; how many there are, by name."""
    warnings.simplefilter("ignore", FutureWarning)  # Torch has other plans for some of its names.
    for name in (*REDUCING, *COPYING):
        for dtype, op in kinds_of(name):
            ours = _one_call(bagua.distributed, name, dtype, op)
            with _what_gloo_has():
                _assert_alike(_one_call(torch.distributed, name, dtype, op), ours, case=(name, dtype, op))
    return {name: len(kinds_of(name)) for name in (*REDUCING, *COPYING)}


def _one_call(dist, name, dtype, op):
    if op:
        return REDUCING[name](dist, dtype, op)
    return COPYING[name](dist, values(dtype, 6, dist.get_rank()))


def _assert_alike(theirs, ours, *, case):
    assert len(theirs) == len(ours), case
    for one, other in zip(theirs, ours, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), case
        assert torch.equal(one, other), (case, one, other)
