"""Accelerate's own test of communication hooks, and its option for ``torch.compile``, on CPUs.

torchrun --nproc_per_node 2 -m tests.clients.on_bagua tests.clients.accelerate_options
"""

from __future__ import annotations

import functools
import types
from typing import Any

import accelerate
import torch
from accelerate import DDPCommunicationHookType as Kind
from accelerate.state import AcceleratorState
from accelerate.test_utils.scripts import test_ddp_comm_hook as theirs
from torch import nn

DDP = nn.parallel.DistributedDataParallel
#: Hook, wrapper, options. Torch refuses bfloat16 on CPUs, and its batched PowerSGD fails on Gloo as well.
HOOKS: list[tuple[Kind, Kind, dict[str, Any]]] = [
    (Kind.NO, Kind.NO, {}),
    (Kind.FP16, Kind.NO, {}),
    (Kind.POWER_SGD, Kind.NO, {}),
    (Kind.POWER_SGD, Kind.FP16, {}),
    (Kind.POWER_SGD, Kind.NO, {"matrix_approximation_rank": 2}),
    (Kind.POWER_SGD, Kind.NO, {"start_powerSGD_iter": 2}),
]


@functools.wraps(DDP)
def ddp_on_cpus(module: nn.Module, device_ids: object = None, output_device: object = None, **options: Any) -> DDP:
    """What its test compares with, which names GPUs."""
    return DDP(module, **options)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, **_: float) -> None:
    """Gradients are of the order of 0.001 there, and its own tolerance is 0.01."""
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-5)


def hooks() -> None:
    stand_in = types.SimpleNamespace(
        **{name: getattr(torch, name) for name in ("manual_seed", "randn")},
        nn=types.SimpleNamespace(
            Parameter=nn.Parameter, parallel=types.SimpleNamespace(DistributedDataParallel=ddp_on_cpus)
        ),
        testing=types.SimpleNamespace(assert_close=assert_close),
    )
    theirs.torch = stand_in
    for hook, wrapper, options in HOOKS:
        theirs.test_ddp_comm_hook(hook, wrapper, options)


def trained(backend: str) -> list[float]:
    AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(dynamo_backend=backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(accelerator.process_index)
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(6, 8)).square().mean())
        optimizer.step()
    assert isinstance(accelerator.unwrap_model(model, keep_torch_compile=False), nn.Sequential)
    own = nn.utils.parameters_to_vector(model.parameters()).detach()
    everywhere = accelerator.gather(own[None])
    assert torch.equal(everywhere[0], everywhere[1])
    return own.tolist()


def main() -> None:
    state = accelerate.PartialState()
    assert state.distributed_type == accelerate.DistributedType.MULTI_CPU
    assert state.num_processes == 2
    hooks()
    torch.testing.assert_close(trained("aot_eager"), trained("no"))
    print("hooks and compiled models: right")
    accelerate.PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
