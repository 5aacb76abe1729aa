"""What the tests use of torch that older versions lack, or call by another name."""

import os
import subprocess
from types import ModuleType
from typing import Any

import pytest
import torch

#: Major and minor version of torch.
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def nccl_ranks() -> int:
    """How many ranks NCCL can connect here: one for each GPU, or several on one where it is told to."""
    return max(torch.cuda.device_count(), 2 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else 0)


def needs(what: str, found: object) -> pytest.MarkDecorator:
    """Skip a test, and say why, where torch is too old.

    Args:
        what: name of what the test uses.
        found: it, or something false where this torch lacks it.
    """
    return pytest.mark.skipif(not found, reason=f"torch {torch.__version__} has no {what}")


def leave_out_what_gloo_prints() -> None:
    """Have tests see what their processes print, but not what Gloo adds about its connections in old versions."""
    communicate = subprocess.Popen.communicate

    def without_gloo(self: subprocess.Popen[Any], *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        output, errors = communicate(self, *arguments, **keywords)
        if isinstance(output, str):
            output = "".join(line for line in output.splitlines(keepends=True) if "[Gloo] Rank" not in line)
        return output, errors

    if TORCH < (2, 13):
        subprocess.Popen.communicate = without_gloo  # type: ignore[method-assign]


def renamed(module: ModuleType, name: str, before: str) -> Any:
    """What ``module`` has under ``name``, or in an older torch under the name ``before``."""
    return getattr(module, name, None) or getattr(module, before)
