"""Public names change only on purpose, and each is explained.

`python -m tests.architecture.test_public_names` writes the list again after a wanted change.
"""

import importlib
import inspect
import re
import types
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture.rules import OPEN_PACKAGES, PACKAGE, REPOSITORY, is_within, read_sources

FROZEN_LIST = Path(__file__).with_name("public_names.txt")
# Has modules without files.
ALGORITHMS = "bagua.torch_api.algorithms"

# Modules that are doors; what lies behind them may move.
DOORS = (
    "bagua", "bagua.advise", "bagua.algorithms", "bagua.buckets", "bagua.comm", "bagua.compression",
    "bagua.distributed", "bagua.errors", "bagua.membership", "bagua.observe", "bagua.optim", "bagua.parallel",
    "bagua.parallel.decentralized", "bagua.primitives", "bagua.testing", "bagua.topology",
)  # fmt: skip


def public_modules(root: Path = REPOSITORY / PACKAGE) -> list[str]:
    found = [source.module for source in read_sources(root)]
    if ALGORITHMS in found:
        found += [module.__name__ for module in vars(importlib.import_module(ALGORITHMS))["MODULES"].values()]
    within = [name for name in found if any(is_within(name, one) for one in OPEN_PACKAGES) and "._" not in name]
    return [name for name in found if name in DOORS or name in within]


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
    FROZEN_LIST.write_text("\n".join(names_of(public_modules())) + "\n", encoding="utf-8")


# How a page shows all public names of a module.
SHOWN = re.compile(r"^\.\. automodule:: (\S+)\n   :members:|^```\{facade-index\} (\S+)", re.MULTILINE)


def unexplained(owner: object, names: list[str]) -> list[str]:
    """The functions and classes among `names`, and their public methods, that have no docstring."""
    missing = []
    for name in names:
        value = getattr(owner, name)
        # For Python 3.10, an alias such as ``Callable[[int], str]`` is a class.
        if isinstance(value, types.GenericAlias) or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if not (value.__doc__ or "").strip():
            missing.append(name)
        if inspect.isclass(value) and value.__module__.startswith("bagua"):
            routines = [key for key, member in vars(value).items() if inspect.isroutine(member)]
            methods = [key for key in routines if not key.startswith(("_", "test_"))]  # A test's name says it all.
            missing += [f"{name}.{method}" for method in methods if not inspect.getdoc(getattr(value, method))]
    return missing


def test_public_names_are_the_frozen_ones() -> None:
    modules = public_modules()
    missing = {name for name in modules if missing_extra(name)}
    now = names_of(name for name in modules if name not in missing)
    lines = FROZEN_LIST.read_text(encoding="utf-8").splitlines()
    frozen = [line for line in lines if line.split(":")[0] not in missing]
    changed = {"added": sorted({*now} - {*frozen}), "gone": sorted({*frozen} - {*now})}
    advice = "if this is wanted: python -m tests.architecture.test_public_names, and a line in CHANGELOG.md"
    assert changed == {"added": [], "gone": []}, advice


@pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op:FutureWarning")  # It warns whatever is asked of it.
@pytest.mark.parametrize("name", public_modules())
def test_every_public_name_has_a_docstring(name: str) -> None:
    if reason := missing_extra(name):
        pytest.skip(reason)
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip()
    assert len(module.__all__) == len(set(module.__all__))
    assert unexplained(module, list(module.__all__)) == []


def test_every_public_module_is_in_the_api_pages() -> None:
    shown = SHOWN.findall(
        "\n".join(page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs/api").glob("*.md"))
    )
    assert {*public_modules()} - {"bagua"} == {automodule or facade for automodule, facade in shown}
