"""Other people's tests and examples on ours. Not part of the default run: ``tox run -e clients``.

Each test here runs programs of an installed package, or what its examples do, in processes of their own.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launching import REPOSITORY, environment

SUITE_OF_TORCHFT = ("ddp_test", "local_sgd_integ_test", "manager_integ_test", "process_group_test", "reconfigure_test")
#: So many tests of torch run on CPUs, at least: the rest asks for GPUs, NCCL, MPI or more ranks.
LEAST_OF_TORCH = 80
pytestmark = pytest.mark.timeout(600)
# A group in a process of its own, or one of NCCL, is not ours.
NOT_OURS = "not NCCL and not Nccl and not XCCL and not Baby"


def run(*command: str, folder: Path = REPOSITORY, timeout_s: float = 540, **variables: str) -> str:
    """What a Python command prints, which must end well."""
    here = {"cwd": folder, "env": environment(**variables), "timeout": timeout_s}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, **here)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


def torchrun(*script: str) -> str:
    return run("-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint",
               "127.0.0.1:0", *script)  # fmt: skip


@pytest.mark.parametrize("name", SUITE_OF_TORCHFT)
def test_torchft(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="needs the extra torchft")
    if importlib.util.find_spec(f"torchft.{name}") is None:
        pytest.skip("this version of torchft has no such tests")
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.clients.torchft_on_bagua", "-o", "addopts=")
    run("-m", "pytest", *options, "--timeout", "240", "--pyargs", f"torchft.{name}", "-k", NOT_OURS, folder=tmp_path)


def test_a_group_is_resized_as_torchft_does() -> None:
    if not hasattr(torch.distributed.ProcessGroup, "reconfigure"):
        pytest.skip("needs torch 2.14, and the nightly of torchft: tox run -e nightly")
    pytest.importorskip("torchft.reconfigure_test")
    run("-m", "tests.clients.torchft_on_bagua")


# test_distributed_data_loop calls another collective on each rank: it hangs on Gloo, and is an error here.
# test_ddp_comm_hook names GPUs; the tests of the backend run the same hooks of torch on CPUs.
@pytest.mark.parametrize("name", ["test_ops", "test_sync", "test_script"])
def test_accelerate(name: str) -> None:
    pytest.importorskip("accelerate", reason="needs the extra accelerate")
    torchrun("-m", "tests.clients.on_bagua", f"accelerate.test_utils.scripts.{name}")


# TrainingArguments refuse the name of the backend, and take a group that is there.
@pytest.mark.parametrize("algorithm", ["hook", "bytegrad"])
def test_the_trainer_on_the_backend(algorithm: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    script = ("examples/use_transformers.py", "--steps", "51", "--algorithm", algorithm, "--folder", str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", torchrun("-m", "tests.clients.on_bagua", *script))]
    assert losses[-1] < 0.5 * losses[0]


def test_the_original_examples() -> None:
    assert "6 algorithms: right" in torchrun("-m", "tests.clients.original_examples")


@pytest.mark.parametrize("strategy", ["bagua", "bagua_bytegrad"])
def test_lightnings_boring_models(strategy: str) -> None:
    pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")
    assert "trained" in torchrun("-m", "tests.clients.boring_models", strategy)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 3])
def test_the_suite_inside_torch(size: int) -> None:
    suite = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=")
    said = run(*suite, "--timeout", "300", "tests/clients/torch_suite.py", timeout_s=3500, WORLD_SIZE=str(size))
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None, said
    assert int(passed[1]) >= LEAST_OF_TORCH, said
