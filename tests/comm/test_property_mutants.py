"""The programs of the property tests fail for collectives that are wrong: each mutant is wrong in one way."""

from __future__ import annotations

import pytest

from bagua.testing import ThreadRanks
from tests.comm.test_properties import EVERYDAY
from tests.programs.mirror_mutants import MIRROR_MUTANTS
from tests.programs.mutants import MUTANTS
from tests.programs.programs import assert_members_agree, run_programs

pytestmark = pytest.mark.threads
#: What a mutant raises that is wrong in itself.
ITS_OWN_FAULT = (TypeError, AttributeError, NameError)


def kill(patch, mutant):
    """The error with which the first program fails that finds ``mutant``; None if it survives."""
    pool = ThreadRanks(5, timeout_s=1.0, deadline_s=4.0)
    mutant(patch)
    for program in EVERYDAY * 10:  # Whether a rank is seen that did not wait for others is a matter of chance.
        try:
            assert_members_agree(pool.run(run_programs, [program], True, hosts=program.hosts))
        except Exception as error:
            return error
    return None


@pytest.mark.parametrize("mutant", [*MUTANTS.items(), *MIRROR_MUTANTS.items()], ids=lambda named: named[0])
def test_a_wrong_collective_does_not_pass(mutant, monkeypatch):
    name, apply = mutant
    error = kill(monkeypatch, apply)
    assert error is not None, f"it survives: {name}"
    assert type(error) not in ITS_OWN_FAULT, error
