"""Declarations and the registry: values that can be printed, compared, pickled, and looked up by name."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import bagua.comm
from bagua import algorithms
from bagua.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithmImpl,
    ByHost,
    DistributedAlgorithm,
    Registry,
    as_algorithm,
    registry,
)
from bagua.algorithms.gradients.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.errors import ConfigurationError, InvalidTypeError, NotInitializedError


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gradient_allreduce", algorithms.GradientAllReduceAlgorithm),
        ("allreduce", algorithms.GradientAllReduceAlgorithm),
        (DistributedAlgorithm.GradientAllReduce, algorithms.GradientAllReduceAlgorithm),
        (DistributedAlgorithm.ScatterGatherAllReduce, algorithms.ScatterGatherAllReduceAlgorithm),
        (DistributedAlgorithm.QuantizeAllReduce, algorithms.ByteGradAlgorithm),
        ("bytegrad", algorithms.ByteGradAlgorithm),
        (DistributedAlgorithm.PowerSGD, algorithms.PowerSGDAlgorithm),
        (DistributedAlgorithm.TopK, algorithms.TopKAlgorithm),
        (DistributedAlgorithm.SignSGD, algorithms.SignSGDAlgorithm),
        (DistributedAlgorithm.QAdam, algorithms.QAdamAlgorithm),
    ],
)
def test_names_and_members_lead_to_their_algorithm(name, kind):
    assert Algorithm.init(name) == as_algorithm(name) == as_algorithm(kind()) == kind()
    assert Algorithm.init(name, hierarchical=False) == kind(hierarchical=False)


@pytest.mark.parametrize("value", [None, 3, GradientAllReduceAlgorithm])
def test_what_is_no_algorithm_is_a_type_error(value):
    with pytest.raises(TypeError, match="algorithm"):
        as_algorithm(value)


def test_a_name_belongs_to_one_declaration():
    own: Registry[type] = Registry()
    own.register("a", int)
    own.register("a", int)
    with pytest.raises(ConfigurationError, match="name"):
        own.register("a", str)
    assert list(own) == ["a"]
    assert len(own) == 1


@pytest.mark.parametrize("name", list(registry))
def test_an_option_for_hosts_says_that_there_are_two_forms(name):
    declaration = registry.get(name)()
    assert isinstance(declaration, ByHost) == hasattr(declaration, "hierarchical")
    if isinstance(declaration, ByHost):
        forms = [declaration.in_form(hierarchical=one) for one in (False, True)]
        assert [one.is_hierarchical for one in forms] == [one.hierarchical for one in forms] == [False, True]
    else:
        assert declaration.is_hierarchical is None
        with pytest.raises(ConfigurationError, match="no hierarchical form"):
            declaration.in_form(hierarchical=True)


@dataclasses.dataclass(frozen=True)
class Namesake(Algorithm):
    """Its option has a name that means something else elsewhere."""

    hierarchical: str = "yes"

    def exchanges(self, phase=0):
        return GradientAllReduceAlgorithm().exchanges()


def test_hosts_that_train_have_one_form_only():
    with pytest.raises(ConfigurationError, match="no hierarchical form"):
        Algorithm.init("diloco", inner="gradient_allreduce").in_form(hierarchical=False)


def test_the_name_of_an_option_means_nothing_by_itself():
    assert Namesake().is_hierarchical is None


def test_the_constructor_of_an_implementation_shows_its_arguments():
    signature = inspect.signature(AsyncModelAverageAlgorithmImpl)
    positional = [parameter for parameter in signature.parameters.values() if parameter.kind.name != "KEYWORD_ONLY"]
    assert [(one.name, one.default) for one in positional] == [
        ("process_group", inspect.Parameter.empty),
        ("peer_selection_mode", "all"),
        ("sync_interval_ms", 500),
        ("warmup_steps", 0),
    ]
    for declaration in map(registry.get, registry):
        options = inspect.signature(declaration).parameters
        assert list(inspect.signature(declaration.implementation).parameters) == ["process_group", *options]


def test_an_implementation_takes_each_form_of_group(thread_ranks):
    def bind():
        world = bagua.comm.get_default_group()
        return [AsyncModelAverageAlgorithmImpl(group).process_group is world for group in (world, None)]

    assert thread_ranks(2, bind) == [[True, True]] * 2
    with pytest.raises(NotInitializedError):
        AsyncModelAverageAlgorithmImpl(None)
    with pytest.raises(InvalidTypeError, match="argument process_group"):
        AsyncModelAverageAlgorithmImpl("all")
