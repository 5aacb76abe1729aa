"""Programs of calls: how they are drawn, run and checked.

A program says how many ranks there are and on which hosts, which groups they make, and which calls
each rank makes on them, in one order. ``deal`` draws one by asking for one option after the other, so
hypothesis can answer (and shrink), or decks of cards that leave nothing out (``decks``).
"""

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

import bagua.comm
from bagua.comm.objects import as_bytes
from tests.contract.exercises import COPIED, LEGAL, REDUCED, CallSetting, Exercise, as_it_is, assert_same
from tests.contract.results import as_leaf, conjugated, negated, strided, transposed, with_history, with_offset
from tests.programs import mirror, native
from tests.programs.native import Description, Place, places_of_bagua, places_of_torch

T = TypeVar("T")
Choose = Callable[[str, Sequence[T]], T]
#: Methods of a communicator, names of ``bagua.distributed``, or those of ``torch.distributed`` on our backend.
Face = Literal["native", "mirror", "torch"]

PAIRS = [(op, dtype) for op, dtypes in LEGAL for dtype in dtypes]
COPIED_BY_TORCH = (*(dtype for dtype in COPIED if "float8" not in str(dtype)), torch.uint32)
KINDS: dict[str, list[str]] = {
    "native": [*native.NATIVE, "barrier"],
    "mirror": [*mirror.MIRROR, "barrier"],
    "torch": [*(kind for kind in mirror.MIRROR if kind != "messages_with_tags"), "barrier"],
}
REDUCING = {"native": native.REDUCING, "mirror": mirror.REDUCING, "torch": mirror.REDUCING}
#: What is drawn more often: reducing calls have more to get wrong, messages involve only some ranks, and of calls into
#: their own input few are spoilt where nobody looks after that.
MORE = {
    face: [*REDUCING[face] * 2, *(kind for kind in kinds if "messages" in kind or kind == "overlapping")]
    for face, kinds in KINDS.items()
}
#: The last ones are above the size at which transports go over to slices, and no multiples of anything.
SHAPES = [(), (1,), (7,), (2, 3), (3, 1, 2), (4, 0), (5, 5), (1_023,), (40_009,), (20_011, 2)]
HOSTS = {1: [(1,)], 2: [(2,), (1, 1)], 3: [(3,), (2, 1)], 4: [(4,), (2, 2), (1, 3)], 5: [(5,), (2, 2, 1), (1, 4)]}
_LATE_S = 0.002


@dataclass(frozen=True)
class Step:
    """One call."""

    face: Face  # through which names
    kind: str  # one of ``KINDS``
    place: int  # number of the group
    setting: CallSetting  # on what, and how; ``root`` counts modulo the size of the group
    late: int | None = None  # rank in the group, modulo its size, that comes late; None if nobody does


@dataclass(frozen=True)
class Program:
    """What all ranks do."""

    hosts: tuple[int, ...]  # number of ranks on each
    places: tuple[Description, ...]  # the groups
    steps: tuple[Step, ...]
    order: tuple[int, ...]  # in which the asynchronous ones are waited for

    @property
    def size(self) -> int:
        return sum(self.hosts)

    def members(self, place: int) -> int:
        """Number of ranks in a group; on the smallest host where hosts differ."""
        kind, ranks = self.places[place]
        if kind == "within":
            return min(self.hosts)
        return {"some": len(ranks), "between": len(self.hosts)}.get(kind, self.size)


def decks(seed: int) -> Choose[Any]:
    """Answers questions so that, for each of them, all options come before one comes again."""
    order = random.Random(seed)
    left: dict[str, list[Any]] = {}

    def choose(name: str, options: Sequence[T]) -> T:
        deck = left.setdefault(name, [])
        if not deck:
            deck += options
            order.shuffle(deck)
        return deck.pop()

    return choose


