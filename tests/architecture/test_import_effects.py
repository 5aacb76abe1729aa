"""Importing `bagua.torch_api` adds `with_bagua` to modules and the backend name `bagua`, and does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.architecture.source_tree import PACKAGE, REPOSITORY

# Looks at a fresh interpreter before and after one statement, and prints what has changed.
PROBE = """
import faulthandler, json, logging, os, random, signal, sys, threading, warnings
import torch
import torch.distributed as dist

CLASSES = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.nn.parallel.DistributedDataParallel)


def open_sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink("/proc/self/fd/" + name))
        except FileNotFoundError:
            pass
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
    for kind in CLASSES:
        seen[kind.__name__] = {name: id(value) for name, value in vars(kind).items()}
    return seen


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
    command = [sys.executable, "-W", "error:::bagua", "-c", PROBE, statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_importing_torch_api_has_its_two_effects_only_and_distributed_has_no_other() -> None:
    changed = changes_made_by("import bagua.torch_api, bagua.distributed")
    assert changed.pop("Module") == ["with_bagua"]
    backends = changed.pop("backends")
    assert set(backends["after"]) - set(backends["before"]) == {"bagua"}
    assert changed == {}


def test_importing_bagua_does_not_import_torch() -> None:
    script = "import sys, bagua; assert 'torch' not in sys.modules; assert bagua.__version__"
    subprocess.run([sys.executable, "-c", script], timeout=60, cwd=REPOSITORY, check=True)


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
    listed = dir(module)
    unlike += [f"{door}.{name}" for name in module.__all__ if name not in listed]
    unlike += [f"{door}.{name}" for name in module.__all__ if getattr(module, name) is not getattr(module, name)]
    try:
        module.no_such_name
    except AttributeError as error:
        unlike += [] if f"module {door!r} has no attribute 'no_such_name'" in str(error) else [door]
print(json.dumps([there, unlike]))
"""


def test_what_few_programs_need_is_imported_when_it_is_asked_for() -> None:
    command = [sys.executable, "-c", LOOK_AROUND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=REPOSITORY, check=True)
    there, unlike = json.loads(done.stdout)
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


def test_the_wheel_says_that_it_is_typed() -> None:
    assert (REPOSITORY / PACKAGE / "py.typed").exists()
