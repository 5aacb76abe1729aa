"""What pages show is true, and the Python code on them runs."""

import difflib
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from bagua.algorithms import registry
from bagua.torch_api.algorithms import Algorithm
from tests.launching import REPOSITORY, free_port

DOCS = REPOSITORY / "docs"
#: Pages whose fragments are run here, in a group of one; each has the names of `surroundings`.
RUN = ("api/distributed", "save_and_resume", "torch_backend", "watch_a_run")
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
        "torch": torch, "bagua": bagua, "Algorithm": Algorithm, "model": model, "folder": "checkpoint", "epoch": 1,
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.ones(2, 4), torch.zeros(2, 1))] * 3, "loss_function": torch.nn.functional.mse_loss,
    }  # fmt: skip
    if page in ("save_and_resume", "watch_a_run"):
        bagua.init_process_group()
    if page == "save_and_resume":
        bagua.with_bagua(model, names["optimizer"], "diloco")
    return names


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    """A world of one rank that nobody has entered, and that is left behind empty."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
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


PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
MOST_COLUMNS = 80
FENCE = re.compile(r"^( *)(`{3,})(.*)$")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def code_lines(text: str) -> list[str]:
    """The lines of all code blocks of a page, without those of directives that show no code."""
    lines, fence, shown = [], None, False
    for line in text.splitlines():
        found = FENCE.match(line)
        if found and fence is None:
            indent, fence, kind = found.groups()
            shown = not kind.startswith("{") or kind.startswith("{doctest}")
        elif found and found[2] == fence and not found[3]:
            fence = None
        elif fence is not None and shown:
            lines.append(line.removeprefix(indent))
    return lines


def anchors(page: Path) -> set[str]:
    """The names by which links find the headings of a page."""
    headings = re.findall(r"^#{1,3} (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    dead = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if ":" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            dead.append(link)
    return dead


def extension(name: str, needs: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip(needs)
    monkeypatch.syspath_prepend(str(DOCS / "extensions"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_code_fits_its_column_and_relative_links_lead_to_files(page):
    assert [line for line in code_lines(page.read_text(encoding="utf-8")) if len(line) > MOST_COLUMNS] == []
    assert dead_links(page) == []


def test_examples_that_pages_show_fit_their_column():
    texts = {path: path.read_text(encoding="utf-8") for path in (REPOSITORY / "examples").iterdir() if path.is_file()}
    assert len(texts) > 7
    lines = [(path.name, line) for path, text in texts.items() for line in text.splitlines()]
    assert [(name, line) for name, line in lines if len(line) > MOST_COLUMNS] == []


def test_a_wide_line_is_seen():
    wide = "x" * 81
    page = f"{wide}\n```python\n{wide}\n```\n  ```{{doctest}}\n  >>> 1\n  ```\n```{{math}}\n{wide}\n```\n"
    assert code_lines(page) == [wide, ">>> 1"]


def test_a_dead_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    links = "[a](page.md#at-top) [b](https://example.org/x) [c](#here) [d](gone.md) ![e](gone.svg)"
    page.write_text(f"## At `top`\n{links}")
    assert dead_links(page) == ["#here", "gone.md", "gone.svg"]


def test_every_page_is_in_the_menu():
    # Pages of folders come in by a pattern.
    menu = (DOCS / "index.md").read_text(encoding="utf-8").splitlines()
    assert [page.stem for page in DOCS.glob("*.md") if page.stem not in menu and page.stem != "index"] == []


def test_readme_shows_the_difference_of_the_two_scripts():
    (block,) = re.findall(r"^```diff\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    before, after = (
        (REPOSITORY / "examples" / name).read_text().partition('"""\n\n')[2].splitlines()
        for name in ("spiral_one_process.py", "spiral.py")
    )
    changed = list(difflib.unified_diff(before, after, lineterm=""))[2:]
    shown, made = ([line for line in lines if line[:1] in ("+", "-")] for lines in (block.splitlines(), changed))
    assert shown == made


@pytest.mark.parametrize("name", list(registry))
def test_every_algorithm_has_a_row_and_a_section_with_its_rule(name):
    pages = [DOCS / f"{page}.md" for page in ("gradient_algorithms", "local_updates", "decentralized")]
    text = "\n## ".join(page.read_text(encoding="utf-8") for page in pages)
    (section,) = re.findall(rf"^## {name}\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    options = f"**Options.** {{py:class}}`bagua.algorithms.{registry.get(name).__name__}`"
    assert all(part in section for part in ("**Use it when**", "```{math}", options, "**Source.**"))
    assert re.search(rf"^\| \[`{name}`\]\(\w+\.md#{name}\) \|", (DOCS / "algorithms.md").read_text(), re.MULTILINE)


def test_a_timeline_has_a_bar_for_each_part(monkeypatch):
    timelines = extension("timelines", "docutils", monkeypatch)
    picture = timelines.draw("A <step>", ["rank 0: forward 0 3, wait 3 4", "network: bucket 0 1 2.5"])
    assert picture.count("<rect") == 3
    assert all(part in picture for part in ("bucket 0</text>", "A &lt;step&gt;"))


@pytest.mark.parametrize("line", ["no colon", "rank 0: forward 3 3", "rank 0: 1 2", "rank 0: forward 1 x"])
def test_a_lane_that_cannot_be_drawn_is_refused(line, monkeypatch):
    timelines = extension("timelines", "docutils", monkeypatch)
    with pytest.raises(ValueError, match=r"lane|bar|float"):
        timelines.read_lane(line)


def test_a_formula_becomes_mathml(monkeypatch):
    formulas = extension("mathml", "sphinx", monkeypatch)
    assert "<mi>x</mi>" in formulas.convert("x", block=False)
    lines = formulas.convert(r"x &= 1, \dots, 3 \\ y &= \text{10 \% of } x", block=True)
    assert lines.count("<mtr>") == 2
    assert "<mtext>10 % of </mtext>" in lines.replace("\N{NO-BREAK SPACE}", " ")
    with pytest.raises(Exception, match=r"unheard.*in the formula"):
        formulas.convert(r"\unheard", block=False)
