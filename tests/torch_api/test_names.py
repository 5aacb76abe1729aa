"""The documented names exist, with their signatures; stubs are true; names of the original say what replaces them."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import bagua.torch_api
from bagua.comm import functional
from bagua.engine.options import ReducerOptions, SwitchOptions
from bagua.engine.reducer import Reducer
from bagua.torch_api import DistributedAlgorithm

#: Name, and its arguments with their defaults; what follows them must be keyword-only.
_SIGNATURES = """
communication.allreduce(tensor, op=RedOpType.SUM, comm=None)
communication.broadcast(tensor, root=0, comm=None)
communication.reduce(tensor, dst, op=RedOpType.SUM, comm=None)
communication.init_process_group()
distributed.DistributedModule(module)
distributed.Reducer(module, optimizers, bucket_type, hierarchical_reduce, align_bytes, chunking, fusion,
    decentralize_reduce=False, buckets=[])
distributed.Reducer.add_param(self, param)
distributed.Reducer.initialize_buckets(self)
distributed.Reducer.register_bagua_buckets(self)
distributed.Reducer.fill_slot(self, param)
distributed.Reducer.mark_tensor_ready(self, param)
distributed.Reducer.mark_bucket_ready(self, bucket, bucket_idx=None)
distributed.Reducer.mark_on_complete(self)
distributed.OverlappingWrapper(module, optimizers, delay_reduce=False, bucket_type=BucketType.Gradient,
    hierarchical_reduce=False, decentralize_reduce=False, parameter_manager=None, align_bytes=8, chunking=False,
    fusion=True)
distributed.OverlappingWrapper.create_hooks(self)
distributed.OverlappingWrapper.reset_reducer(self, hierarchical_reduce=None, buckets=None)
distributed.ModelSwitchWrapper(module, optimizer, broadcast_buffers=True, delay_reduce=False,
    hierarchical_reduce=None, message_size=10000000, intra_comm_root_rank=0)
distributed.ModelSwitchWrapper.switch_to(self, distributed_algorithm)
distributed.ModelSwitchWrapper.report_metrics(self, score_record_list)
distributed.ModelSwitchWrapper.ask_and_update_hyperparameters(self)
distributed.broadcast_parameters(module, broadcast_buffers=True)
distributed.allreduce_parameters(module)
distributed.bagua_init(module, optimizer, distributed_algorithm=DistributedAlgorithm.GradientAllReduce,
    broadcast_buffers=True, delay_reduce=False, hierarchical_reduce=None, message_size=10000000)
algorithms.gradient_allreduce.GradientAllReduceAlgorithm(hierarchical=False, average=True)
distributed.DistributedModule.unwrap(self)
distributed.DistributedModule.forward(self)
distributed.OverlappingWrapper.forward(self)
distributed.ModelSwitchWrapper.forward(self)
distributed.ModelSwitchWrapper.state_dict(self)
algorithms.async_model_average.AsyncModelAverageAlgorithm(peer_selection_mode='all', sync_interval_ms=500,
    warmup_steps=0)
algorithms.async_model_average.AsyncModelAverageAlgorithmImpl(process_group, peer_selection_mode='all',
    sync_interval_ms=500, warmup_steps=0)
algorithms.async_model_average.AsyncModelAverageAlgorithmImpl.abort(self, bagua_module)
algorithms.async_model_average.AsyncModelAverageAlgorithmImpl.resume(self, bagua_module)
data_parallel.DecentralizedDataParallel(model, optim_fn, lr_scheduler_fn=None, topology='complete', scaler=None,
    grad_clip_norm=0.0, param_as_bucket_view=True, sync_buffer_in_global_avg=False, bucket_size_in_mb=25,
    _local_world_size=None)
