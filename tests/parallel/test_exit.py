"""Processes end by themselves after training: with or without ``destroy_process_group``, whatever is still alive."""

from __future__ import annotations

import subprocess

import pytest

from tests.launching import PATIENCE_S, launched

pytestmark = pytest.mark.gloo

SCRIPT = """
import sys
import torch
import bagua.torch_api as bagua

bagua.init_process_group()
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
kept = []
for wrap in (
    lambda: bagua.bagua_init(model, [], message_size=1000)[0],
    lambda: bagua.data_parallel.DistributedDataParallel(model, bucket_bytes=1000),
    lambda: model.with_bagua([], "gradient_allreduce", bucket_bytes=1000),
):
    wrapped = wrap()
    kept.append(wrapped)
    for step in range(3):
        model.zero_grad()
        wrapped(torch.randn(4, 8)).sum().backward()
        with torch.no_grad():  # An optimizer would import half of torch at its first step.
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
if sys.argv[1] == "destroy":
    bagua.destroy_process_group()
print("trained", flush=True)
if sys.argv[1] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("endings", [("nothing", "destroy"), ("raise", "nothing")], ids=str)
def test_the_exit_code_is_the_scripts(endings):
    with launched(2, "-c", SCRIPT, each=endings, stderr=subprocess.PIPE) as ranks:
        results = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    for rank, ending, (output, errors) in zip(ranks, endings, results, strict=True):
        assert rank.returncode == (3 if ending == "raise" else 0), errors
        assert output == "trained\n"
        assert "terminate called" not in errors
