"""The options that type checkers know are those that there are."""

import dataclasses
import inspect

from bagua.algorithms import registry
from bagua.engine.options import AlgorithmOptions, InitOptions, ReducerOptions, SwitchOptions
from bagua.engine.reducer import Reducer


def test_options_of_reducers_are_their_keywords():
    parameters = inspect.signature(Reducer).parameters
    known = {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    # Whoever passes options on names delay_reduce by itself.
    assert set(ReducerOptions.__annotations__) == (known | {"buckets"}) - {"delay_reduce"}
    assert set(SwitchOptions.__annotations__) <= set(parameters)


def test_options_of_algorithms_are_their_fields():
    fields = {field.name for name in registry for field in dataclasses.fields(registry.get(name))}
    assert set(AlgorithmOptions.__annotations__) == fields - {"hierarchical"}  # Which hierarchical_reduce says.
    assert set(InitOptions.__annotations__) > {*AlgorithmOptions.__annotations__, *SwitchOptions.__annotations__}
