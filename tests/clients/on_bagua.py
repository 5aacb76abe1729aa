"""Runs a module or a file on the backend ``bagua``: ``torchrun ... -m tests.clients.on_bagua MODULE [ARGUMENTS]``."""

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

import bagua.torch_api

assert bagua.torch_api is not None, "the import makes the name known"
dist.init_process_group("bagua")
del sys.argv[0]
if "accelerate" in sys.argv[0]:
    from accelerate import PartialState

    # Without GPUs it takes each process for the only one, unless it is told to use CPUs.
    assert PartialState(cpu=True).num_processes == dist.get_world_size()
if Path(sys.argv[0]).exists():
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
