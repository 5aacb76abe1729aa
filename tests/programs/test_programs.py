"""Random programs of calls, on every transport and through torch's names, against what plain tensors and Gloo give."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import bagua.comm
import bagua.distributed
import bagua.torch_api  # which makes the backend known
from bagua.comm.startup import formation
from bagua.comm.store.serving import connect_store
from bagua.testing import ProcessRanks, ThreadRanks
from bagua.testing.ranks import nodes_of, this_rank
from tests.contract.exercises import COMPLEX, COPIED, CallSetting, Exercise, as_it_is, assert_same
from tests.contract.results import strided, transposed, with_offset
from tests.programs.mirror import MIRROR, MIRROR_MUTANTS
from tests.programs.mutants import MUTANTS
from tests.programs.native import Place
from tests.programs.programs import (
    HOSTS,
    KINDS,
    PAIRS,
    REDUCING,
    Decks,
    Step,
    assert_members_agree,
    deal,
    drawn_pairs,
    run_programs,
    run_programs_in_torch,
)
from tests.versions import TORCH, nccl_ranks, needs

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
#: Another seed for each run, where many programs are asked for.
SEED = int.from_bytes(os.urandom(4), "big") if THOROUGH else 0
OURS = ("native", "mirror")


def dealt(count, faces=OURS, **options):
    """Programs that leave nothing out."""
    choose = Decks(SEED)
    return [deal(choose, faces, **options) for _ in range(count * 8 if THOROUGH else count)]


EVERYDAY = dealt(120)


def by_layout(programs):
    """Programs that can run on the same ranks, one after the other."""
    layouts = {}
    for program in programs:
        layouts.setdefault(program.hosts, []).append(program)
    return layouts.items()


def test_programs_leave_nothing_out():
    """All pairs of reduction and dtype, and all kinds, among two and more ranks; in groups, too."""
    assert len(drawn_pairs(EVERYDAY)) == 68
    assert min(drawn_pairs(EVERYDAY).values()) > 0
    steps = [(program, step) for program in EVERYDAY for step in program.steps]
    several = [(program, step) for program, step in steps if program.members(step.place) > 1]
    for face in OURS:
        assert {step.kind for _, step in several if step.face == face} == set(KINDS[face])
    assert {program.size for program in EVERYDAY} == {1, 2, 3, 4, 5}
    for kind in ("world", "duplicate", "some", "within", "between"):
        found = [step for program, step in several if program.places[step.place][0] == kind]
        assert {bool(step.setting.options) for step in found} == {True, False}
        assert {step.kind in REDUCING[step.face] for step in found} == {True, False}
        assert any(step.late is not None for step in found)


@pytest.mark.threads
def test_dealt_programs_on_threads(thread_pool):
    for program in EVERYDAY:
        assert_members_agree(thread_pool.run(run_programs, [program], True, hosts=program.hosts))


@pytest.mark.threads
@given(st.data())
def test_drawn_programs_on_threads(thread_pool, data):
    program = deal(lambda name, options: data.draw(st.sampled_from(options), label=name), OURS)
    assert_members_agree(thread_pool.run(run_programs, [program], True, hosts=program.hosts))


@pytest.mark.shm
def test_dealt_programs_on_shared_memory(shm_pool):
    for hosts, programs in by_layout(dealt(24, sizes=(2, 3, 5), hosts={size: [(size,)] for size in HOSTS})):
        assert_members_agree(shm_pool.run(run_programs, programs, True, hosts=hosts))


@pytest.mark.gloo
def test_dealt_programs_on_gloo(process_pool):
    for hosts, programs in by_layout(dealt(18, sizes=(2, 3), hosts={2: [(1, 1)], 3: [(2, 1)]})):
        assert_members_agree(process_pool.run(run_programs, programs, False, hosts=hosts))


@pytest.mark.hybrid
def test_dealt_programs_on_hybrid():
    pool = ProcessRanks(5, backend="hybrid")
    for hosts, programs in by_layout(dealt(18, sizes=(3, 5), hosts={3: [(2, 1)], 5: [(2, 3)]})):
        assert_members_agree(pool.run(run_programs, programs, False, hosts=hosts))


@pytest.mark.nccl
def test_dealt_programs_on_nccl():
    size = min(nccl_ranks(), 4)
    pool = ProcessRanks(size, backend="nccl")
    for hosts, programs in by_layout(dealt(18, sizes=(size,), hosts={size: [(size,)]})):
        assert_members_agree(pool.run(run_programs, programs, False, hosts=hosts))


def join_torch(programs, port, hosts):
    """Ranks of the backend ``bagua`` of ``torch.distributed``."""
    warnings.simplefilter("ignore")  # Torch warns of calls of ranks that are no members, and of its own names.
    formation.nodes_from_identities = lambda identities: nodes_of(hosts)[: len(identities)]
    store = connect_store(port, 20.0)
    dist = torch.distributed
    dist.init_process_group("bagua", store=store, rank=this_rank.get().rank, world_size=sum(hosts))
    digests = run_programs_in_torch(programs, dist, store, len(hosts) == 1)
    dist.destroy_process_group()
    return digests


@pytest.mark.shm
@pytest.mark.parametrize("hosts", [(2,), (1, 1), (2, 1)], ids=str)
def test_dealt_programs_through_the_torch_backend(hosts, port):
    programs = dealt(12, ("torch",), sizes=(sum(hosts),), hosts={sum(hosts): [hosts]})
    assert_members_agree(ProcessRanks(3, backend=None).run(join_torch, programs, port, hosts, size=sum(hosts)))


# The programs fail for collectives that are wrong: each mutant is wrong in one way.


#: What a mutant raises that is wrong in itself.
ITS_OWN_FAULT = (TypeError, AttributeError, NameError)


#: By mutant, the number of the program that found it when the list was made: it is tried first, to save time.
_KILLS = Path(__file__).parents[1] / "testing" / "kills.txt"
FINDERS = dict(line.partition(", by program ")[::2] for line in _KILLS.read_text(encoding="utf-8").splitlines())


def kill(patch, name, mutant):
    """The error with which the first program fails that finds ``mutant``; None if it survives."""
    pool = ThreadRanks(5, timeout_s=1.0, deadline_s=4.0)
    mutant(patch)
    first = int(FINDERS.get(name) or 0)
    # Whether a rank is seen that did not wait for others is a matter of chance.
    for program in (EVERYDAY[first:] + EVERYDAY[:first]) * 10:
        try:
            assert_members_agree(pool.run(run_programs, [program], True, hosts=program.hosts))
        except Exception as error:
            return error
    return None


@pytest.mark.threads
@pytest.mark.parametrize("mutant", [*MUTANTS.items(), *MIRROR_MUTANTS.items()], ids=lambda named: named[0])
def test_a_wrong_collective_does_not_pass(mutant, monkeypatch):
    name, apply = mutant
    error = kill(monkeypatch, name, apply)
    assert error is not None, f"it survives: {name}"
    assert type(error) not in ITS_OWN_FAULT, error


SIZE = 3
#: All ranks, and groups of some: numbers of ranks in a group are not those of the ranks.
GROUPS = ((0, 1, 2), (1, 2), (0, 2))
GLOO = "gloo of torch"
#: Not what waits for a message that comes later; and Gloo takes lists of equal tensors only.
KINDS_OF_TORCH = [kind for kind in MIRROR if "object" not in kind and kind not in ("messages_with_tags", "all_to_all")]
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


def run_programs_of_torch(programs: Sequence[Sequence[Step]]) -> None:
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
    kind = draw(st.sampled_from(KINDS_OF_TORCH))
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


@pytest.mark.gloo
@needs("the calls of Gloo that torch 2.13 has", TORCH >= (2, 13))
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
    assert {step.kind for step in seen} == set(KINDS_OF_TORCH)
    pairs = {(step.setting.op, step.setting.dtype) for step in seen if step.kind in REDUCING}
    assert len(pairs) > 0.9 * len(REDUCTIONS)
    ProcessRanks(SIZE, backend="shm", timeout_s=30.0, deadline_s=3_000.0).run(run_programs_of_torch, programs)
