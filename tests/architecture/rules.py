"""The house rules that ruff does not have, on sources as syntax trees. Each returns one line for each violation."""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
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


# The one table of layers. A module imports its own layer and anything below; `bagua` itself imports nothing of ours.
LAYERS = {
    "bagua.errors": 0,
    "bagua.env": 0,
    "bagua.checks": 0,
    "bagua.late": 0,
    "bagua.link": 0,
    "bagua.torch_private": 0,
    "bagua.topology": 1,
    "bagua.compression": 1,
    "bagua.comm": 2,
    "bagua.buckets": 3,
    "bagua.primitives": 3,
    "bagua.membership": 3,
    "bagua.algorithms": 4,
    "bagua.optim": 4,
    "bagua.engine": 5,
    "bagua.parallel": 6,
    "bagua.observe": 6,
    "bagua.advise": 6,
    "bagua.distributed": 7,
    "bagua.torch_api": 7,
    "bagua.plugin": 7,
    "bagua.testing": 7,
    "bagua.utilities": 7,
    "bagua.integrations": 7,
    "bagua.cli": 7,
    "bagua.__main__": 7,
}

# What a module may import beside the standard library. `bagua.integrations` imports what it integrates.
RUN_TIME_PACKAGES = {"bagua", "torch", "typing_extensions"}
EXTRA_PACKAGES = {
    "bagua.compression": {"triton"},  # if PyTorch brought it along
    "bagua.cli": {"matplotlib", "rich"},
}

# Packages that users enter by each of their modules.
OPEN_PACKAGES = ("bagua.torch_api", "bagua.utilities", "bagua.integrations")

# Parts of torch.distributed that start things.
LAUNCHER_MODULES = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")
# Parts of it that integrations integrate.
INTEGRATED_MODULES = ("torch.distributed.checkpoint", "torch.distributed.tensor")
# What torch loads by its entry point registers a name with it, and importing comm for that would take long.
REGISTRATION = "bagua.plugin"
# The modules that use private names of torch, and such names of objects that torch made.
TORCH_PRIVATE = ("bagua.torch_private", "bagua.comm.torch_private")
METHODS_OF_TORCH = {
    *("_start_coalescing", "_end_coalescing", "_set_default_timeout", "_set_sequence_number_for_group"),
    *("_execution_engine", "_post_accumulate_grad_hooks", "_register_backend", "_set_default_backend"),
}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
LONGEST_FILE = 600
MOST_FILES = 15

Rule = Callable[[list[SourceFile]], list[str]]


def layer_of(module: str) -> int | None:
    """The layer of a module; None for one that the table does not know."""
    if module == PACKAGE:
        return -1
    return next((layer for package, layer in LAYERS.items() if is_within(module, package)), None)


def imports_point_downwards(sources: list[SourceFile]) -> list[str]:
    """No module imports from a layer above its own."""
    known = {source.module for source in sources}
    violations = []
    for source in sources:
        own = layer_of(source.module)
        if own is None:
            violations.append(f"{source.path}: {source.module} has no layer; add it to LAYERS")
            continue
        for target, line in imported_modules(source, known):
            layer = layer_of(target)
            if target != PACKAGE and (layer is None or layer > own):
                violations.append(f"{source.path}:{line}: {source.module} (layer {own}) imports {target} ({layer})")
    return violations


def packages_are_entered_by_their_doors(sources: list[SourceFile]) -> list[str]:
    """A module takes names of another package out of that package's door, its `__init__`."""
    known = {source.module for source in sources}
    bound = {source.module: _names_imported_by(source) for source in sources}
    violations = []
    for source in sources:
        for item in imports_of(source):
            if item.target.split(".")[0] != PACKAGE:
                continue
            through = [f"{item.target}.{name}" for name in item.names if name not in bound.get(item.target, ())]
            targets = [item.target, *(name for name in through if name in known)]
            violations += [
                f"{source.path}:{item.line}: {source.module} passes the door of {target}"
                for target in targets
                if not _is_door(target) and target.split(".")[1] != source.module.split(".")[1:2][0]
            ]
    return violations


def _names_imported_by(source: SourceFile) -> set[str]:
    return {name for item in imports_of(source) for name in item.names}


def _is_door(module: str) -> bool:
    return module.count(".") < 2 or any(is_within(module, name) for name in OPEN_PACKAGES)


def no_import_cycles(sources: list[SourceFile]) -> list[str]:
    """No module imports itself through others."""
    known = {source.module for source in sources}
    graph = {
        source.module: sorted({target for target, _ in imported_modules(source, known) if target in known})
        for source in sources
    }
    return [" -> ".join(cycle) for cycle in _cycles(graph)]


def _cycles(graph: dict[str, list[str]]) -> Iterator[list[str]]:
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield [*path[path.index(module) :], module]
        elif module not in finished:
            for target in graph[module]:
                yield from visit(target, [*path, module])
            finished.add(module)

    for module in graph:
        yield from visit(module, [])


def only_declared_packages(sources: list[SourceFile]) -> list[str]:
    """Only the standard library and the declared dependencies are imported."""
    violations = []
    for source in sources:
        if is_within(source.module, "bagua.integrations"):
            continue
        allowed = RUN_TIME_PACKAGES | sys.stdlib_module_names
        for package, extra in EXTRA_PACKAGES.items():
            if is_within(source.module, package):
                allowed = allowed | extra
        for item in imports_of(source):
            top = item.target.split(".")[0]
            if item.level == 0 and top not in allowed:
                violations.append(f"{source.path}:{item.line}: {top} is not a dependency of {source.module}")
    return violations


