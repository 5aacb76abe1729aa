"""The engine: hooks into autograd and optimizers, buckets, and the schedule of their exchanges."""

from bagua.engine.access import EngineAccess, GlobalAverage
from bagua.engine.hooks import BackwardHooks
from bagua.engine.options import (
    DEFAULT_BUCKET_BYTES,
    BucketType,
    EngineOptions,
    InitOptions,
    ReducerOptions,
    SwitchOptions,
    TensorDeclaration,
    check_bucket_bytes,
    check_grad_scaler,
    check_module,
    check_optional_flag,
    optimizer_list,
    refuse_unknown,
)
from bagua.engine.reducer import Reducer
from bagua.engine.schedule.lanes import Lane, create_lane
from bagua.engine.start import begin_training, refuse_in_join, replace_engine
from bagua.engine.start import start_listeners as start_listeners
from bagua.engine.state.agreement import compare
from bagua.engine.state.agreement import meet as meet
from bagua.engine.state.checkpoints import check as check_saved_state
from bagua.engine.state.checkpoints import check_owner
from bagua.engine.state.checkpoints import name_of_rank as name_of_rank
from bagua.engine.state.replicas import (
    allreduce_optimizer_state,
    allreduce_parameters,
    broadcast_buffers_of,
    broadcast_optimizer_state,
    broadcast_parameters,
    sendable,
    take_state,
)
from bagua.engine.state.saving import Remembered, collect, merged, renamed, restore
from bagua.engine.wrapping import SWITCH as SWITCH
from bagua.engine.wrapping import Wrapping

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "BackwardHooks",
    "BucketType",
    "EngineAccess",
    "EngineOptions",
    "GlobalAverage",
    "InitOptions",
    "Lane",
    "Reducer",
    "ReducerOptions",
    "Remembered",
    "SwitchOptions",
    "TensorDeclaration",
    "Wrapping",
    "allreduce_optimizer_state",
    "allreduce_parameters",
    "begin_training",
    "broadcast_buffers_of",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_bucket_bytes",
    "check_grad_scaler",
    "check_module",
    "check_optional_flag",
    "check_owner",
    "check_saved_state",
    "collect",
    "compare",
    "create_lane",
    "merged",
    "optimizer_list",
    "refuse_in_join",
    "refuse_unknown",
    "renamed",
    "replace_engine",
    "restore",
    "sendable",
    "take_state",
]