data_parallel.DecentralizedDataParallel.set_accumulate_grad(self, enable=True)
data_parallel.DecentralizedDataParallel.train(self, mode=True)
data_parallel.DecentralizedDataParallel.eval(self)
data_parallel.DecentralizedDataParallel.forward(self)
data_parallel.DecentralizedDataParallel.parameters(self, recurse=True)
data_parallel.DecentralizedDataParallel.named_parameters(self, prefix='', recurse=True, remove_duplicate=True)
utilities.register_ddp_comm_hook(model, ddp_comm_state=None, ddp_comm_hook=None, ddp_comm_wrapper=None)
utilities.all_gather_ddp_if_available(tensor, group=None, sync_grads=False)
utilities.distributed_available()
utilities.gather_all_tensors(result, group=None)
utilities.get_default_process_group_backend_for_device(device)
utilities.init_dist_connection(cluster_environment, torch_distributed_backend, global_rank=None, world_size=None)
utilities.sync_ddp(result, group=None, reduce_op=None)
utilities.sync_ddp_if_available(result, group=None, reduce_op=None)
utilities.tpu_distributed()
utilities.AllGatherGrad.forward(ctx, tensor, group=None)
"""
DOCUMENTED = dict(re.findall(r"^(.+?)\((.*)\)$", re.sub(r"\n +", " ", _SIGNATURES), re.MULTILINE))


def _resolve(dotted: str) -> object:
    return pkgutil.resolve_name(f"bagua.torch_api.{dotted}".replace("torch_api.utilities.", "utilities.distributed."))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_signatures_are_the_documented_ones(name):
    parameters = inspect.signature(_resolve(name)).parameters.values()
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY)]
    text = ", ".join(str(one.replace(annotation=one.empty)) for one in positional)
    assert re.sub(r"<(\w+\.\w+): [^>]+>", r"\1", text) == DOCUMENTED[name]  # Members of enums, without their values.


def test_with_bagua_is_on_every_module_as_documented():
    parameters = inspect.signature(nn.Module.with_bagua).parameters
    assert list(parameters)[:5] == ["self", "optimizers", "algorithm", "process_group", "do_flatten"]
    assert parameters["process_group"].default is None
    assert parameters["do_flatten"].default is True


#: By module below ``bagua.torch_api``: names of this project, and those that it has from the original Bagua.
NAMES = {
    "": """allreduce broadcast reduce send recv sendrecv barrier allreduce_coalesced broadcast_coalesced
        broadcast_object allgather_object gather_object scatter_object
        init_process_group destroy_process_group is_initialized new_group from_torch_group
        get_default_group get_rank get_world_size get_local_rank get_local_size get_node_rank
        ReduceOp bagua_init DistributedAlgorithm BaguaModule communication algorithms data_parallel distributed
        env""",
    "communication": """init_process_group allreduce broadcast reduce is_initialized new_group from_torch_group
        NON_MEMBER BaguaProcessGroup BaguaSingleCommunicatorPy""",
    "distributed": """DistributedModule Reducer OverlappingWrapper ModelSwitchWrapper broadcast_parameters
        allreduce_parameters bagua_init BucketType DistributedAlgorithm BaguaModule""",
    "distributed_define": "BucketType TensorDeclaration",
    "data_parallel": """DistributedDataParallel DecentralizedDataParallel OPTIM_FN_TYPE LR_SCHEDULER_FN_TYPE""",
    "algorithms": """Algorithm AlgorithmImpl GlobalAlgorithmRegistry gradient_allreduce bytegrad decentralized q_adam
        async_model_average base""",
    "algorithms.async_model_average": "AsyncModelAverageAlgorithm AsyncModelAverageAlgorithmImpl",
    "algorithms.base": "Algorithm AlgorithmImpl GlobalAlgorithmRegistry",
    "algorithms.bytegrad": "ByteGradAlgorithm ByteGradAlgorithmImpl",
    "algorithms.decentralized": """DecentralizedAlgorithm DecentralizedAlgorithmImpl LowPrecisionDecentralizedAlgorithm
        LowPrecisionDecentralizedAlgorithmImpl""",
    "algorithms.gradient_allreduce": "GradientAllReduceAlgorithm GradientAllReduceAlgorithmImpl",
    "algorithms.power_sgd": "PowerSGDAlgorithm PowerSGDAlgorithmImpl",
    "algorithms.q_adam": "QAdamAlgorithm QAdamAlgorithmImpl QAdamOptimizer",
    "algorithms.scatter_gather": "ScatterGatherAllReduceAlgorithm ScatterGatherAllReduceAlgorithmImpl",
    "algorithms.sign_sgd": "SignSGDAlgorithm SignSGDAlgorithmImpl",
    "algorithms.top_k": "TopKAlgorithm TopKAlgorithmImpl",
    "env": "get_rank get_world_size get_local_rank get_local_size get_node_rank",
    "exceptions": "UnsupportedAlgorithmException RepeatedInitializationError",
}


@pytest.mark.parametrize("module", NAMES)
def test_documented_names_can_be_imported_from_their_documented_place(module):
    place = importlib.import_module(".".join(part for part in ("bagua.torch_api", module) if part))
    for name in NAMES[module].split():
        assert hasattr(place, name), name
        assert name in place.__all__, name


def test_documented_attributes_are_there():
    classes = {
        "distributed.Reducer": "initialized bucket_initialized",
        "distributed.BucketType": "Gradient Weight Param",
        "data_parallel.DecentralizedDataParallel": "global_avg FLOAT_DTYPES",
        "algorithms.Algorithm": "reify init",
        "utilities.rank_zero_only": "rank",
    }
    for name, attributes in classes.items():
        assert not [one for one in attributes.split() if not hasattr(_resolve(name), one)], name


def test_documented_bases():
    algorithms = _resolve("algorithms")
    for name in ("AsyncModelAverageAlgorithm", "AsyncModelAverageAlgorithmImpl"):
        base = algorithms.AlgorithmImpl if name.endswith("Impl") else algorithms.Algorithm
        assert issubclass(_resolve(f"algorithms.async_model_average.{name}"), base)
    for name in ("OverlappingWrapper", "ModelSwitchWrapper"):
        assert issubclass(_resolve(f"distributed.{name}"), nn.Module)
    assert issubclass(_resolve("data_parallel.DecentralizedDataParallel"), nn.Module)
    assert issubclass(bagua.torch_api.exceptions.RepeatedInitializationError, RuntimeError)


def test_distributed_algorithm_has_the_documented_members():
    assert {member.name: member.value for member in DistributedAlgorithm}.items() >= {
        "GradientAllReduce": "allreduce",
        "ScatterGatherAllReduce": "sg-allreduce",
        "Decentralize": "decentralize",
        "QuantizeAllReduce": "quantize",
    }.items()


def test_the_import_pulls_in_nothing_heavy():
    heavy = ("torch._dynamo", "torch.distributed.algorithms", "torch.distributed.fsdp", "torch.distributed.rpc",
             "torch._inductor", "sympy", "torch.nn.parallel.distributed")  # fmt: skip
    code = f"""
