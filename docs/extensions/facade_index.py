"""The directive `facade-index MODULE`: the names that a module passes on, and where each is explained."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

# Modules that the API pages explain, in the order in which a name is looked for.
HOMES = (
    "bagua.advise",
    "bagua.comm",
    "bagua.errors",
    "bagua.membership",
    "bagua.observe",
    "bagua.algorithms",
    "bagua.optim",
    "bagua.parallel",
    "bagua.parallel.decentralized",
    "bagua.utilities.training",
)


def home_of(value: object) -> str:
    """The documented path of a public object."""
    for home in HOMES:
        module = importlib.import_module(home)
        for name in sorted(module.__all__):
            if getattr(module, name) is value:
                return f"{home}.{name}"
    raise ExtensionError(f"{value!r} has no home in {', '.join(HOMES)}; explain it there")


def table_row(module: ModuleType, name: str) -> str:
    """One line of a Markdown table: the name, linked to its home, and what it is."""
    value: Any = getattr(module, name)
    summary = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    if isinstance(value, ModuleType):
        return f"| `{name}` | {summary} |"
    return f"| {{py:obj}}`{name} <{home_of(value)}>` | {summary} |"


class FacadeIndex(SphinxDirective):
    """Lists the public names of one module. For Markdown pages."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        rows = [table_row(module, name) for name in sorted(module.__all__)]
        return self.parse_text_to_nodes("\n".join(["| name | what it is |", "|---|---|", *rows]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("facade-index", FacadeIndex)
    return {"parallel_read_safe": True}
