"""Lists every public name. `python -m tests.architecture.public_names` writes the list again after a wanted change."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

from tests.architecture.rules import OPEN_PACKAGES
from tests.architecture.source_tree import PACKAGE, REPOSITORY, is_within, read_sources

FROZEN_LIST = Path(__file__).with_name("public_names.txt")
API_PAGES = REPOSITORY / "docs" / "api"

# Has modules without files.
ALGORITHMS = "bagua.torch_api.algorithms"

# Modules that are doors; what lies behind them may move.
DOORS = (
    "bagua",
    "bagua.advise",
    "bagua.algorithms",
    "bagua.buckets",
    "bagua.comm",
    "bagua.compression",
    "bagua.distributed",
    "bagua.errors",
    "bagua.membership",
    "bagua.observe",
    "bagua.optim",
    "bagua.parallel",
    "bagua.parallel.decentralized",
    "bagua.primitives",
    "bagua.testing",
    "bagua.topology",
)


def public_modules(root: Path = REPOSITORY / PACKAGE) -> list[str]:
    """The public modules that exist."""
    found = [source.module for source in read_sources(root)]
    if ALGORITHMS in found:
        found += [module.__name__ for module in vars(importlib.import_module(ALGORITHMS))["MODULES"].values()]
    return [
        name
        for name in found
        if name in DOORS or (any(is_within(name, package) for package in OPEN_PACKAGES) and "._" not in name)
    ]


def public_names() -> list[str]:
    """Every public name, with its module, sorted."""
    return names_of(public_modules())


def names_of(modules: Iterable[str]) -> list[str]:
    """Every public name of ``modules``, with its module, sorted."""
    return sorted(f"{name}: {public}" for name in modules for public in importlib.import_module(name).__all__)


def missing_extra(name: str) -> str | None:
    """Why module `name` cannot be imported here, if that is an extra which is not installed."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and not is_within(cause.name or PACKAGE, PACKAGE):
            return str(error)
        raise
    return None


if __name__ == "__main__":
    FROZEN_LIST.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
