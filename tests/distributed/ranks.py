"""What ranks do in the tests of torch's names: run a script in torch and here."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import torch
import torch.distributed

import bagua.comm
import bagua.distributed
from tests.versions import lacks

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
