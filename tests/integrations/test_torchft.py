"""Torchft's manager with our groups: replicas that survive a kill, and its frame of a group."""

import contextlib
import re
import subprocess
import sys
import types
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import bagua.integrations.torchft as integration
from bagua.errors import ConfigurationError
from bagua.integrations.torchft import distributed_data_parallel, process_group
from tests.integrations.test_framework_examples import EXAMPLES
from tests.launching import REPOSITORY, environment

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("method", ["ddp", "local_sgd", "diloco"])
def test_a_replica_that_is_killed_in_backward_comes_back(method: str) -> None:
    coordination = pytest.importorskip("torchft.coordination", reason="needs the extra torchft")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000
    )
    command = [sys.executable, str(EXAMPLES / "use_torchft.py"), "--method", method, "--steps", "8"]
    command += ["--lighthouse", lighthouse.address()]
    here = {"cwd": REPOSITORY, "env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with contextlib.ExitStack() as stack:
        stack.callback(lighthouse.shutdown)

        def start(number: int, *options: str) -> subprocess.Popen[str]:
            process = subprocess.Popen([*command, "--replica", str(number), *options], text=True, **here)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        survivor, killed = start(0), start(1, "--die-after", "3")
        killed.communicate(timeout=240)
        assert killed.returncode == -9
        back = start(1)
        outputs = [process.communicate(timeout=240)[0] for process in (survivor, back)]
    assert (survivor.returncode, back.returncode) == (0, 0)
    ends = [re.findall(r"replica \d ends with (-?\d+\.\d+)", output) for output in outputs]
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
    together = [int(number) for number in re.findall(r"replicas (\d)", outputs[0])]
    assert {1, 2} == set(together), "it went on alone for a while"
    assert together.count(2) == 8


def test_a_group_is_made_anew_and_reports_what_was_lost() -> None:
    pytest.importorskip("torchft", reason="needs the extra torchft")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    own = process_group(timeout=timedelta(seconds=20))
    for quorum in range(2):
        if hasattr(own, "configure"):  # torchft 0.2
            own.configure(f"{address}/{quorum}", "replica", 0, 1)
        else:
            sys.modules["torchft.process_group"].reconfigure_with_store(own, f"{address}/{quorum}", 0, 1)
        tensor = torch.ones(3)
        done: list[int] = []
        own.allreduce([tensor], dist.AllreduceOptions()).get_future().then(lambda _, done=done: done.append(1))
        assert done == [1], "callbacks of complete calls run at once"
    assert own.getBackendName() == "torchft-bagua"
    own.shutdown()
    own.shutdown()


def test_backward_goes_on_when_an_allreduce_fails() -> None:
    pytest.importorskip("torchft", reason="needs the extra torchft")
    manager = types.SimpleNamespace(allreduce=Mock(return_value=types.SimpleNamespace(wait=lambda: False)))
    model = distributed_data_parallel(manager, torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert manager.allreduce.call_count == 1


def test_a_missing_package_and_another_version_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.delitem(sys.modules, "torchft.process_group", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'bagua-torch\[torchft\]'"):
        process_group()
    monkeypatch.setattr(integration, "_module", types.ModuleType)
    with pytest.raises(ConfigurationError, match=r"torchft 0\.2.*_create_pg"):
        process_group()
    with pytest.raises(ConfigurationError, match="_comm_hook"):
        distributed_data_parallel(None, torch.nn.Linear(2, 2))
