"""The fused kernels against the plain operations: on a GPU, or in Triton's interpreter where there is none."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from bagua.compression import Metadata, MinMaxUInt8, minmax_uint8
from tests.harness import coded

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch; there is none here")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Triton looks at this when it is imported, so the interpreter needs a process of its own.
INTERPRETER = "TRITON_INTERPRET"
BLOCK = 100

can_run = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get(INTERPRETER) != "1", reason="runs in a process with the interpreter"
)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETER in os.environ, reason="the kernels run in this process")
def test_the_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    subprocess.run(command, env={**os.environ, INTERPRETER: "1"}, check=True, timeout=100)


@pytest.fixture
def fused(monkeypatch):
    """``MinMaxUInt8`` with kernels, whatever the device."""
    kernels = importlib.import_module("bagua.compression.minmax_kernels")

    def use(*, used: bool) -> None:
        monkeypatch.setattr(minmax_uint8, "_kernels", lambda _: kernels if used else None)

    return use


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1234, generator=generator)
    odd = normal.clone()
    odd[[5, 350, 1233]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return {
        "normal": normal, "one": normal[:1], "whole blocks": normal[: 3 * BLOCK], "far from zero": normal + 100,
        "below zero": -normal.abs() - 1, "zeros": torch.zeros(150), "constant": torch.full((150,), 1.1),
        "tiny": normal * 1e-35, "huge": normal * 1e4, "not finite": odd,
    }  # fmt: skip


@can_run
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # of NumPy, which the interpreter computes with
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", inputs())
def test_the_kernels_do_what_the_plain_operations_do(fused, name, dtype):
    tensor, codec = inputs()[name].to(DEVICE, dtype), MinMaxUInt8(BLOCK)
    metadata = Metadata.of(tensor)
    fused(used=False)
    plain = codec.compress(tensor)
    fused(used=True)
    data = codec.compress(tensor)
    split = -(-tensor.numel() // BLOCK) * 8
    assert torch.equal(data[:split].view(torch.float32).nan_to_num(7), plain[:split].view(torch.float32).nan_to_num(7))
    assert (data[split:].int() - plain[split:].int()).abs().max() <= 1
    assert (data[split:] != plain[split:]).double().mean() < 0.01
    for target in (dtype, torch.float32, torch.float64):
        for add in (False, True):
            expected, out = (torch.full((tensor.numel(),), 2.0, dtype=target, device=DEVICE) for _ in range(2))
            fused(used=False)
            codec.decompress(data, metadata, out=expected, add=add)
            fused(used=True)
            codec.decompress(data, metadata, out=out, add=add)
            assert torch.allclose(out, expected, rtol=2 * torch.finfo(target).eps, atol=1e-6, equal_nan=True)


@can_run
def test_zero_stays_zero_in_the_kernels(fused):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tensor[::7] = 0
    fused(used=True)
    assert (coded(MinMaxUInt8(BLOCK), tensor)[::7] == 0).all()
