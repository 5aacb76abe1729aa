"""baguarun starts scripts as torchrun does and passes their failure on."""

import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import until
from tests.interpreters import interpreter
from tests.launching import free_port

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("forked_python")]

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*interpreter(), "-m", "bagua.cli.baguarun", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},  # the script lies elsewhere than the package
        check=False,
    )


def test_the_tutorial_learns_on_two_processes_at_least_as_much_as_on_one(capsys):
    runpy.run_path(str(REPOSITORY / "examples/spiral_one_process.py"))
    done = run("--nproc", "2", "examples/spiral.py")
    assert done.returncode == 0, done.stderr
    one, two = (float(output.rpartition("accuracy ")[2]) for output in (capsys.readouterr().out, done.stdout))
    assert two >= one > 0.9  # rank 0 alone prints


def test_a_failed_script_is_an_exit_status_and_names_the_rank(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    done = run("--nproc-per-node", "2", "--max-restarts", "0", str(script))
    assert done.returncode == 1
    assert "baguarun: rank 1 ended too early, with exit status 3" in done.stderr
    assert "torch/distributed" not in done.stderr


def test_a_start_that_fails_is_told_in_the_summary(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import bagua\nbagua.init_process_group(backend='carrier pigeon')\n")
    done = run("--nproc", "2", str(script))
    assert done.returncode == 1
    assert "failed: TransportUnavailableError: there is no backend" in done.stderr, done.stderr


def test_an_error_names_its_rank_once_on_each_line(tmp_path):
    """The start of torch puts a hook of its own around ours."""
    script = tmp_path / "fails.py"
    script.write_text("import bagua\nbagua.init_process_group()\nraise ValueError('no such file')\n")
    said = run("--nproc", "2", str(script)).stderr
    assert "[rank1]: ValueError: no such file" in said
    assert "[rank1]: [rank1]:" not in said


def test_who_waits_for_another_machine_says_so_and_hears_ctrl_c():
    port = str(free_port())
    first = f"--nnodes 2 --node-rank 0 --master-port {port} train.py"
    command = [sys.executable, "-m", "bagua.cli.baguarun", *first.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY) as waiting:
        until(lambda: _listens(int(port)))
        waiting.send_signal(signal.SIGINT)
        said = waiting.communicate(timeout=60)[1]
    assert waiting.returncode == -signal.SIGINT
    assert f"have met at 127.0.0.1:{port}" in said


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("flags", [(), ("--standalone",), ("--master-port", str(free_port()))])
def test_the_store_of_one_host_is_not_reached_from_others(flags, tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(
        "import os, socket\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], port)).close()\n"
        "try:\n"
        "    socket.create_connection(('127.0.0.2', port))\n"  # It reaches who listens on all interfaces.
        "except ConnectionRefusedError:\n"
        "    print('refused')\n"
    )
    done = run("--nproc", "2", *flags, str(script), "--nproc", "7")
    assert (done.returncode, done.stdout.split()) == (0, ["refused", "refused"]), done.stderr
