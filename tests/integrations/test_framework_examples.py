"""Examples of the pages about other frameworks and about clusters, run as a user would run them; the config of Ray."""

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from bagua.errors import ConfigurationError
from bagua.integrations.ray import torch_config
from tests.interpreters import interpreter
from tests.launching import REPOSITORY, ends, environment, free_port

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("forked_python")]
EXAMPLES = REPOSITORY / "examples"
SAYS_ITS_RANK = """
import bagua.torch_api as bagua
bagua.init_process_group()
print("rank", bagua.get_rank(), "of", bagua.get_world_size(), flush=True)
"""


def run(*command: str, **variables: str) -> str:
    """What a command prints; it lasts no longer than the test."""
    here = {"cwd": REPOSITORY, "env": environment(**variables)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **here)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tools(folder: Path, **scripts: str) -> str:
    """A PATH whose first folder holds these commands."""
    folder.mkdir()
    torchrun = f'#!/bin/sh\nexec {shlex.join(interpreter())} -m torch.distributed.run "$@"\n'
    for name, text in {"torchrun": torchrun, **scripts}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def learned(output: str) -> list[float]:
    """The losses that rank 0 printed, of two ranks that ended with equal weights."""
    # Lines of two processes may run into each other.
    ends = re.findall(r"rank (\d) of (\d) ends with (-?\d+\.\d{6})", output)
    assert sorted((rank, size) for rank, size, _ in ends) == [("0", "2"), ("1", "2")], output
    assert len({total for _, _, total in ends}) == 1, output
    return [float(loss) for loss in re.findall(r"step +\d+ +loss (\d+\.\d{4})", output)]


def test_the_ddp_example_runs_as_a_slurm_job_and_goes_on_from_its_checkpoint(tmp_path):
    """The script as it is, on one node; Slurm's commands are stand-ins."""
    path = tools(
        tmp_path / "bin",
        scontrol='#!/bin/sh\n[ "$*" = "show hostnames node[7-8]" ] && printf "127.0.0.1\\nnode8\\n"\n',
        srun='#!/bin/sh\n[ "$1" = "--kill-on-bad-exit=1" ] && shift && exec env SLURM_NODEID=0 "$@"\n',
    )
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "2"}
    script = ("bash", "examples/slurm_job.sh", "examples/use_ddp.py", "--checkpoint", str(tmp_path / "saved"))
    first = learned(run(*script, "--steps", "51", PATH=path, MASTER_PORT=str(free_port()), **job))
    assert first[-1] < 0.5 * first[0]
    later = run(*script, "--steps", "10", PATH=path, MASTER_PORT=str(free_port()), **job)
    assert "step   60 " in later
    assert learned(later)[-1] < first[-1]


