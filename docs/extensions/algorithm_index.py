"""The directive `algorithm-index`: a table of the algorithms in the registry, so that none is forgotten."""

from __future__ import annotations

import dataclasses

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from bagua.algorithms import Algorithm, registry


def table_row(name: str, declaration: type[Algorithm]) -> str:
    """One line of a Markdown table: name, options with their defaults, and the docstring's first line."""
    options = ", ".join(f"`{field.name}={field.default!r}`" for field in dataclasses.fields(declaration))
    summary = (declaration.__doc__ or "").strip().splitlines()[0]
    reference = f"{{py:class}}`API <bagua.algorithms.{declaration.__name__}>`"
    return f"| [`{name}`](algorithms/{name}.md) | {summary} | {options or 'none'} | {reference} |"


class AlgorithmIndex(SphinxDirective):
    """Lists every registered algorithm. For Markdown pages."""

    def run(self) -> list[nodes.Node]:
        rows = [table_row(name, registry.get(name)) for name in registry]
        head = ["| name | what it does | options | |", "|---|---|---|---|"]
        return self.parse_text_to_nodes("\n".join([*head, *rows]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("algorithm-index", AlgorithmIndex)
    return {"parallel_read_safe": True}
