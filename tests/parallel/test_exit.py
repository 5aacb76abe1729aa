"""Processes end by themselves after training: with or without ``destroy_process_group``, whatever is still alive."""

from __future__ import annotations

import pytest

from bagua.comm.store.serving import serve_store
from tests.parallel.scripts import start_scripts

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
    store, port = serve_store()  # Of this process, so nobody has to guess a free port.
    ranks = start_scripts(SCRIPT, endings, port, by_agent=True)
    try:
        results = [(rank.communicate(timeout=240), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    del store
    for ending, ((output, errors), returned) in zip(endings, results, strict=True):
        assert returned == (3 if ending == "raise" else 0), errors
        assert output == "trained\n"
        assert "terminate called" not in errors