def deal(
    choose: Choose, faces: Sequence[Face], sizes: Sequence[int] = (1, 2, 2, 3, 3, 4, 5), hosts: Any = HOSTS
) -> Program:
    """Draw a program: ``choose`` gives one of several options for a question; ``hosts`` are layouts by size."""
    layout = choose("hosts", hosts[choose("size", sizes)])
    size = sum(layout)
    places: list[Description] = [("world", ())]
    torch_only = "torch" in faces
    if size > 1:
        subsets = [ranks for count in range(1, size) for ranks in itertools.combinations(range(size), count)]
        subsets += subsets[size:]
        places += [("some", choose(f"members of {size}", subsets)) for _ in range(choose("groups", (1, 1, 2)))]
        if not torch_only:
            kinds = choose("others", ((), ("duplicate",), ("within", "between")))
            places += [(kind, () if kind == "duplicate" else layout) for kind in kinds]
    program = Program(layout, tuple(places), (), ())
    steps = tuple(_step(choose, program, choose("face", faces)) for _ in range(choose("length", (4, 8, 12, 16))))
    shuffle = random.Random(choose("order", range(100)))
    order = list(range(len(steps)))
    shuffle.shuffle(order)
    return replace(program, steps=steps, order=tuple(order))


def _step(choose: Choose, program: Program, face: Face) -> Step:
    reducing = REDUCING[face]
    kind = choose(f"kind {face} {program.size > 1}", [*KINDS[face], *MORE[face]])
    place = -1 - choose(f"place of {face} {kind}", range(4)) % len(program.places)  # Those of some ranks come last.
    several = program.members(place) > 1
    op, dtype = LEGAL[0][0], choose(f"dtype {face}", COPIED if face != "torch" else REDUCED)
    if face == "torch" and "object" not in kind:  # It cannot pickle all that it carries.
        dtype = choose("dtype without pickle", COPIED_BY_TORCH)
    if kind in reducing:
        # Torch has no such reduction of complex numbers, whatever the backend.
        pairs = [pair for pair in PAIRS if face != "torch" or not (pair[1].is_complex and "PRODUCT" in str(pair[0]))]
        op, dtype = choose(f"pair {face} {several}", pairs)
    setting = CallSetting(
        choose("shape", SHAPES), dtype, op, choose("root", range(5)), choose("seed", range(100)),
        _layout(choose, face, kind, dtype), {"async_op": True} if choose("asynchronous", (False, True)) else {},
    )  # fmt: skip
    return Step(face, kind, place, setting, choose("late", (None, None, 0, 1, 2, None)))


def _layout(choose: Choose, face: Face, kind: str, dtype: torch.dtype) -> Any:
    plain = [as_it_is, as_it_is, transposed, strided, with_offset]
    if face == "torch" or "coalesced" in kind:
        return choose("layout", plain)
    if dtype.is_complex:
        return choose("complex layout", [*plain, conjugated, conjugated, as_leaf, with_history])
    if dtype in (torch.float32, torch.float64):
        return choose("real layout", [*plain, negated, negated, as_leaf, with_history])
    return choose("layout", plain)


def run_programs(programs: Sequence[Program], rounds_once: bool) -> list[dict[str, str]]:
    """Run programs on ranks of bagua, one after the other; see ``_Run.finish`` for what it returns."""
    made = {program.places for program in programs}
    places = {descriptions: places_of_bagua(descriptions) for descriptions in sorted(made)}
    store = bagua.comm.get_default_group().store
    runs = [_Run(one, places[one.places], store, f"program {number}") for number, one in enumerate(programs)]
    return [run.finish(rounds_once) for run in runs]


def run_programs_in_torch(programs: Sequence[Program], dist: Any, store: Any, rounds_once: bool) -> list[Any]:
    """The same through ``torch.distributed``, whose ranks have met at ``store``."""
    runs = (_Run(one, places_of_torch(dist, one.places), store, f"program {n}") for n, one in enumerate(programs))
    return [run.finish(rounds_once) for run in runs]