def test_the_kubernetes_job_fits_together_and_its_command_starts_ranks(tmp_path):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes_job.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(variables["NODES"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"

    here = {"NODES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    assert here.keys() <= variables.keys()
    variables |= {**here, "JOB_COMPLETION_INDEX": "0", "PATH": tools(tmp_path / "bin"), "OMP_NUM_THREADS": "1"}
    losses = learned(run(*container["command"], *container["args"], **variables))
    assert losses[-1] < 0.5 * losses[0]


def test_ranks_that_srun_starts_by_itself_find_each_other(forked_python, tmp_path):
    """Without torchrun: ``srun --ntasks-per-node 2 python train.py``."""
    script = tmp_path / "train.py"
    script.write_text(SAYS_ITS_RANK)
    places = {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in ("0", "1"):
            told = environment(**places, SLURM_PROCID=rank, SLURM_LOCALID=rank)
            command = [forked_python, str(script)]
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env=told)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        assert ends(ranks) == [(0, "rank 0 of 2\n"), (0, "rank 1 of 2\n")]


def torchrun(*script: str) -> str:
    place = ("--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    return run(*interpreter(), "-m", "torch.distributed.run", *place, *script)


def test_the_accelerate_example_learns_and_saves(tmp_path):
    pytest.importorskip("accelerate", reason="needs the extra accelerate")
    script = ("examples/use_accelerate.py", "--checkpoint", str(tmp_path / "saved"))
    losses = learned(torchrun(*script, "--steps", "51"))
    assert losses[-1] < 0.5 * losses[0]
    assert {file.name for file in (tmp_path / "saved").iterdir()} > {"bagua-rank0.pt", "bagua-rank1.pt"}


def test_the_transformers_example_learns_and_goes_on(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    script = ("examples/use_transformers.py", "--folder", str(tmp_path))
    losses = learned(torchrun(*script, "--steps", "51"))
    assert losses[-1] < 0.5 * losses[0]
    assert learned(torchrun(*script, "--steps", "101", "--resume"))[0] < 0.5 * losses[0]


@pytest.mark.timeout(300)
def test_each_entry_point_goes_on_from_what_the_one_before_saved(tmp_path):
    script = ("examples/talk_rarely.py", "--checkpoint", str(tmp_path / "saved"), "--entry")
    first = learned(torchrun(*script, "switch_to", "--steps", "41"))
    assert first[-1] < 0.5 * first[0]
    for entry, steps, last in (("bagua_init", 31, 81), ("with_bagua", 30, 111)):
        output = torchrun(*script, entry, "--steps", str(steps))
        assert f"step {last:>4} " in output
        assert max(learned(output)) < 0.5 * first[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_island_that_ray_starts_again_is_a_newcomer():
    pytest.importorskip("ray.train", reason="needs the extra ray")
    output = run(sys.executable, "examples/use_ray_islands.py", "--islands", "2", "--lose")
    ends = re.findall(r"seat (\d) with \[(.*)\]: loss (\S+), ends with (\S+)", output)
    assert [(seat, contributed) for seat, contributed, *_ in ends] == [("0", "0, 2"), ("2", "0, 2")], output
    assert len({total for *_, total in ends}) == 1


@pytest.mark.slow
@pytest.mark.timeout(110)
def test_the_ray_example_learns(tmp_path):
    pytest.importorskip("ray.train", reason="needs the extra ray")
    output = run(sys.executable, "examples/use_ray.py", "--steps", "50", "--folder", str(tmp_path))
    ends = re.findall(r"rank (\d) of (\d): loss (\S+) to (\S+), ends with (\S+)", output)
    assert [(rank, size) for rank, size, *_ in ends] == [("0", "2"), ("1", "2")], output
    assert len({total for *_, total in ends}) == 1
    assert all(float(last) < 0.5 * float(first) for _, _, first, last, _ in ends)


def test_the_lightning_example_learns_and_saves(imported_before, tmp_path):
    """Lightning starts the second process."""
    pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")
    script = ("examples/use_lightning.py", "--algorithm", "diloco", "--checkpoint", str(tmp_path), "--epochs", "2")
    output = run(*interpreter(*imported_before), *script)
    losses = [float(loss) for loss in re.findall(r"epoch \d+  loss (\S+)", output)]
    assert losses[-1] < 0.5 * losses[0]  # The first is that of the untrained model.
    (first, *one), (second, *other) = sorted(re.findall(r"rank (\d) of (\d) ends with (-?\d+\.\d+)", output))
    assert (first, second, one) == ("0", "1", other)
    assert (tmp_path / "last.ckpt").exists()


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    with pytest.raises(ImportError, match=r"bagua-torch\[ray\]"):
        torch_config()


def test_ray_never_gets_less_time_than_was_asked_for_and_no_time_at_all_is_refused(monkeypatch):
    @dataclasses.dataclass
    class ConfigOfRay:
        timeout_s: int = 1800
        backend_cls = object

    monkeypatch.setitem(sys.modules, "ray.train.torch", types.SimpleNamespace(TorchConfig=ConfigOfRay))
    for asked_s, of_ray in ((1800.0, 1800), (0.5, 1), (1.2, 2), (float("inf"), 365 * 24 * 3600)):
        assert torch_config(timeout_s=asked_s).timeout_s == of_ray
    with pytest.raises(ConfigurationError, match="timeout_s"):
        torch_config(timeout_s=0)
