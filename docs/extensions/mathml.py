"""Formulas as MathML, which browsers draw themselves: no script, no font, no network."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator

#: What docutils does not know, and what it knows instead.
SAME = {r"\texttt": r"\text", r"\dots": r"\ldots", r"\%": "%"}


def convert(formula: str, *, block: bool) -> str:
    """A formula of LaTeX as MathML. Lines of a block may be aligned by ``&``, and end by two backslashes."""
    for name, known in SAME.items():
        formula = formula.replace(name, known)
    if block and "&" in formula:
        formula = rf"\begin{{aligned}}{formula}\end{{aligned}}"
    try:
        return tex2mathml(formula, as_block=block)
    except MathError as error:
        raise ExtensionError(f"{error} in the formula {formula}") from error


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula within a line."""
    translator.body.append(convert(node.astext(), block=False))
    raise nodes.SkipNode


def block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on lines of its own."""
    translator.body.append(f'<div class="math">{convert(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
