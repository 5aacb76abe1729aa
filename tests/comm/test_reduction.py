"""Which reductions exist, and that folding gives what plain arithmetic gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.comm import ReduceOp
from bagua.comm.operands import check_communicable, reduction_name
from bagua.comm.reduction import divide, fold
from bagua.errors import InvalidReduceOpError, InvalidTensorError
from tests.contract.reference import COPIED, LEGAL

NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.AVG: "avg",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}


@pytest.mark.parametrize(("op", "legal"), LEGAL, ids=[str(op) for op, _ in LEGAL])
def test_a_reduction_exists_exactly_where_it_has_a_meaning(op, legal):
    for dtype in COPIED:
        for spelling in (op, ReduceOp(op)):
            if dtype in legal:
                assert reduction_name(spelling, dtype) == NAMES[op]
            else:
                with pytest.raises(InvalidReduceOpError):
                    reduction_name(spelling, dtype)


def test_the_error_says_which_reductions_there_are():
    with pytest.raises(InvalidReduceOpError, match=r"AVG has no meaning.*float32") as caught:
        reduction_name(ReduceOp.AVG, torch.int32)
    assert caught.value.argument == "op"
    assert "int32" in str(caught.value)
    with pytest.raises(InvalidReduceOpError, match="BXOR"):
        reduction_name("sum", torch.float32)


def test_dtypes_that_travel():
    for dtype in COPIED:
        check_communicable(dtype, "tensor")
    with pytest.raises(InvalidTensorError, match="bits16"):
        check_communicable(torch.bits16, "tensor")


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]), st.integers(1, 9)
)
def test_dividing_gives_the_bits_of_a_division(dtype, by):
    real = torch.tensor(0, dtype=dtype).abs().dtype
    limits = torch.finfo(real)
    special = torch.tensor([0.0, -0.0, limits.tiny, limits.smallest_normal * 1.5, limits.max, limits.eps, torch.inf])
    total = torch.cat(
        [special.to(dtype), limits.tiny * torch.randn(20, dtype=real).to(dtype), torch.randn(20).to(dtype)]
    )
    expected = total.clone().div_(by)
    assert divide(total, by) is total
    assert torch.equal(total.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("numel", [100, 200_000])
def test_autograd_notices_what_is_written(numel):
    out = torch.zeros(numel)
    before = out._version
    fold([torch.ones(numel)] * 3, "sum", out)
    assert out._version > before
    assert torch.equal(out, torch.full((numel,), 3.0))
