# The signatures of the functions that functional.py makes of methods, for type checkers.

from collections.abc import Sequence
from typing import Any

import torch

from bagua.comm.pipeline import Timeout
from bagua.comm.reduction import ReduceOp
from bagua.comm.startup.adoption import Group
from bagua.comm.work import Work

FUNCTIONS: tuple[str, ...]

def allreduce(
    tensor: torch.Tensor,
    op: ReduceOp.RedOpType = ...,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: ReduceOp.RedOpType = ...,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def broadcast(
    tensor: torch.Tensor, root: int = 0, comm: Group | None = None, *, async_op: bool = False, timeout: Timeout = None
) -> Work | None: ...
def allgather(
    output: torch.Tensor,
    tensor: torch.Tensor,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def gather(
    output: torch.Tensor | None,
    tensor: torch.Tensor,
    dst: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def scatter(
    output: torch.Tensor,
    tensor: torch.Tensor | None = None,
    root: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def reduce_scatter(
    output: torch.Tensor,
    tensor: torch.Tensor,
    op: ReduceOp.RedOpType = ...,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def alltoall(
    output: torch.Tensor,
    tensor: torch.Tensor,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def alltoall_v(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_counts: Sequence[int],
    input_counts: Sequence[int],
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def send(
    tensor: torch.Tensor, dst: int, comm: Group | None = None, *, async_op: bool = False, timeout: Timeout = None
) -> Work | None: ...
def recv(
    tensor: torch.Tensor, src: int, comm: Group | None = None, *, async_op: bool = False, timeout: Timeout = None
) -> Work | None: ...
def sendrecv(
    output: torch.Tensor,
    tensor: torch.Tensor,
    src: int,
    dst: int,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def barrier(comm: Group | None = None, *, async_op: bool = False, timeout: Timeout = None) -> Work | None: ...
def allreduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp.RedOpType = ...,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def broadcast_coalesced(
    tensors: Sequence[torch.Tensor],
    root: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None: ...
def broadcast_object(
    obj: object = None,
    root: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any: ...
def allgather_object(
    obj: object,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any: ...
def gather_object(
    obj: object,
    dst: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any: ...
def scatter_object(
    objs: Sequence[object] | None = None,
    root: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any: ...
