"""The meaning of torch DDP's arguments, without training."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from bagua.errors import ConfigurationError
from bagua.parallel.data_parallel import _moved
from bagua.parallel.ddp_arguments import bucket_bytes_from, buffer_policy, input_device


class Pair(NamedTuple):
    first: Any
    second: Any


META = torch.device("meta")


def test_sizes_of_buckets():
    assert bucket_bytes_from(None, None) == 25 * 2**20
    assert bucket_bytes_from(0.5, None) == 2**19
    assert bucket_bytes_from(1e-9, None) == 1
    assert bucket_bytes_from(None, 7) == 7
    with pytest.raises(ConfigurationError, match="both"):
        bucket_bytes_from(25, 7)
    for wrong in (0, -1, True, "25", float("nan")):
        with pytest.raises(ConfigurationError, match="bucket_cap_mb"):
            bucket_bytes_from(wrong, None)


def test_inputs_go_to_the_one_device_that_holds_the_module():
    module = nn.Linear(2, 2, device="meta")
    assert input_device(module, None, None) is None
    assert input_device(module, [], None) is None
    assert input_device(module, [META], None) == META
    assert input_device(module, [META], META) == META


@pytest.mark.parametrize(
    ("device_ids", "output_device", "argument"),
    [
        ([META, META], None, "device_ids"),
        ([torch.device("cpu")], None, "device_ids"),
        ([0], None, "device_ids"),
        ([META], "cpu", "output_device"),
        (None, META, "output_device"),
    ],
)
def test_other_devices_are_refused(device_ids, output_device, argument):
    with pytest.raises(ConfigurationError) as caught:
        input_device(nn.Linear(2, 2, device="meta"), device_ids, output_device)
    assert caught.value.argument == argument


def test_tensors_in_nested_inputs_are_moved():
    tensor = torch.zeros(2)
    moved = _moved(((tensor, [tensor, 3]), {"a": Pair(tensor, "text"), "b": None}), META)
    (first, (second, three)), keywords = moved
    assert {first.device, second.device, keywords["a"].first.device} == {META}
    assert (three, keywords["a"].second, keywords["b"]) == (3, "text", None)
    assert isinstance(keywords["a"], Pair)


def test_buffers():
    assert buffer_policy(True, True) == buffer_policy(None, True) == (True, True)
    assert buffer_policy(False, False) == (True, False)
    with pytest.raises(ConfigurationError, match="contradict"):
        buffer_policy(True, False)
