"""The sources keep the rules, and each rule catches what it is there for."""

from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.rules import PACKAGE, REPOSITORY, read_sources

SOURCES = read_sources(REPOSITORY / PACKAGE)

# For each rule, the files of small trees that break it, with words that the violation must contain.
VIOLATIONS = {
    rules.imports_point_downwards: [
        ({"env.py": "import bagua.comm", "comm/__init__.py": ""}, "imports bagua.comm"),
        ({"comm/a.py": "def f():\n    from bagua.parallel import engine", "parallel/engine.py": ""}, "a.py:2"),
        ({"topology.py": "if TYPE_CHECKING:\n    from bagua import comm", "comm/__init__.py": ""}, "topology.py:2"),
        ({"helpers.py": ""}, "has no layer"),
    ],
    rules.packages_are_entered_by_their_doors: [
        ({"buckets.py": "def f():\n    from bagua.comm.store import Cells", "comm/store/__init__.py": ""},
         "buckets.py:2: bagua.buckets passes the door of bagua.comm.store"),
        ({"buckets.py": "from bagua.comm import store", "comm/store.py": ""},
         "buckets passes the door of bagua.comm.store"),
        ({"a.py": "import bagua.comm.b", "comm/b.py": ""}, "a.py:1"),
    ],
    rules.no_import_cycles: [
        ({"comm/a.py": "from bagua.comm import b", "comm/b.py": "def f():\n    import bagua.comm.a"},
         "bagua.comm.a -> bagua.comm.b -> bagua.comm.a"),
        ({"comm/__init__.py": "from bagua.comm.a import x", "comm/a.py": "from bagua.comm import y"},
         "bagua.comm -> bagua.comm.a -> bagua.comm"),
    ],
    rules.only_declared_packages: [
        ({"comm/a.py": "import numpy as np"}, "numpy"), ({"comm/a.py": "from rich.table import Table"}, "rich"),
    ],
    rules.torch_distributed_only_in_comm: [
        ({"buckets.py": "import torch.distributed as dist"}, "torch.distributed"),
        ({"buckets.py": "from torch import distributed"}, "torch.distributed"),
        ({"buckets.py": "import torch\ntorch.distributed.barrier()"}, "py:2"),
        ({"buckets.py": "import torch.distributed.run"}, "torch.distributed.run"),
        ({"cli/a.py": "from torch.distributed import all_reduce"}, "all_reduce"),
    ],
    rules.private_names_of_torch_in_two_modules: [
        ({"comm/a.py": "import torch\ntorch._C._f()"}, "a.py:2"), ({"comm/a.py": "import torch._C"}, "torch._C"),
        ({"comm/a.py": "import torch.nn as n\nn._f()"}, "torch.nn._f"),
        ({"comm/a.py": "from torch.nn import _f"}, "torch.nn._f"),
        ({"comm/a.py": "def f(x):\n    x._end_coalescing()"}, "a.py:2"),
    ],
    rules.environment_only_in_env: [
        ({"comm/a.py": "import os\nos.environ['A'] = '1'"}, "a.py:2"),
        ({"comm/a.py": "import os\nos.environ.get('A')"}, "a.py:2"), ({"comm/a.py": "from os import getenv"}, "a.py:1"),
    ],
    rules.names_of_classes_are_unique: [({"comm/a.py": "class A: ...", "comm/b.py": "class A: ..."}, "b.py:1")],
    rules.files_are_short: [({"comm/a.py": "x = 1\n" * 601}, "601 lines")],
    rules.folders_hold_few_files: [({f"comm/a{number}.py": "" for number in range(16)}, "comm: 16 files")],
}  # fmt: skip


def test_the_sources_are_found() -> None:
    assert "bagua" in {source.module for source in SOURCES}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule: rules.Rule) -> None:
    violations = [*rule(SOURCES)]
    assert not violations, f"{rule.__doc__}\n" + "\n".join(violations)


@pytest.mark.parametrize(
    ("rule", "files", "said"), [(rule, *case) for rule, cases in VIOLATIONS.items() for case in cases]
)
def test_rule_catches_a_violation(rule: rules.Rule, files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, text in {"__init__.py": "", **files}.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n" * (not text.endswith("\n")), encoding="utf-8")
    (violation, *_) = rule(read_sources(tmp_path / PACKAGE))
    assert said in violation


def test_every_rule_has_a_violation_that_it_catches() -> None:
    assert {*VIOLATIONS} == {*rules.RULES}