import sys, torch
before = set(sys.modules)
import bagua.torch_api
new = set(sys.modules) - before
print([name for name in {heavy!r} if any(m == name or m.startswith(name + ".") for m in new)])
print([name for name in new if not name.startswith(("bagua", "torch", "typing", "_"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    ours, others = done.stdout.splitlines()
    assert ours == "[]"
    assert len(eval(others)) < 15, others


def test_local_rank_is_known_before_initialization(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (bagua.torch_api.get_local_rank(), bagua.torch_api.is_initialized()) == (3, False)


PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
REPLACED = (
    "get_communicator bagua_patch _get_default_group BaguaCommBackendPy gen_nccl_unique_id "
    "data_parallel.functional.all_reduce bagua_module_name bagua_build_params bagua_train_step_counter "
    "parameters_to_ignore bagua_autotune_client bagua_ddp to_bagua_process_group BaguaTensor BaguaBucket "
    "bagua.torch_api.utils BaguaHyperparameter AutotuneService bagua.torch_api.checkpoint fuse_optimizer "
    "bagua.distributed.run get_autotune_* get_bagua_service_port find_free_network_port get_default_bucket_size "
    "get_backend allreduce_inplace allreduce_coalesced_inplace reduce_inplace allgather gather scatter reduce_scatter "
    "alltoall alltoall_v contrib.LoadBalancingDistributedSampler contrib.CacheLoader "
    "get_master_addr is_report_metrics_switch_on show_version bagua_sys_perf --bagua_service_port"
)


def test_names_that_something_else_replaces() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## The original Bagua\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    replaced = [name for row in rows if row[2].strip() for name in re.findall(r"`([^`]+)`", row[1])]
    for name in REPLACED.split():
        assert any(re.search(rf"(^|\W){re.escape(name)}(\W|$)", known) for known in replaced), name


# Collectives work in place; those of Bagua 0.9 with another order are not there.
@pytest.mark.parametrize("name", ["allgather", "alltoall", "scatter"])
def test_a_name_with_another_order_says_where_it_is(name) -> None:
    with pytest.raises(AttributeError, match=rf"bagua\.comm\.{name} has it"):
        getattr(bagua.torch_api, name)


def parameters(name: str) -> list[tuple[str, str, bool, bool]]:
    """Name and type of each parameter, whether it has a default, and whether it needs its name."""
    return [
        (one.name, one.annotation, one.default is not one.empty, one.kind is one.KEYWORD_ONLY)
        for one in inspect.signature(getattr(functional, name)).parameters.values()
    ]


def parameters_told(node: ast.FunctionDef) -> list[tuple[str, str, bool, bool]]:
    """The same, as the stub has it."""
    positional, options = node.args.args, node.args.kwonlyargs
    without = len(positional) - len(node.args.defaults)
    return [
        *((one.arg, ast.unparse(one.annotation), number >= without, False) for number, one in enumerate(positional)),
        *((one.arg, ast.unparse(one.annotation), True, True) for one in options),
    ]


def test_the_stub_has_each_function_with_its_parameters():
    stub = ast.parse(Path(functional.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    told = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    made = {name for name, value in vars(functional).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert set(told) == made - {"communicator_of", "default_communicator"}
    assert len(told) == 19
    for name, node in told.items():
        assert parameters_told(node) == parameters(name), name
        assert ast.unparse(node.returns) == inspect.signature(getattr(functional, name)).return_annotation


def test_options_of_reducers_are_their_keywords():
    parameters = inspect.signature(Reducer).parameters
    known = {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    # Whoever passes options on names delay_reduce by itself.
    assert set(ReducerOptions.__annotations__) == (known | {"buckets"}) - {"delay_reduce"}
    assert set(SwitchOptions.__annotations__) <= set(parameters)
