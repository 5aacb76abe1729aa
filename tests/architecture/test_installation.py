"""What an import does, what a user is told to install, and what cannot work says so in one sentence."""

import email
import email.policy
import json
import re
import runpy
import sys
import zipfile

import pytest

from tests.architecture.rules import PACKAGE, REPOSITORY
from tests.launching import finished

# Looks at a fresh interpreter before and after one statement, and prints what has changed.
PROBE = """
import contextlib, faulthandler, json, logging, os, random, signal, sys, threading, warnings
import torch
import torch.distributed as dist

CLASSES = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.nn.parallel.DistributedDataParallel)

def open_sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink("/proc/self/fd/" + name))
    return sorted(name for name in found if not name.startswith("/"))

def functions_of(module):
    return {name: id(value) for name, value in vars(module).items() if type(value) is not type(sys)}

def look():
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]
    seen = {
        "threads": [thread.name for thread in threading.enumerate()] + [str(len(os.listdir("/proc/self/task")))],
        "sockets and pipes": open_sockets(),
        "environment": dict(os.environ),
        "torch.distributed is initialised": dist.is_initialized(),
        "backends": list(dist.Backend.backend_list),
        "backends of devices": dict(dist.Backend.default_device_backend_map),
        "logging handlers": [repr(logger.handlers) for logger in [logging.root, *loggers] if logger.handlers],
        "warning filters": [repr(entry) for entry in warnings.filters],
        "signal handlers": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook)],
        "random state": [repr(random.getstate()), repr(torch.get_rng_state().tolist())],
        "torch settings": [torch.get_num_threads(), torch.is_grad_enabled(), str(torch.get_default_dtype())],
        "torch functions": functions_of(torch),
        "torch.distributed functions": functions_of(dist),
    }
    return seen | {kind.__name__: {name: id(value) for name, value in vars(kind).items()} for kind in CLASSES}

def difference(before, after):
    if isinstance(before, dict):
        return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return {"before": before, "after": after}

before = look()
exec(sys.argv[1])
after = look()
changed = {key: difference(before[key], after[key]) for key in before if before[key] != after[key]}
print(json.dumps(changed, default=str))
"""


def changes_made_by(statement: str) -> dict[str, object]:
    """What a statement changes in a fresh interpreter, in which a warning is an error."""
    done = finished(sys.executable, "-W", "error:::bagua", "-c", PROBE, statement)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_importing_torch_api_has_its_two_effects_only_and_distributed_has_no_other() -> None:
    changed = changes_made_by("import bagua.torch_api, bagua.distributed")
    assert changed.pop("Module") == ["with_bagua"]
    backends = changed.pop("backends")
    assert set(backends["after"]) - set(backends["before"]) == {"bagua"}
    assert changed == {}


def test_importing_bagua_does_not_import_torch() -> None:
    code = "import sys, bagua; assert 'torch' not in sys.modules; assert bagua.__version__"
    done = finished(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


#: What a program that names no algorithm does without; most of these take longer than a thousandth of `import torch`.
LATE = ("bagua.advise", "bagua.compression", "bagua.optim", "bagua.parallel.decentralized", "bagua.topology.graphs")
EAGER_ALGORITHMS = {"bagua.algorithms.gradients.gradient_allreduce"}

LOOK_AROUND = """
import importlib, json, sys
import bagua.torch_api
there = sorted(sys.modules)
doors = ["torch_api", "torch_api.algorithms", "torch_api.algorithms.diloco", "torch_api.data_parallel", "algorithms"]
doors += ["parallel", "primitives", "topology"]
unlike = []
for door in ("bagua." + one for one in doors):
    module = importlib.import_module(door)
    unlike += [f"{door}.{name}" for name in module.__all__ if name not in dir(module)]
    unlike += [f"{door}.{name}" for name in module.__all__ if getattr(module, name) is not getattr(module, name)]
    try:
        module.no_such_name
    except AttributeError as error:
        unlike += [] if f"module {door!r} has no attribute 'no_such_name'" in str(error) else [door]
print(json.dumps([there, unlike]))
"""


def test_what_few_programs_need_is_imported_when_it_is_asked_for() -> None:
    there, unlike = json.loads(finished(sys.executable, "-c", LOOK_AROUND).stdout)
    assert [name for name in LATE if name in there] == []
    assert {name for name in there if name.startswith("bagua.algorithms.gradients.")} == EAGER_ALGORITHMS
    assert unlike == []


def test_the_probe_sees_what_it_looks_for() -> None:
    effects = {
        "environment": "import os; os.environ['A_NEW_NAME'] = '1'",
        "threads": "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "sockets and pipes": "import socket; kept = socket.socket()",
        "logging handlers": "import logging; logging.basicConfig()",
        "warning filters": "import warnings; warnings.simplefilter('ignore')",
        "Module": "import torch; torch.nn.Module.other = 1",
        "random state": "import torch; torch.manual_seed(1)",
        "torch functions": "import torch; torch.a_new_function = len",
        "torch.distributed functions": "import torch.distributed as dist; dist.all_reduce = None",
        "backends": "dist.Backend.register_backend('other', len, devices=[])",
        "backends of devices": "dist.Backend.register_backend('another', len, devices='tpu')",
    }
    assert {*changes_made_by("\n".join(effects.values()))} == {*effects}


# tomllib came with Python 3.11.
_PROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
_NAME = re.search(r'^name = "([^"]+)"', _PROJECT, re.MULTILINE)[1]
_OPTIONAL = _PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
_EXTRAS = set(re.findall(r"^([\w-]+) = \[", _OPTIONAL, re.MULTILINE))
_TEXTS = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / PACKAGE).rglob("*.py")]


