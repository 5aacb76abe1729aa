"""Options that do not exist, or have another type. mypy finds each: an ignore that is not needed is an error."""

import torch

import bagua.torch_api as bagua
from bagua.parallel import DistributedDataParallel, ModelSwitchWrapper, OverlappingWrapper, bagua_init
from bagua.parallel.module import with_bagua

layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
tensor = torch.ones(2)

bagua_init(layer, optimizer, "async", find_unused_parameters=True)
bagua_init(layer, optimizer, find_unused_parameter=True)  # type: ignore[call-arg]
bagua_init(layer, optimizer, bucket_bytes="many")  # type: ignore[arg-type]

ModelSwitchWrapper(layer, optimizer, chunking=True, bucket_bytes=1000)
ModelSwitchWrapper(layer, optimizer, chunk=True)  # type: ignore[call-arg]

OverlappingWrapper(layer, optimizer, algorithm="bytegrad")
OverlappingWrapper(layer, optimizer, algoritm="bytegrad")  # type: ignore[call-arg]

with_bagua(layer, optimizer, "bytegrad", bucket_bytes=1000)
with_bagua(layer, optimizer, "bytegrad", bucket_byte=1000)  # type: ignore[arg-type]

model: torch.nn.Linear = bagua.with_bagua(layer, optimizer)  # The class of the module stays.
bagua.with_bagua(layer, optimizer, "bytegrad", check_every=10)
bagua.with_bagua(layer, optimizer, "bytegrad", check_every="now")  # type: ignore[arg-type]
if isinstance(model, bagua.BaguaModule):
    model.bagua_close()
    model.bagua_step()  # type: ignore[operator]

DistributedDataParallel(layer, optimizers=optimizer, static_graph=True)
DistributedDataParallel(layer, optimizer=optimizer)  # type: ignore[arg-type]

bagua.allreduce(tensor, async_op=True, timeout=3.0)
bagua.allreduce(tensor, asynchronous=True)  # type: ignore[call-arg]
bagua.broadcast(tensor, timeout="long")  # type: ignore[arg-type]
