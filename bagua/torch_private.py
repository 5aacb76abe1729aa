"""Private names of torch, outside of ``torch.distributed``, that this package cannot do without.

``tests/comm/test_torch_private.py`` says which one is gone when torch is upgraded. ``torch._foreach_*`` may be used
anywhere: torch documents these functions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame

#: Have autograd call a function at the end of the backward pass that the calling thread is in: DDP and FSDP of torch do
#: it in this way, there is no hook for the end of a pass. Each step asks: without Python.
when_backward_ends: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

#: Number of the backward pass that the calling thread is in; negative outside of one, where ``when_backward_ends`` is
#: an error. Threads may run several passes at a time.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id


def accumulates(parameter: torch.Tensor) -> bool:
    """Whether the backward pass that the calling thread is in adds to the gradient of ``parameter``; also at its end.

    A pass of ``torch.autograd.grad`` does not. One inside, as that of a reentrant checkpoint, is not looked at.
    """
    with torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    assert function is not None
    node = function.next_functions[0][0]
    assert node is not None
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # It is asked for by ``torch.autograd.grad``.
        return False


#: The ``DistributedDataParallel`` of torch whose forward pass runs, if one does; it may be another thread's.
active_ddp: Callable[[], torch.nn.Module | None] = functools.partial(
    operator.attrgetter("_active_ddp_module"), torch.nn.parallel.DistributedDataParallel
)


def ddp_seconds(module: torch.nn.parallel.DistributedDataParallel, every: int = 0) -> float:
    """Seconds of the last sampled step in which communication went on after computing; negative before the first one.

    Args:
        module: a wrapped module.
        every: sample one step in so many from now on; 0 leaves it as it is.
    """
    if every:
        module._set_ddp_runtime_logging_sample_rate(every)  # type: ignore[no-untyped-call]
    data = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    end, computed = data.get("backward_comm_time_end", 0), data.get("backward_compute_time_end", 0)
    return max(end - computed, 0) * 1e-9 if end and computed else -1.0


def do_not_compile(*functions: Callable[..., Any], inside: bool = False) -> None:
    """Keep ``torch.compile`` away from ``functions`` and from what they call.

    Torch calls them in the middle of compiled programs, where Dynamo would compile them as if they were the program's.
    ``torch.compiler.disable`` does the same but imports Dynamo, which takes seconds, and costs about a microsecond for
    each call.

    Args:
        functions: functions in Python.
        inside: they are not traced in the middle of a frame that is compiled, either; a strict export refuses that.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)
        if inside:
            function._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable sets it


#: Whether a profiler of torch runs. A range costs microseconds also if none does, and each call asks: without Python.
profiling: Callable[[], bool] = functools.partial(operator.attrgetter("_is_profiler_enabled"), torch.autograd.profiler)


def profiler_range(name: str) -> Callable[[], None]:
    """Begin a range of the profiler; what is returned ends it, in the same thread."""
    entered = torch.profiler.record_function(name)
    entered.__enter__()  # type: ignore[no-untyped-call]
    return lambda: entered.__exit__(None, None, None)