def test_every_command_installs_this_project_and_an_extra_that_exists():
    commands = []
    for path in _TEXTS:
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"pip install [^\n]*?'?([\w.-]+)\[([\w,-]+)\]", text)
        # A page is read before this project is installed, and no index has it. An error text comes after.
        assert path.suffix == ".py" or {project for project, _ in found} <= {"."}, path
        commands += found
        commands += [(_NAME, extra) for extra in re.findall(r"install_command\(['\"]([\w-]+)['\"]\)", text)]
    assert len(commands) > 8
    assert {project for project, _ in commands} <= {".", _NAME}
    assert {extra for _, extras in commands for extra in extras.split(",")} <= _EXTRAS


def test_the_oldest_torch_that_is_admitted_is_the_one_that_is_tested():
    (admitted,) = re.findall(r'"torch>=([\d.]+)"', _PROJECT)
    (tested,) = re.findall(r"^ +oldest: torch==([\d.]+)$", (REPOSITORY / "tox.ini").read_text(), re.MULTILINE)
    assert tested.startswith(f"{admitted}.")
    for page in ("README.md", "docs/getting_started.md", "CONTRIBUTING.md"):
        assert f"torch {admitted}" in (REPOSITORY / page).read_text(encoding="utf-8"), page


def links(text: str) -> set[str]:
    """Targets of links and pictures, of which those in code are none."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"\]\(([^)]+)\)", prose))


def test_the_wheel_describes_itself_without_links_that_lead_nowhere(tmp_path, monkeypatch):
    backend = pytest.importorskip("hatchling.build", reason="needs the extra test")
    monkeypatch.chdir(REPOSITORY)
    wheel = backend.build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        facts = email.message_from_bytes(opened.read(name), policy=email.policy.default)
    said, readme = facts.get_payload(), (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert facts["Description-Content-Type"] == "text/markdown"
    assert "# bagua\n" in said
    relative = {target for target in links(readme) if "://" not in target and not target.startswith("#")}
    assert len(relative) > 30
    assert all((REPOSITORY / target.partition("#")[0]).exists() for target in relative)
    assert links(said) == links(readme) - relative
    assert re.findall(r"```diff.*?```", said, re.DOTALL) == re.findall(r"```diff.*?```", readme, re.DOTALL)


def test_the_readme_on_an_index_leads_to_the_address_that_the_owner_names():
    pytest.importorskip("hatchling", reason="needs the extra test")
    shown = runpy.run_path(str(REPOSITORY / "hatch_build.py"))["outside_a_checkout"]
    text = "![A\nplot](docs/a.svg) [page](docs/b.md#c) [here](#d) [there](https://e.org/f) `[x]`\n```\n[g](h)\n```\n"
    rest = "[here](#d) [there](https://e.org/f) `[x]`\n```\n[g](h)\n```\n"
    assert shown(text, "") == f"A\nplot page {rest}"
    there = f"![A\nplot](https://i.org/docs/a.svg) [page](https://i.org/docs/b.md#c) {rest}"
    assert shown(text, "https://i.org/") == there


@pytest.mark.parametrize(
    ("pretence", "name"),
    [
        ("sys.platform = 'win32'", "win32"),
        ("import importlib.util as u; u.find_spec = lambda name, find=u.find_spec: name != 'fcntl' and find(name)", ""),
    ],
)
def test_a_platform_that_lacks_what_it_takes_is_one_sentence(pretence, name):
    done = finished(sys.executable, "-c", f"import sys; {pretence}; import bagua.torch_api")
    told = f"ImportError: bagua runs on Linux and macOS, not on {name or sys.platform}; on Windows, use it inside WSL"
    assert done.stderr.strip().endswith(told)


def test_the_package_has_the_names_of_its_entry():
    """``import bagua.comm`` after ``import bagua.torch_api as bagua`` binds the name ``bagua`` to the package."""
    import bagua
    import bagua.torch_api

    submodules = {"advise", "algorithms", "distributed", "env"}
    for name in set(bagua.torch_api.__all__) - submodules:
        assert getattr(bagua, name) is getattr(bagua.torch_api, name), name
    assert bagua.algorithms.Algorithm is bagua.torch_api.algorithms.Algorithm
    for given, meant in {"init": "init_process_group", "all_reduce": "allreduce", "BaguaModul": "BaguaModule"}.items():
        with pytest.raises(AttributeError, match=rf"'bagua' has no attribute '{given}'\. Did you mean '{meant}'"):
            getattr(bagua, given)
    assert not any(hasattr(module, "__wrapped__") for module in (bagua, bagua.torch_api))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/getting_started.md"])
def test_what_a_newcomer_installs_draws_the_picture_that_is_promised(page):
    (extras,) = re.findall(r"pip install -c constraints\.txt '\.\[([\w,-]+)\]'", (REPOSITORY / page).read_text("utf-8"))
    assert set(extras.split(",")) >= {"cli", "plot"}
