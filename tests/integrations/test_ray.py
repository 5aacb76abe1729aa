"""Ray Train; the example that is tested with the others runs on a local Ray."""

from __future__ import annotations

import sys

import pytest

from bagua.integrations.ray import torch_config


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    with pytest.raises(ImportError, match=r"bagua-torch\[ray\]"):
        torch_config()
