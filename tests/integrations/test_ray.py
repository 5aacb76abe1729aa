"""Ray Train; the example that is tested with the others runs on a local Ray."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from bagua.errors import ConfigurationError
from bagua.integrations.ray import torch_config


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    with pytest.raises(ImportError, match=r"bagua-torch\[ray\]"):
        torch_config()


@dataclasses.dataclass
class ConfigOfRay:
    """What this integration needs of Ray's ``TorchConfig``."""

    timeout_s: int = 1800
    backend_cls = object


@pytest.mark.parametrize(("asked_s", "of_ray"), [(1800.0, 1800), (0.5, 1), (1.2, 2), (float("inf"), 365 * 24 * 3600)])
def test_ray_never_gets_less_time_than_was_asked_for(monkeypatch, asked_s, of_ray):
    monkeypatch.setitem(sys.modules, "ray.train.torch", types.SimpleNamespace(TorchConfig=ConfigOfRay))
    assert torch_config(timeout_s=asked_s).timeout_s == of_ray


def test_no_time_at_all_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train.torch", types.SimpleNamespace(TorchConfig=ConfigOfRay))
    with pytest.raises(ConfigurationError, match="timeout_s"):
        torch_config(timeout_s=0)
