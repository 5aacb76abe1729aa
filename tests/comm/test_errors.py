"""The error tree: what each class is, what its message says, and that it survives pickling."""

import copy
import pickle
import signal

import pytest

from bagua import errors
from bagua.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    ConfigurationError,
    PeerLostError,
)

PARENTS = {
    errors.BaguaError: (Exception,),
    errors.ConfigurationError: (errors.BaguaError, ValueError),
    errors.InvalidTypeError: (errors.ConfigurationError, TypeError),
    errors.InvalidTensorError: (errors.ConfigurationError, TypeError),
    errors.InvalidRankError: (errors.ConfigurationError,),
    errors.InvalidReduceOpError: (errors.ConfigurationError,),
    errors.UnsupportedAlgorithmException: (errors.ConfigurationError,),
    errors.NotInitializedError: (errors.BaguaError, RuntimeError),
    errors.RepeatedInitializationError: (errors.BaguaError, RuntimeError),
    errors.CommunicationError: (errors.BaguaError, RuntimeError),
    errors.CollectiveTimeoutError: (errors.CommunicationError, TimeoutError),
    errors.PeerLostError: (errors.CommunicationError, ConnectionError),
    errors.CollectiveMismatchError: (errors.CommunicationError,),
    errors.CommunicatorClosedError: (errors.CommunicationError,),
    errors.ConcurrentUseError: (errors.CommunicationError,),
    errors.TransportUnavailableError: (errors.CommunicationError,),
    errors.StoreLostError: (errors.CommunicationError, ConnectionError),
    errors.TooFewMembersError: (errors.CommunicationError, TimeoutError),
    errors.LeftOutError: (errors.CommunicationError, ConnectionError),
}
FACTS = {
    "rank": 1,
    "call": "#7 allreduce(3 x float32, sum)",
    "sequence": 7,
    "peers": (0, 2),
    "expected": "a sum",
    "seen": "a product",
    "elapsed_s": 1.23456,
    "timeout_s": 5.0,
    "history": ("#6 barrier()", "#7 allreduce(3 x float32, sum)"),
    "advice": "Do this.",
}


def example(kind):
    if issubclass(kind, CommunicationError):
        return kind("it went wrong", **FACTS)
    if issubclass(kind, ConfigurationError):
        return kind("it cannot be", argument="size", expected=">= 1", seen=0, advice="Do this.")
    return kind("it went wrong", advice="Do this.")


def test_the_tree_is_complete():
    assert {getattr(errors, name) for name in errors.__all__} == set(PARENTS)


@pytest.mark.parametrize("kind", PARENTS, ids=lambda kind: kind.__name__)
def test_each_error_is_what_a_user_would_catch(kind):
    for parent in PARENTS[kind]:
        assert issubclass(kind, parent)


@pytest.mark.parametrize("kind", PARENTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_each_error_survives_copying_with_its_facts(kind, again):
    error = example(kind)
    twin = again(error)
    assert type(twin) is kind
    assert vars(twin) == vars(error)
    assert str(twin) == str(error)
    assert twin.args == error.args
    with pytest.raises(kind):
        raise twin


def test_the_message_of_a_communication_error_tells_all_it_knows():
    message = str(example(CollectiveMismatchError))
    assert message.startswith("it went wrong (in #7 allreduce(3 x float32, sum), on rank 1")
    for part in ("peers 0, 2", "this rank has a sum", "others have a product", "1.235", "5.0", "Do this."):
        assert part in message
    assert message.endswith("last calls on this communicator:\n  #6 barrier()\n  #7 allreduce(3 x float32, sum)")


def test_a_message_names_lost_and_missing_ranks_once():
    lost = PeerLostError.of(3, "it closed its communicator", rank=0, sequence=7, call="#7 barrier()")
    assert str(lost).startswith("lost rank 3: it closed its communicator (in #7 barrier(), on rank 0). Look first")
    assert "fewer batches" in str(lost)
    assert "fewer batches" not in str(PeerLostError.of(3, "it was killed by SIGKILL"))
    late = CollectiveTimeoutError("2 of 3 ranks did not come", peers=[0, 2])
    assert str(late) == "2 of 3 ranks did not come (late ranks 0, 2)"


def test_what_is_not_known_is_not_mentioned():
    assert str(CollectiveTimeoutError("too late", rank=0)) == "too late (on rank 0)"
    assert str(ConfigurationError("no", argument="x", seen=0)) == "no (argument x, seen 0)"


def test_a_rank_of_zero_and_a_false_value_are_facts():
    error = ConfigurationError("no", argument="flag", expected=True, seen=False)
    assert "seen False" in str(error)
    assert "on rank 0" in str(CommunicationError("no", rank=0))


def test_facts_that_become_known_later_are_in_the_message():
    error = CollectiveTimeoutError("too late")
    error.call = "barrier"
    assert "in barrier" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("exit_code", "said"),
    [
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-(signal.SIGRTMIN + 3), f"was killed by signal {signal.SIGRTMIN + 3}"),  # Python has no name for it.
        (0, "ended too early, with exit status 0"),
        (None, "ended too early, with exit status None"),
    ],
)
def test_an_end_is_told_whatever_the_exit_code(exit_code, said):
    assert errors.how_it_ended(exit_code) == said
