"""The house rules that ruff does not have, on sources as syntax trees. Each returns one line for each violation."""

import ast
import functools
import graphlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "bagua"
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SourceFile:
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
    return module == package or module.startswith(package + ".")


# The one table of layers. A module imports its own layer and anything below; `bagua` itself imports nothing of ours.
LAYERS = (
    ("bagua.errors", "bagua.env", "bagua.checks", "bagua.late", "bagua.link", "bagua.torch_private"),
    ("bagua.topology", "bagua.compression"),
    ("bagua.comm",),
    ("bagua.buckets", "bagua.primitives", "bagua.membership"),
    ("bagua.algorithms", "bagua.optim"),
    ("bagua.engine",),
    ("bagua.parallel", "bagua.observe", "bagua.advise"),
    (
        "bagua.distributed", "bagua.torch_api", "bagua.plugin", "bagua.testing", "bagua.utilities",
        "bagua.integrations", "bagua.cli", "bagua.__main__",
    ),
)  # fmt: skip

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

Rule = Callable[[list[SourceFile]], Iterable[str]]


def layer_of(module: str) -> int | None:
    """The layer of a module; None for one that the table does not know."""
    if module == PACKAGE:
        return -1
    return next((number for number, layer in enumerate(LAYERS) if any(is_within(module, one) for one in layer)), None)


def imports_point_downwards(sources: list[SourceFile]) -> Iterator[str]:
    """No module imports from a layer above its own."""
    known = {source.module for source in sources}
    for source in sources:
        own = layer_of(source.module)
        if own is None:
            yield f"{source.path}: {source.module} has no layer; add it to LAYERS"
            continue
        for target, line in imported_modules(source, known):
            layer = layer_of(target)
            if target != PACKAGE and (layer is None or layer > own):
                yield f"{source.path}:{line}: {source.module} (layer {own}) imports {target} ({layer})"


def packages_are_entered_by_their_doors(sources: list[SourceFile]) -> Iterator[str]:
    """A module takes names of another package out of that package's door, its `__init__`."""
    bound = {source.module: {name for item in imports_of(source) for name in item.names} for source in sources}
    for source in sources:
        for item in imports_of(source):
            if item.target.split(".")[0] != PACKAGE:
                continue
            through = [f"{item.target}.{name}" for name in item.names if name not in bound.get(item.target, ())]
            for target in [item.target, *(name for name in through if name in bound)]:
                is_door = target.count(".") < 2 or any(is_within(target, name) for name in OPEN_PACKAGES)
                if not is_door and target.split(".")[1] != source.module.split(".")[1:2][0]:
                    yield f"{source.path}:{item.line}: {source.module} passes the door of {target}"


def no_import_cycles(sources: list[SourceFile]) -> Iterator[str]:
    """No module imports itself through others."""
    known = {source.module for source in sources}
    graph = {source.module: {target for target, _ in imported_modules(source, known)} for source in sources}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield " -> ".join(reversed(error.args[1]))


def only_declared_packages(sources: list[SourceFile]) -> Iterator[str]:
    """Only the standard library and the declared dependencies are imported."""
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
                yield f"{source.path}:{item.line}: {top} is not a dependency of {source.module}"


def torch_distributed_only_in_comm(sources: list[SourceFile]) -> Iterator[str]:
    """Only `bagua.comm` communicates through torch; launchers and checkpoints are open to those who integrate them."""
    for source in sources:
        if is_within(source.module, "bagua.comm") or source.module == REGISTRATION:
            continue
        integrates = is_within(source.module, "bagua.integrations")
        launches = is_within(source.module, "bagua.cli") or integrates
        allowed = (*(LAUNCHER_MODULES if launches else ()), *(INTEGRATED_MODULES if integrates else ()))
        for name, line in _uses_of_torch_distributed(source):
            if not any(is_within(name, module) for module in allowed):
                yield f"{source.path}:{line}: {source.module} uses {name}"


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


def private_names_of_torch_in_two_modules(sources: list[SourceFile]) -> Iterator[str]:
    """Only the modules `torch_private` use names of torch that begin with an underscore, so that a test can name them.

    `torch._foreach_*` is documented.
    """
    for source in sources:
        if source.module in TORCH_PRIVATE:
            continue
        aliases = {"torch": "torch"}
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                aliases.update(_names_of_torch(node))
        used = [(target, 0) for target in aliases.values()]
        for node in _outermost_attributes(source.tree):
            first, _, rest = dotted_name(node).partition(".")
            used.append((f"{aliases.get(first, '')}.{rest}", node.lineno))
        attributes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
        methods = [node for node in attributes if node.attr in METHODS_OF_TORCH and not _is_own(node.value)]
        used += [(f"torch.{node.attr}", node.lineno) for node in methods]
        yield from (f"{source.path}:{line}: {source.module} uses {name}" for name, line in used if _is_private(name))


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


def environment_only_in_env(sources: list[SourceFile]) -> Iterator[str]:
    """Only `bagua/env.py` touches the environment."""
    for source in sources:
        if source.module == "bagua.env":
            continue
        used = [(dotted_name(node), node.lineno) for node in _outermost_attributes(source.tree)]
        used += [(f"{item.target}.{name}", item.line) for item in imports_of(source) for name in item.names]
        lines = [line for name, line in used if any(is_within(name, entry) for entry in ENVIRONMENT)]
        yield from (f"{source.path}:{line}: read the environment in bagua/env.py" for line in lines)


def files_are_short(sources: list[SourceFile]) -> list[str]:
    """A file that grows longer than this wants to be two."""
    long = [source for source in sources if source.line_count > LONGEST_FILE]
    return [f"{source.path}: {source.line_count} lines, at most {LONGEST_FILE}" for source in long]


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
    imports_point_downwards, packages_are_entered_by_their_doors, no_import_cycles, only_declared_packages,
    torch_distributed_only_in_comm, private_names_of_torch_in_two_modules, environment_only_in_env, files_are_short,
    folders_hold_few_files, names_of_classes_are_unique,
)  # fmt: skip
