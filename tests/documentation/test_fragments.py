"""Python code on pages is run: as a doctest by Sphinx, here, or as a complete script that its page shows."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from tests.architecture.source_tree import REPOSITORY

DOCS = REPOSITORY / "docs"
#: Pages whose fragments are run here, in a group of one; each has the names of `surroundings`.
RUN = (
    "api/distributed",
    "save_and_resume",
    "torch_backend",
    "watch_a_run",
)
#: Pages with complete scripts, which other tests run.
WITH_SCRIPT = {
    "use_ddp": ("use_ddp",),
    "use_ray": ("use_ray", "use_ray_islands"),
    "use_torchft": ("use_torchft",),
    "use_trainers": ("use_accelerate", "use_lightning", "use_transformers"),
}
#: What needs a store that somebody serves, or processes; `tests/membership`, `utilities` and `cli` do the same.
WITH_STORE = ("train_through_a_bucket", "use_islands")
#: What needs several GPUs; `tests/integrations` does the same on the CPU.
WITH_GPUS = ("local_updates",)


def fragments(page: str) -> list[str]:
    """The blocks of Python code of a page, without the indentation of a list that they stand in."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in blocks]


def surroundings(page: str) -> dict[str, Any]:
    """What a fragment takes from the reader's script."""
    model = torch.nn.Linear(4, 1)
    names = {
        "torch": torch,
        "bagua": bagua,
        "Algorithm": Algorithm,
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.ones(2, 4), torch.zeros(2, 1))] * 3,
        "loss_function": torch.nn.functional.mse_loss,
        "folder": "checkpoint",
        "epoch": 1,
    }
    if page in ("save_and_resume", "watch_a_run"):
        bagua.init_process_group()
    if page == "save_and_resume":
        bagua.with_bagua(model, names["optimizer"], "diloco")
    return names


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    """A world of one rank that nobody has entered, and that is left behind empty."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    yield
    bagua.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.solo
@pytest.mark.parametrize("page", RUN)
def test_fragments_run_in_their_order(page, alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = surroundings(page)
    for number, fragment in enumerate(fragments(page)):
        exec(compile(fragment, f"{page}.md, fragment {number}", "exec"), names)  # it is our own text


def test_every_page_with_fragments_says_who_runs_them():
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    with_fragments = {page for page in pages if fragments(page)}
    assert with_fragments == {*RUN, *WITH_SCRIPT, *WITH_STORE, *WITH_GPUS}


@pytest.mark.parametrize("page", WITH_SCRIPT)
def test_pages_that_rely_on_a_script_show_it(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for script in WITH_SCRIPT[page]:
        assert f"```{{literalinclude}} ../examples/{script}.py" in text
        assert (REPOSITORY / "examples" / f"{script}.py").exists()


@pytest.mark.parametrize("page", [*WITH_SCRIPT, *WITH_STORE])
def test_fragments_that_are_not_run_are_python(page):
    for number, fragment in enumerate(fragments(page)):
        compile(fragment, f"{page}.md, fragment {number}", "exec")
