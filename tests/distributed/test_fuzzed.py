"""Random programs of calls through ``bagua.distributed`` and the backend ``bagua``, against torch's Gloo.

The everyday profile makes 2,000 calls, ``HYPOTHESIS_PROFILE=thorough`` many more. Each is made four times: by Gloo, by
``bagua.distributed`` on shared memory and on Gloo, and by a group of torch whose backend is ours.

Left out, because Gloo ends the process: tensors with a stride of 0 in ``reduce``, and ``reduce_scatter`` of single
numbers. Left out, because Gloo lacks it: products of complex numbers, and what ``fuzzing.gloo_has`` says; these
are made and checked, but there is nothing to compare with. Minima with NaN are another number on each rank of Gloo.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bagua.testing import ProcessRanks
from tests.contract.exercises import CallSetting, as_it_is
from tests.contract.reference import COMPLEX, COPIED
from tests.contract.results import strided, transposed, with_offset
from tests.distributed.fuzzing import GROUPS, KINDS, SIZE, gloo_has, run_programs
from tests.programs.mirror import REDUCING
from tests.programs.programs import PAIRS, Step
from tests.versions import TORCH, needs

pytestmark = [pytest.mark.gloo, needs("the calls of Gloo that torch 2.13 has", TORCH >= (2, 13))]

LENGTH = 100
REDUCTIONS = [(op, dtype) for op, dtype in PAIRS if not (dtype in COMPLEX and "PRODUCT" in str(op))]
COPIES = [(PAIRS[0][0], dtype) for dtype in (*COPIED, torch.uint32) if "float8" not in str(dtype)]
SHAPES = [(), (1,), (7,), (2, 3), (4, 0), (3, 1, 2), (1_023,), (20_011, 2)]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    kind = draw(st.sampled_from(KINDS))
    op, dtype = draw(st.sampled_from(REDUCTIONS if kind in REDUCING else COPIES))
    setting = CallSetting(
        shape=draw(st.sampled_from(SHAPES[kind.startswith("reduce_scatter") :])),
        dtype=dtype,
        op=op,
        root=draw(st.sampled_from(range(SIZE))),
        seed=draw(st.sampled_from(range(100))),
        present=draw(st.sampled_from([as_it_is, strided, transposed, with_offset])),
        options=draw(st.sampled_from([{}, {"async_op": True}])),
    )
    return Step("mirror", kind, draw(st.sampled_from(range(len(GROUPS)))), setting)


@pytest.mark.timeout(3_600)  # 50,000 calls take about ten minutes.
def test_programs_give_what_gloo_gives() -> None:
    programs: list[list[Step]] = []

    # The message names the call; shrinking would start new processes for each program that fails.
    @settings(phases=[Phase.generate])
    @given(st.lists(steps(), min_size=LENGTH, max_size=LENGTH))
    def draw(program: list[Step]) -> None:
        programs.append(program)

    draw()
    seen = [step for program in programs for step in program]
    assert len(seen) >= 2_000
    assert sum(map(gloo_has, seen)) > 0.7 * len(seen)
    assert {step.kind for step in seen} == set(KINDS)
    pairs = {(step.setting.op, step.setting.dtype) for step in seen if step.kind in REDUCING}
    assert len(pairs) > 0.9 * len(REDUCTIONS)
    ProcessRanks(SIZE, backend="shm", timeout_s=30.0, deadline_s=3_000.0).run(run_programs, programs)
