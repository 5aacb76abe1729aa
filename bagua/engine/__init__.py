"""The engine: hooks into autograd and optimizers, buckets, and the schedule of their exchanges."""

# mypy: implicit-reexport

# isort: off
from bagua.engine.access import EngineAccess, GlobalAverage, begin_training, refuse_in_join, replace_engine
from bagua.engine.access import start_listeners
from bagua.engine.hooks import BackwardHooks
from bagua.engine.options import DEFAULT_BUCKET_BYTES, BucketType, EngineOptions, ReducerOptions, SwitchOptions
from bagua.engine.options import TensorDeclaration, check_bucket_bytes, check_grad_scaler, check_module
from bagua.engine.options import check_optional_flag, optimizer_list, refuse_unknown
from bagua.engine.reducer import Reducer
from bagua.engine.schedule.lanes import Lane, create_lane
from bagua.engine.state.agreement import compare, meet
from bagua.engine.state.checkpoints import check_owner, check_saved_state, name_of_rank
from bagua.engine.state.replicas import allreduce_optimizer_state, allreduce_parameters, broadcast_buffers_of
from bagua.engine.state.replicas import broadcast_optimizer_state, broadcast_parameters, sendable, take_state
from bagua.engine.state.saving import Remembered, collect, merged, renamed, restore
from bagua.engine.wrapping import SWITCH, Wrapping
# isort: on
