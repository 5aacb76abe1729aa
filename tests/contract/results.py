"""Chapter 1: results. Every collective against plain tensors: dtypes, reductions, roots, layouts, aliases."""

from __future__ import annotations

from dataclasses import replace

import torch

import bagua.comm
from bagua.comm import ReduceOp
from tests.contract.exercises import TENSOR_KINDS, CallSetting, communicator, home, perform
from tests.contract.reference import COPIED, FLOATS, LEGAL

REDUCING = ("allreduce", "reduce", "reduce_scatter")
COPYING = tuple(kind for kind in TENSOR_KINDS if kind not in REDUCING)
ROOTED = ("reduce", "broadcast", "gather", "scatter", "broadcast_coalesced")
#: Above every threshold at which a transport changes its algorithm, and no multiple of anything.
LARGE = 300_007


def exercise_all(setting: CallSetting) -> None:
    for kind in TENSOR_KINDS:
        perform(kind, communicator(), setting)


def reduce_everything() -> None:
    comm = communicator()
    for op, dtypes in LEGAL:
        for dtype in dtypes:
            for kind in REDUCING:
                perform(kind, comm, CallSetting(shape=(7,), dtype=dtype, op=op, root=comm.size - 1))
    perform("allreduce", comm, CallSetting(op=ReduceOp(ReduceOp.MAX)))  # An object in place of the value.


def carry_everything() -> None:
    for dtype in COPIED:
        for kind in COPYING:
            perform(kind, communicator(), CallSetting(dtype=dtype))


def use_every_root() -> None:
    comm = communicator()
    for root in range(comm.size):
        for kind in ROOTED:
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
        for shape in ((2, 3), (1,), ()):
            for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64):
                exercise = perform(kind, comm, CallSetting(shape=shape, dtype=dtype, present=strided))
                for tensor in exercise.touched:
                    between = tensor._base[..., 1]  # type: ignore[index]
                    assert not between.any(), f"{kind} wrote between the elements of its tensor"


def use_tensors_with_history() -> None:
    for present in (as_leaf, with_history):
        for kind in TENSOR_KINDS:
            exercise = perform(kind, communicator(), CallSetting(present=present))
            for tensor in exercise.touched:
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
    work = communicator().allreduce_coalesced(
        [made_in_inference_mode(torch.ones(3, dtype=dtype, device=home(communicator()))) for dtype in FLOATS],
        async_op=True,
    )
    assert work is not None
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
    results: list[torch.Tensor] = []
    results += perform("allreduce", comm, CallSetting(shape=(LARGE,))).results
    for shape in ((5,), (1023,), (40_001,)):
        for dtype in FLOATS:
            for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
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
    for shape in ((3,), (LARGE,)):
        for kind in REDUCING:
            tensor = torch.full((comm.size, *shape), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
            tensor = tensor.to(home(comm))
            result = tensor
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
    for number, group in enumerate(groups):
        if not group:
            continue
        comm = group.global_communicator
        for kind in TENSOR_KINDS:
            perform(kind, comm, replace(CallSetting(seed=number + 1), root=comm.size - 1))
    perform("allreduce", communicator(), CallSetting())