def torch_distributed_only_in_comm(sources: list[SourceFile]) -> list[str]:
    """Only `bagua.comm` communicates through torch; launchers and checkpoints are open to those who integrate them."""
    violations = []
    for source in sources:
        if is_within(source.module, "bagua.comm") or source.module == REGISTRATION:
            continue
        integrates = is_within(source.module, "bagua.integrations")
        launches = is_within(source.module, "bagua.cli") or integrates
        allowed = (*(LAUNCHER_MODULES if launches else ()), *(INTEGRATED_MODULES if integrates else ()))
        for name, line in _uses_of_torch_distributed(source):
            if not any(is_within(name, module) for module in allowed):
                violations.append(f"{source.path}:{line}: {source.module} uses {name}")
    return violations


def _uses_of_torch_distributed(source: SourceFile) -> Iterator[tuple[str, int]]:
    door = "torch.distributed"
    for item in imports_of(source):
        names = [f"{item.target}.{name}" for name in item.names] or [item.target]
        yield from ((name, item.line) for name in names if is_within(name, door) or "_distributed_c10d" in name)
    outermost = _outermost_attributes(source.tree)
    yield from ((name, node.lineno) for node in outermost if is_within(name := dotted_name(node), door))


def _outermost_attributes(tree: ast.Module) -> list[ast.Attribute]:
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    return [node for node in attributes if id(node) not in inner]


def private_names_of_torch_in_two_modules(sources: list[SourceFile]) -> list[str]:
    """Only the modules `torch_private` use names of torch that begin with an underscore, so that a test can name them.

    `torch._foreach_*` is documented.
    """
    violations = []
    for source in sources:
        if source.module in TORCH_PRIVATE:
            continue
        aliases = {"torch": "torch"}
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                aliases.update(_names_of_torch(node))
        names = [(name, node.lineno) for node in _outermost_attributes(source.tree) if (name := dotted_name(node))]
        used = [
            (f"{aliases.get(first, '')}.{rest}", line)
            for name, line in names
            for first, _, rest in [name.partition(".")]
        ]
        used += [(target, 0) for target in aliases.values()]
        used += [
            (f"torch.{node.attr}", node.lineno)
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute) and node.attr in METHODS_OF_TORCH and not _is_own(node.value)
        ]
        violations += [f"{source.path}:{line}: {source.module} uses {name}" for name, line in used if _is_private(name)]
    return violations


def _names_of_torch(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """What an import statement binds, and what that is, if it comes from torch."""
    for alias in node.names:
        full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        if is_within(full, "torch"):
            yield (alias.asname or alias.name.split(".")[0], full if alias.asname or "." not in alias.name else "torch")
            yield (full, full)


def _is_own(owner: ast.expr) -> bool:
    called = owner.func if isinstance(owner, ast.Call) else owner
    return isinstance(called, ast.Name) and called.id in ("self", "super")


def _is_private(name: str) -> bool:
    first, *parts = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith(("__", "_foreach_")) for part in parts)


def environment_only_in_env(sources: list[SourceFile]) -> list[str]:
    """Only `bagua/env.py` touches the environment."""
    violations = []
    for source in sources:
        if source.module == "bagua.env":
            continue
        lines = [node.lineno for node in _outermost_attributes(source.tree) if _is_environment(dotted_name(node))]
        lines += [
            item.line
            for item in imports_of(source)
            if item.target == "os" and any(_is_environment(f"os.{name}") for name in item.names)
        ]
        violations += [f"{source.path}:{line}: read the environment in bagua/env.py" for line in lines]
    return violations


def _is_environment(name: str) -> bool:
    return any(is_within(name, entry) for entry in ENVIRONMENT)


def files_are_short(sources: list[SourceFile]) -> list[str]:
    """A file that grows longer than this wants to be two."""
    return [
        f"{source.path}: {source.line_count} lines, at most {LONGEST_FILE}"
        for source in sources
        if source.line_count > LONGEST_FILE
    ]


def folders_hold_few_files(sources: list[SourceFile]) -> list[str]:
    """A folder with more files than this wants to be two."""
    counts = Counter(source.path.parent for source in sources)
    return [f"{folder}: {count} files, at most {MOST_FILES}" for folder, count in counts.items() if count > MOST_FILES]


def names_of_classes_are_unique(sources: list[SourceFile]) -> list[str]:
    """One word, one thing: no two public classes of the package share a name; see ``docs/architecture.md``."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    shared = {name: at for name, at in places.items() if len(at) > 1}
    return [f"{', '.join(at)}: {len(at)} classes are called {name}" for name, at in shared.items()]


RULES: tuple[Rule, ...] = (
    imports_point_downwards,
    packages_are_entered_by_their_doors,
    no_import_cycles,
    only_declared_packages,
    torch_distributed_only_in_comm,
    private_names_of_torch_in_two_modules,
    environment_only_in_env,
    files_are_short,
    folders_hold_few_files,
    names_of_classes_are_unique,
)