class _Run:
    """One program on one rank."""

    def __init__(self, program: Program, places: list[Place], store: Any, name: str) -> None:
        self._program, self._places, self._store, self._name = program, places, store, name

    def finish(self, rounds_once: bool) -> dict[str, str]:
        """Make all calls, wait for them, check what they give. Digests of what must be equal on all members."""
        steps = self._program.steps
        started = [self._begin(number, step, rounds_once) for number, step in enumerate(steps)]
        for number in self._program.order:
            for work in started[number].works:
                if work is not None:
                    work.wait()
        digests = {}
        for number, exercise in enumerate(started):
            place = self._places[steps[number].place]
            try:
                exercise.check()
            except AssertionError as error:
                raise AssertionError(f"step {number} among ranks {place.ranks}, {steps[number]}: {error}") from error
            if not place.outside:
                digests[f"{number} {steps[number].kind} {place.ranks}"] = _digest(exercise.results)
        return digests

    def _begin(self, number: int, step: Step, rounds_once: bool) -> Exercise:
        place = self._places[step.place]
        setting = replace(step.setting, root=step.setting.root % place.size, rounds_once=rounds_once)
        if place.outside:
            return self._outside(step, setting, place)
        if step.kind == "barrier":  # Somebody always comes late: else a rank that does not wait is seen by chance.
            key = f"{self._name}/{number}/{place.ranks}"
            return self._barrier(step, place, key, place.rank == (step.late or 0) % place.size)
        if step.late is not None and place.rank == step.late % place.size:
            time.sleep(_LATE_S)
        exercise = self._call(step, setting, place)
        for work in exercise.works:
            assert (work is not None) is bool(setting.options), f"{step.kind} returned {work}"
        return exercise

    def _call(self, step: Step, setting: CallSetting, place: Place) -> Exercise:
        if step.face == "native":
            return native.NATIVE[step.kind](place.communicator, setting)
        return mirror.MIRROR[step.kind](place, setting)

    def _outside(self, step: Step, setting: CallSetting, place: Place) -> Exercise:
        """The call of a rank that is no member: it returns at once, and leaves all tensors as they are."""
        # Torch refuses some of these calls, where a rank is named.
        if step.face != "mirror" or step.kind == "barrier" or "messages" in step.kind:
            return Exercise([], lambda: None, [], [])
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def present(numbers: torch.Tensor) -> torch.Tensor:
            tensor = setting.present(numbers)
            kept.append((tensor, tensor.detach().clone()))
            return tensor

        exercise = self._call(step, replace(setting, present=present), place)

        def check() -> None:
            assert not any(exercise.works), f"a rank that is no member got {exercise.works}"
            for tensor, before in kept:
                assert_same(tensor, before, f"a tensor of a rank that is no member, after {step.kind}")
            if not kept:  # Objects stay as they are, too.
                exercise.check()

        return Exercise([], check, [], [])

    def _barrier(self, step: Step, place: Place, key: str, late: bool) -> Exercise:
        """Whoever passes finds that all have come; who is late comes when all others have."""
        patience = 1_000 if late else 0  # Others that failed never come.
        while patience and self._store.add(key, 0) < place.size - 1:
            patience -= 1
            time.sleep(_LATE_S / 10)
        if late:
            time.sleep(10 * _LATE_S)  # Longer than another one needs to ask the store.
        self._store.add(key, 1)
        later = bool(step.setting.options)
        if step.face == "native":
            work = place.communicator.barrier(**step.setting.options)
        else:
            work = place.dist.barrier(place.group, async_op=later)
        come = [] if later else [self._store.add(key, 0)]

        def check() -> None:
            found = (come or [self._store.add(key, 0)])[0]
            assert found == place.size, f"a barrier was passed when {found} of {place.size} had come"

        return Exercise([work], check, [], [])


def _digest(results: Sequence[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for result in results:
        plain = result.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        found.update(as_bytes(plain.view(-1).view(torch.uint8)))
    return found.hexdigest()


def assert_members_agree(per_rank: Sequence[Sequence[dict[str, str]]]) -> None:
    """Fail unless the results that must be equal on all members are, bit by bit."""
    for programs in zip(*per_rank, strict=True):
        first: dict[str, str] = {}
        for rank, digests in enumerate(programs):
            for key, digest in digests.items():
                assert first.setdefault(key, digest) == digest, f"other bits on rank {rank}: step {key}"


def drawn_pairs(programs: Sequence[Program]) -> dict[tuple[Any, torch.dtype], int]:
    """How often each pair of reduction and dtype is drawn, in groups of two and more ranks."""
    counts = dict.fromkeys(PAIRS, 0)
    for program in programs:
        for step in program.steps:
            if step.kind in REDUCING[step.face] and program.members(step.place) > 1:
                counts[step.setting.op, step.setting.dtype] += 1
    return counts
