"""The scripts for Slurm on a cluster of Slurm's own daemons: two nodes on this machine. Needs root.

Not part of the default run: ``apt-get install slurmctld slurmd slurm-client``, then ``tox run -e clusters``.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import until
from tests.integrations.test_framework_examples import EXAMPLES, SAYS_ITS_RANK, learned, tools
from tests.launching import REPOSITORY, environment, free_port

pytestmark = pytest.mark.gloo

DEADLINE_S = 300.0
CONFIGURATION = """\
ClusterName=bagua
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=8
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
"""
#: Is killed once on one node, as if somebody had pulled its plug. Islands end after the same outer step.
ISLAND = """
import os, signal, sys, torch
import bagua.torch_api as bagua

mark = sys.argv[1]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with bagua.join_islands(size=2, minimum=1, timeout=120) as islands:
    model.with_bagua(optimizer, "diloco", between=islands)
    crowd = set()
    while not {(0, 1), (0,), (0, 2)} <= crowd and not {(0, 1), (1,), (1, 2)} <= crowd and len(crowd) < 99:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        crowd.add(islands.members().contributed)
        if islands.seat == 2 and crowd - {()}:
            break
        if (0, 1) in crowd and os.environ["SLURM_PROCID"] == "1" and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    print("island of seat", islands.seat, "ends", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a shell that reaches the cluster."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    folder = tmp_path_factory.mktemp("slurm")
    ports = {name: free_port() for name in ("controller", "first", "second")}
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, host=socket.gethostname(), **ports))
    modules = {"python": "", "torchrun": "-m torch.distributed.run", "baguarun": "-m bagua.cli.baguarun"}
    scripts = {name: f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n' for name, words in modules.items()}
    here = {"SLURM_CONF": str(configuration), "PATH": tools(folder / "bin", **scripts), "GLOO_SOCKET_IFNAME": "lo"}
    shell = environment(**here, MASTER_ADDR="127.0.0.1")
    asked = {"env": shell, "capture_output": True, "text": True}
    commands = [["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "node1"], ["slurmd", "-D", "-N", "node2"]]
    daemons = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"daemon{number}.log").open("w") as log:
                daemons.append(subprocess.Popen(command, env=shell, stdout=log, stderr=log))
        there = ["sinfo", "-h", "-o", "%D %t"]
        until(lambda: subprocess.run(there, check=False, **asked).stdout.split() == ["2", "idle"], DEADLINE_S)
        yield shell
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait()


def submit(shell: dict[str, str], folder: Path, *words: str, **variables: str) -> str:
    """What a job prints that ends well."""
    output, here = folder / "output", {"cwd": REPOSITORY, "env": {**shell, **variables}}
    command = ["sbatch", "--wait", "--nodes=2", "--cpus-per-task=2", "--time=10", f"--output={output}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **here)
    said = output.read_text() if output.exists() else done.stderr
    assert done.returncode == 0, said
    return said


def test_the_ddp_example_runs_on_two_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    script = (str(EXAMPLES / "slurm_job.sh"), "examples/use_ddp.py", "--steps", "51")
    losses = learned(submit(cluster, tmp_path, *script, RANKS_PER_NODE="1"))
    assert losses[-1] < 0.5 * losses[0]


def test_ranks_that_srun_starts_find_each_other(cluster: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAYS_ITS_RANK)
    job = tmp_path / "job.sh"
    job.write_text(f"#!/bin/bash\nsrun --kill-on-bad-exit=1 python {script}\n")
    said = submit(cluster, tmp_path, "--ntasks-per-node=1", str(job), MASTER_PORT=str(free_port()))
    assert sorted(re.findall(r"rank \d of \d", said)) == ["rank 0 of 2", "rank 1 of 2"]


def test_an_island_that_is_killed_starts_again_and_the_job_goes_on(cluster: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "island.py"
    script.write_text(ISLAND)
    job = (str(EXAMPLES / "slurm_islands.sh"), str(script), str(tmp_path / "killed"))
    said = submit(cluster, tmp_path, *job, ISLANDS_HOST="127.0.0.1")
    assert "island 1 ended with status 137; it starts again" in said
    assert "island of seat 2 ends" in said
    assert len(re.findall(r"island of seat [01] ends", said)) == 1
