"""The sources as syntax trees, and the imports that stand in them. Nothing is imported here."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "bagua"
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SourceFile:
    """One parsed module."""

    module: str
    path: Path
    tree: ast.Module
    line_count: int


@dataclass(frozen=True)
class Import:
    """One imported module, and the line that imports it. `names` are what a `from` import takes out of it."""

    target: str
    names: tuple[str, ...]
    line: int
    level: int


@functools.cache
def read_sources(root: Path) -> list[SourceFile]:
    """Parses every module below `root`, the folder of the top package."""
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        text = path.read_text(encoding="utf-8")
        files.append(SourceFile(".".join(parts), path, ast.parse(text, str(path)), text.count("\n")))
    return files


def imports_of(source: SourceFile) -> Iterator[Import]:
    """Every import of a module, also those in functions and under TYPE_CHECKING."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno, 0)
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.module or "", tuple(alias.name for alias in node.names), node.lineno, node.level)


def imported_modules(source: SourceFile, known: set[str]) -> Iterator[tuple[str, int]]:
    """The modules of this project that a module imports, with lines: `from a import b` is `a.b` if that is a module."""
    for item in imports_of(source):
        if item.target.split(".")[0] != PACKAGE:
            continue
        if not item.names:
            yield item.target, item.line
        for name in item.names:
            inner = f"{item.target}.{name}"
            yield (inner if inner in known else item.target), item.line


def dotted_name(node: ast.expr) -> str:
    """`a.b.c` for an attribute chain that starts at a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        start = dotted_name(node.value)
        return f"{start}.{node.attr}" if start else ""
    return ""


def is_within(module: str, package: str) -> bool:
    """Whether a module is the package or lies in it."""
    return module == package or module.startswith(package + ".")
