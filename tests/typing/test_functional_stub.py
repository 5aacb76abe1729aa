"""What type checkers are told of the collectives as functions is what these take."""

import ast
import inspect
from pathlib import Path

from bagua.comm import functional


def parameters(name: str) -> list[tuple[str, str, bool, bool]]:
    """Name and type of each parameter, whether it has a default, and whether it needs its name."""
    return [
        (one.name, one.annotation, one.default is not one.empty, one.kind is one.KEYWORD_ONLY)
        for one in inspect.signature(getattr(functional, name)).parameters.values()
    ]


def parameters_told(node: ast.FunctionDef) -> list[tuple[str, str, bool, bool]]:
    """The same, as the stub has it."""
    positional, options = node.args.args, node.args.kwonlyargs
    without = len(positional) - len(node.args.defaults)
    return [
        *((one.arg, ast.unparse(one.annotation), number >= without, False) for number, one in enumerate(positional)),
        *((one.arg, ast.unparse(one.annotation), True, True) for one in options),
    ]


def test_the_stub_has_each_function_with_its_parameters():
    stub = ast.parse(Path(functional.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    told = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    made = {name for name, value in vars(functional).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert set(told) == made - {"communicator_of", "default_communicator"}
    assert len(told) == 19
    for name, node in told.items():
        assert parameters_told(node) == parameters(name), name
        assert ast.unparse(node.returns) == inspect.signature(getattr(functional, name)).return_annotation
