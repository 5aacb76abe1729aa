"""The demo's data: the source of Python's standard library, as bytes."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Test suites are packaged separately by some distributions; without them every machine sees much the same text.
SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes of other files, held out.

    Args:
        training: uint8, shape ``[n]``.
        held_out: uint8, shape ``[m]``, from files of which nothing is in ``training``.
        files: how many files were read.
    """

    training: Tensor
    held_out: Tensor
    files: int


def read_standard_library(folder: Path | None = None) -> Text:
    """Read all Python files below ``folder`` in the order of their names; every tenth is held out.

    Args:
        folder: folder to read; the running interpreter's standard library when None.

    Returns:
        The bytes, the same on every rank of one machine.

    Raises:
        FileNotFoundError: there are fewer than ten Python files in ``folder``.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = sorted(
        path for path in root.rglob("*.py") if not SKIPPED_DIRECTORIES & set(path.relative_to(root).parts[:-1])
    )
    if len(paths) < HELD_OUT_EVERY:
        raise FileNotFoundError(f"the demo trains on the Python files in {root}, but found {len(paths)} there")
    held_out = paths[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [path for index, path in enumerate(paths, start=1) if index % HELD_OUT_EVERY]
    return Text(as_tensor(training), as_tensor(held_out), len(paths))


def as_tensor(paths: list[Path]) -> Tensor:
    """The files' bytes, one after the other, as one uint8 tensor."""
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cut one window of ``context`` bytes at each start, and the same window one byte later.

    Args:
        text: uint8, shape ``[n]``.
        starts: int64, shape ``[batch]``, each at most ``n - context - 1``.
        context: bytes in a window.

    Returns:
        Inputs and targets, int64, both of shape ``[batch, context]``.
    """
    positions = starts[:, None] + torch.arange(context + 1)
    piece = text[positions].long()
    return piece[:, :-1], piece[:, 1:]


def batch(text: Tensor, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw ``size`` windows at random places; see :func:`windows` for what comes back."""
    starts = torch.randint(len(text) - context, (size,), generator=generator)
    return windows(text, starts, context)
