"""What ranks do in the tests of torch's names: run a script, and make one call in torch and here."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import torch
import torch.distributed

import bagua.comm
import bagua.distributed
from bagua.comm import ReduceOp
from tests.contract.exercises import CallSetting
from tests.contract.reference import assert_same
from tests.programs.mirror import MIRROR, REDUCING
from tests.programs.places import Place
from tests.programs.programs import PAIRS
from tests.versions import TORCH, lacks

SCRIPTS = Path(__file__).with_name("scripts")
_IMPORT = "import torch.distributed as dist\n"


def run_script(name, module):
    """What ``run`` of a script returns when it communicates through ``module``; nothing else of it changes."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(_IMPORT) == 1
    names = {}
    exec(compile(text.replace(_IMPORT, f"import {module} as dist\n"), f"{name}.py", "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Torch renames some of what scripts use.
        return names["run"](bagua.comm.get_rank(), bagua.comm.get_world_size())


def run_all_in_both(names):
    """The results of each script, by its name."""
    return {name: run_script_in_both(name) for name in names}


def run_script_in_both(name):
    """The results through bagua; they equal those through torch where torch has these ranks, too."""
    ours = run_script(name, "bagua.distributed")
    if torch.distributed.is_initialized():
        theirs = ours
        with _what_gloo_has():
            theirs = run_script(name, "torch.distributed")
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype is other.dtype
            # With more ranks, the sums of random numbers depend on the order of addition.
            exact = bagua.comm.get_world_size() == 2 or not one.is_floating_point()
            assert torch.equal(one, other) if exact else torch.allclose(one, other)
    return ours


@contextlib.contextmanager
def _what_gloo_has():
    """Leave a comparison out where Gloo in an old torch refuses, on all ranks, what newer versions have."""
    try:
        yield
    except RuntimeError as error:
        if not lacks(error):
            raise


# One call in both.

WHOLE = (torch.uint8, torch.int8, torch.int32, torch.int64)
#: Not what waits for a message that comes later; and Gloo takes lists of equal tensors only, as a script does.
KINDS = [kind for kind in MIRROR if "object" not in kind and kind not in ("messages_with_tags", "all_to_all")]


def gloo_has(kind, op, dtype):
    """Whether Gloo has such a call: reductions not of bool, bits of whole numbers, in 2.12 only sums that scatter."""
    if kind not in REDUCING or dtype is torch.int16:
        return dtype is not torch.int16 and not (kind == "gather" and dtype.is_complex)
    if TORCH < (2, 13) and kind.startswith("reduce_scatter") and op != ReduceOp.SUM:
        return False
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        return dtype in WHOLE
    return dtype is not torch.bool and not (dtype.is_complex and op != ReduceOp.SUM)


def compare_with_torch():
    """Each kind of call gives the same bits in torch and here; how many there are, by name."""
    warnings.simplefilter("ignore", FutureWarning)  # Torch has other plans for some of its names.
    return {kind: sum(compare_kind(kind, op, dtype) for op, dtype in PAIRS) for kind in KINDS}


def compare_kind(kind, op, dtype):
    """Whether there was something to compare."""
    if not gloo_has(kind, op, dtype) or (kind not in REDUCING and op != ReduceOp.SUM):
        return False
    ours = one_call(bagua.distributed, kind, op, dtype)
    theirs = ours
    with _what_gloo_has():
        theirs = one_call(torch.distributed, kind, op, dtype)
    # With more ranks, the sums of random numbers depend on the order of addition.
    roundings = bagua.comm.get_world_size() if kind in REDUCING and bagua.comm.get_world_size() > 2 else 0
    for one, other in zip(theirs, ours, strict=True):
        assert_same(other, one, f"{kind} of {dtype}, {op}", rounding_steps=roundings)
    return True


def one_call(dist, kind, op, dtype):
    """The results of a call through ``dist``. What Gloo leaves where there is none is its business."""
    place = Place(dist, None, None, tuple(range(dist.get_world_size())), dist.get_rank(), outside=False)
    exercise = MIRROR[kind](place, CallSetting((2, 3), dtype, op, root=1, options={"async_op": True}))
    for work in exercise.works:
        if work is not None:
            work.wait()
    return [] if kind == "reduce" and place.rank != 1 else exercise.touched
