"""The options that type checkers know are those that there are."""

import inspect

from bagua.engine.options import ReducerOptions, SwitchOptions
from bagua.engine.reducer import Reducer


def test_options_of_reducers_are_their_keywords():
    parameters = inspect.signature(Reducer).parameters
    known = {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    # Whoever passes options on names delay_reduce by itself.
    assert set(ReducerOptions.__annotations__) == (known | {"buckets"}) - {"delay_reduce"}
    assert set(SwitchOptions.__annotations__) <= set(parameters)
