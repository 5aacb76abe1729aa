"""Random programs of calls, on every transport and through torch's names, against what plain tensors and Gloo give."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

import bagua.torch_api  # noqa: F401 - makes the backend known
from bagua.comm.startup import formation
from bagua.comm.store.serving import connect_store
from bagua.comm.transports import hybrid
from bagua.testing import ProcessRanks, ThreadRanks
from bagua.testing.ranks import nodes_of, this_rank
from tests.contract.exercises import as_it_is
from tests.programs import programs as drawing
from tests.programs.mirror import MIRROR_MUTANTS
from tests.programs.mutants import MUTANTS
from tests.programs.programs import HOSTS, KINDS, REDUCING, assert_members_agree, deal, drawn_pairs, run_programs
from tests.versions import TORCH, nccl_ranks, needs

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
#: Another seed for each run, where many programs are asked for.
SEED = int.from_bytes(os.urandom(4), "big") if THOROUGH else 0
OURS = ("native", "mirror")


def dealt(count, faces=OURS, **options):
    """Programs that leave nothing out."""
    choose = drawing.decks(SEED)
    return [deal(choose, faces, **options) for _ in range(count * 8 if THOROUGH else count)]


EVERYDAY = dealt(120)


def run_on(pool, programs, rounds_once, run=run_programs):
    """Run programs that can run on the same ranks one after the other."""
    layouts = {}
    for program in programs:
        layouts.setdefault(program.hosts, []).append(program)
    for hosts, alike in layouts.items():
        assert_members_agree(pool.run(run, alike, rounds_once, hosts=hosts))


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
        run_on(thread_pool, [program], True)


@pytest.mark.threads
@given(st.data())
def test_drawn_programs_on_threads(thread_pool, data):
    program = deal(lambda name, options: data.draw(st.sampled_from(options), label=name), OURS)
    run_on(thread_pool, [program], True)


@pytest.mark.shm
def test_dealt_programs_on_shared_memory(shm_pool):
    run_on(shm_pool, dealt(24, sizes=(2, 3, 5), hosts={size: [(size,)] for size in HOSTS}), True)


@pytest.mark.gloo
def test_dealt_programs_on_gloo(process_pool):
    run_on(process_pool, dealt(18, sizes=(2, 3), hosts={2: [(1, 1)], 3: [(2, 1)]}), False)


def run_in_many_pieces(programs, rounds_once):
    hybrid._PIECE_BYTES = 4096
    return run_programs(programs, rounds_once)


@pytest.mark.hybrid
def test_dealt_programs_on_hybrid():
    programs = dealt(18, sizes=(4, 6), hosts={4: [(2, 2)], 6: [(1, 3, 2)]})
    run_on(ProcessRanks(6, backend="hybrid"), programs, False, run_in_many_pieces)


@pytest.mark.nccl
def test_dealt_programs_on_nccl():
    size = min(nccl_ranks(), 4)
    run_on(ProcessRanks(size, backend="nccl"), dealt(18, sizes=(size,), hosts={size: [(size,)]}), False)


def join_torch(programs, port, hosts, backend):
    warnings.simplefilter("ignore")  # Torch warns of calls of ranks that are no members, and of its own names.
    formation.nodes_from_identities = lambda identities: nodes_of(hosts)[: len(identities)]
    store = connect_store(port, 20.0)
    dist = torch.distributed
    dist.init_process_group(backend, store=store, rank=this_rank.get().rank, world_size=sum(hosts))
    digests = drawing.run_programs_in_torch(programs, dist, store, backend == "bagua" and len(hosts) == 1)
    dist.destroy_process_group()
    return digests


def run_in_torch(programs, port, hosts, backend):
    pool = ProcessRanks(3, backend=None)
    assert_members_agree(pool.run(join_torch, programs, port, hosts, backend, size=sum(hosts)))


@pytest.mark.shm
@pytest.mark.parametrize("hosts", [(2,), (1, 1), (2, 1)], ids=str)
def test_dealt_programs_through_the_torch_backend(hosts, port):
    run_in_torch(dealt(12, ("torch",), sizes=(sum(hosts),), hosts={sum(hosts): [hosts]}), port, hosts, "bagua")


#: Gloo moves these between two ranks only.
OF_MESSAGES = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def gloo_has(step):
    dtype = step.setting.dtype
    if dtype in OF_MESSAGES:
        return step.kind in ("messages", "batch_isend_irecv")
    if step.kind in ("all_gather_single", "reduce_scatter", "reduce_scatter_single"):
        return step.setting.shape != ()
    return step.kind != "all_to_all" and not (step.kind == "gather" and dtype.is_complex)


def as_gloo_does(program):
    """The calls that Gloo has; it reads tensors with gaps as if they had none, and refuses others."""
    steps = [replace(step, setting=replace(step.setting, present=as_it_is)) for step in program.steps if gloo_has(step)]
    return replace(program, steps=tuple(steps), order=tuple(one for one in program.order if one < len(steps)))


@pytest.mark.gloo
@needs("the calls of Gloo that torch 2.13 has", TORCH >= (2, 13))
def test_what_programs_expect_is_what_gloo_of_torch_gives(port):
    programs = [as_gloo_does(program) for program in dealt(40, ("torch",), sizes=(3,), hosts={3: [(3,)]})]
    steps = [step for program in programs for step in program.steps if program.members(step.place) > 1]
    assert {step.kind for step in steps} == {kind for kind in KINDS["torch"] if kind != "all_to_all"}
    pairs = {(step.setting.op, step.setting.dtype) for step in steps if step.kind in REDUCING["torch"]}
    assert len(pairs) == 59, "Gloo has no reduction of int16, and torch no product of complex numbers"
    run_in_torch(programs, port, (3,), "gloo")


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
            run_on(pool, [program], True)
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
