"""Copying flat tensors, below and above the size from which the C library does it."""

import pytest
import torch

from bagua.comm.transports.memory.copying import copy_flat


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("nbytes", [0, 1 << 10, (1 << 18) + 48], ids=str)
def test_every_byte_arrives_and_no_other_changes(nbytes, dtype):
    numel = nbytes // dtype.itemsize
    source = torch.randint(0, 2, (numel + 2,)).to(dtype)
    target = torch.ones(numel + 2, dtype=dtype)
    copy_flat(target[1:-1], source[1:-1])
    assert torch.equal(target[1:-1], source[1:-1])
    assert target[0] == target[-1] == 1


def test_what_does_not_fit_is_never_copied():
    target = torch.zeros(1 << 17)
    for source in (torch.ones(1 << 16), torch.ones(1 << 17, dtype=torch.float64), torch.ones(1 << 18)[::2]):
        with pytest.raises(AssertionError):
            copy_flat(target, source)
    assert not target.any()


def test_tensors_of_inference_mode_are_copied_into():
    with torch.inference_mode():
        target = torch.zeros(1 << 17)
        copy_flat(target, torch.ones(1 << 17))
    assert target.all()
