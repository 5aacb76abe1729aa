"""Random programs of calls through ``bagua.distributed`` and the backend ``bagua``, against torch's Gloo.

The everyday profile makes 2,000 calls, ``HYPOTHESIS_PROFILE=thorough`` many more. Each is made four times: by Gloo, by
``bagua.distributed`` on shared memory and on Gloo, and by a group of torch whose backend is ours.

Left out, because Gloo ends the process: tensors with a stride of 0 in ``reduce``, and ``reduce_scatter`` of single
numbers. Left out, because Gloo lacks it: products of complex numbers, and what ``gloo_has`` says; these
are made and checked, but there is nothing to compare with. Minima with NaN are another number on each rank of Gloo.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import bagua.comm
import bagua.distributed
import bagua.torch_api
from bagua.testing import ProcessRanks
from tests.contract.exercises import CallSetting, Exercise, as_it_is
from tests.contract.reference import COMPLEX, COPIED, assert_same
from tests.contract.results import strided, transposed, with_offset
from tests.programs.mirror import MIRROR, REDUCING
from tests.programs.places import Place
from tests.programs.programs import PAIRS, Step
from tests.versions import TORCH, needs

pytestmark = [pytest.mark.gloo, needs("the calls of Gloo that torch 2.13 has", TORCH >= (2, 13))]

SIZE = 3
#: All ranks, and groups of some: numbers of ranks in a group are not those of the ranks.
GROUPS = ((0, 1, 2), (1, 2), (0, 2))
GLOO = "gloo of torch"
#: Not what waits for a message that comes later; and Gloo takes lists of equal tensors only.
KINDS = [kind for kind in MIRROR if "object" not in kind and kind not in ("messages_with_tags", "all_to_all")]
#: Gloo moves these between two ranks only.
_OF_MESSAGES = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})
LENGTH = 100
REDUCTIONS = [(op, dtype) for op, dtype in PAIRS if not (dtype in COMPLEX and "PRODUCT" in str(op))]
COPIES = [(PAIRS[0][0], dtype) for dtype in (*COPIED, torch.uint32) if "float8" not in str(dtype)]
SHAPES = [(), (1,), (7,), (2, 3), (4, 0), (3, 1, 2), (1_023,), (20_011, 2)]


def gloo_has(step: Step) -> bool:
    """Whether torch's Gloo makes such a call."""
    dtype = step.setting.dtype
    if dtype in _OF_MESSAGES:
        return step.kind in ("messages", "batch_isend_irecv")
    if step.kind == "all_gather_single":
        return step.setting.shape != ()
    return not (step.kind == "gather" and dtype.is_complex)


def run_programs(programs: Sequence[Sequence[Step]]) -> None:
    """Make all calls on all ways, and compare."""
    warnings.simplefilter("ignore")  # Torch has other plans for some of its names.
    ways = _ways(bagua.comm.get_rank())
    for program in programs:
        _run(ways, program)


def _ways(rank: int) -> dict[str, list[Place | None]]:
    """For each way to make calls, the groups, None where this rank is no member. The first way is the truth."""
    theirs, ours = torch.distributed, bagua.distributed
    made = {
        GLOO: [(theirs, theirs.new_group(list(ranks), backend="gloo")) for ranks in GROUPS],
        "bagua.distributed": [(ours, bagua.comm.new_group(ranks)) for ranks in GROUPS],
        "bagua.distributed on gloo": [(ours, bagua.comm.new_group(ranks, backend="gloo")) for ranks in GROUPS],
        "backend bagua": [(theirs, theirs.new_group(list(ranks), backend="bagua")) for ranks in GROUPS],
    }
    return {
        way: [
            Place(dist, group, None, ranks, ranks.index(rank), outside=False) if rank in ranks else None
            for (dist, group), ranks in zip(groups, GROUPS, strict=True)
        ]
        for way, groups in made.items()
    }


def _run(ways: dict[str, list[Place | None]], program: Sequence[Step]) -> None:
    """Make all calls, wait for the asynchronous ones in another order, then compare."""
    begun = [_begin(ways, step) for step in program]
    for found in random.Random(sum(step.setting.seed for step in program)).sample(begun, len(begun)):
        for exercise in found.values():
            for work in exercise.works:
                if work is not None:
                    work.wait()
    for number, (step, found) in enumerate(zip(program, begun, strict=True)):
        with _told(number, step):
            _compare(step, found, GROUPS[step.place])


def _begin(ways: dict[str, list[Place | None]], step: Step) -> dict[str, Exercise]:
    """The call on each way, if this rank has a part in it."""
    found = {}
    for way, places in ways.items():
        place = places[step.place]
        if place is None or (way == GLOO and not gloo_has(step)):
            continue
        # Gloo reads tensors with gaps as if they had none, and refuses others: it gets the same numbers without gaps.
        present = as_it_is if way == GLOO else step.setting.present
        setting = replace(step.setting, root=step.setting.root % place.size, present=present)
        found[way] = MIRROR[step.kind](place, setting)
    return found


def _compare(step: Step, found: dict[str, Exercise], ranks: tuple[int, ...]) -> None:
    truth, root = found.pop(GLOO, None), ranks[step.setting.root % len(ranks)]
    # The order of additions is not the same among more than two.
    roundings = len(ranks) if step.kind in REDUCING and len(ranks) > 2 else 0
    for way, exercise in found.items():
        exercise.check()
        if truth is None:
            continue
        assert [work is None for work in exercise.works] == [work is None for work in truth.works], way
        if step.kind == "reduce" and bagua.comm.get_rank() != root:
            continue  # Where Gloo spoils the tensor; ours was checked.
        for theirs, ours in zip(truth.touched, exercise.touched, strict=True):
            assert_same(ours, theirs, way, rounding_steps=roundings)


@contextlib.contextmanager
def _told(number: int, step: Step) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"call {number}, {step}: {error}") from error


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
