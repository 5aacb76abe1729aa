"""Which parameters of a module are trained together, whether that is still so, and which optimizers step them.

And which tensors are in what a module returns.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import torch

from bagua.algorithms import Algorithm, Model
from bagua.errors import ConfigurationError, InvalidTensorError

_log = logging.getLogger("bagua")
_requires_grad = operator.attrgetter("requires_grad")

_SHARDED = (
    "FSDP exchanges the gradients of what it shards. Give it the plain module; between replicas of a sharded model, "
    "use exchange_shards of bagua.integrations.fsdp, or for gradients register_fsdp_hook of ddp_comm_hooks there."
)


_ASSIGNED = " (load_state_dict(assign=True)?)"


class _Place(NamedTuple):
    """Where a module keeps a parameter, or a submodule; tied ones have several places."""

    table: dict[str, Any]
    key: str
    name: str
    held: torch.nn.Parameter | torch.nn.Module


def ignored_names(module: torch.nn.Module) -> frozenset[str]:
    """Names of parameters and buffers that ``module`` asks to leave alone, as torch's DDP does it."""
    names: set[str] = set()
    for attribute in ("_ddp_params_and_buffers_to_ignore", "_bagua_params_and_buffers_to_ignore"):
        names.update(getattr(module, attribute, ()))
    return frozenset(names)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of ``module`` by name, without those that it asks to leave alone."""
    ignored = ignored_names(module)
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def floating_buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those of ``buffers_of`` that have a mean."""
    floating = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return {name: buffer for name, buffer in buffers_of(module).items() if buffer.dtype in floating}


class Registration:
    """The trainable parameters of a module, as they were at one moment.

    Attributes:
        names: names of the trainable parameters, in the module's order.
        parameters: parameters in the same order; tied ones once, under their first name.
        every: names and parameters, with the frozen ones.
        facts: one line for each parameter and buffer: what all ranks must have in common.

    Raises:
        InvalidTensorError: a parameter that cannot be trained together: sparse gradients,
            uninitialized, or not an ordinary dense tensor.
        ConfigurationError: torch's ``DistributedDataParallel`` exchanges some of them already.

    Example:
        >>> Registration(torch.nn.Linear(2, 2)).names
        ('weight', 'bias')
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._ignored = ignored = ignored_names(module)
        _refuse_modules(module, ignored)
        every = [(name, p) for name, p in module.named_parameters() if name not in ignored]
        trained = [(name, _checked(name, p)) for name, p in every if p.requires_grad]
        self.names = tuple(name for name, _ in trained)
        self.parameters = tuple(parameter for _, parameter in trained)
        self._ids = frozenset(map(id, self.parameters))
        self.every, self._all = every, [parameter for _, parameter in every]
        self._flags = [parameter.requires_grad for parameter in self._all]
        self.facts = [
            *(
                f"parameter {name}: shape {list(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}"
                for name, p in every
            ),
            *(
                f"buffer {name}: shape {list(b.shape)}, {b.dtype}"
                for name, b in module.named_buffers()
                if name not in ignored
            ),
        ]
        self._remember_places()
        self.remember_storages()

    def __contains__(self, tensor: object) -> bool:
        """Whether ``tensor`` itself is one of the trainable parameters."""
        return id(tensor) in self._ids

    def _remember_places(self) -> None:
        self._places: list[_Place] = []
        self._tables: list[dict[str, Any]] = []
        for prefix, submodule in self._module.named_modules():
            # The tables themselves: looking into them costs a tenth of asking the module.
            tables = vars(submodule)["_parameters"], vars(submodule)["_modules"]
            self._tables += tables
            for table in tables:
                for key, held in table.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if held is not None and name not in self._ignored:
                        self._places.append(_Place(table, key, name, held))
        self._sizes = list(map(len, self._tables))
        self._filled = [table for table in self._tables if table]
        self._contents = list(self._held_now())

    def _held_now(self) -> Iterable[Any]:
        """What the tables hold that held something, in their order."""
        return chain.from_iterable(map(dict.values, self._filled))

    def remember_storages(self) -> None:
        """Take the present storages of the parameters as the right ones."""
        self._pointers = [parameter.data_ptr() for parameter in self.parameters]
        self._numels = list(map(torch.Tensor.numel, self.parameters))
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._dtypes = [parameter.dtype for parameter in self.parameters]

    def trained_now(self) -> list[torch.Tensor]:
        """The trainable parameters that the module has now, in its order; tied ones each time."""
        found = (place.table.get(place.key) for place in self._places)
        return [one for one in found if isinstance(one, torch.Tensor) and one.requires_grad]

    @property
    def versions(self) -> list[int]:
        """How often each trainable parameter was changed in place."""
        return [parameter._version for parameter in self.parameters]  # noqa: SLF001 - torch documents it

    def kept_by(self, later: Registration) -> dict[str, str]:
        """The parameters of which ``later`` has the same object in the same shape: the name here, and the one there.

        One that is frozen by then is still there.
        """
        there = {id(parameter): name for name, parameter in later.every}
        return {
            name: there[id(parameter)]
            for name, parameter, shape in zip(self.names, self.parameters, self._shapes, strict=True)
            if id(parameter) in there and parameter.shape == shape
        }

    @property
    def flags_are_kept(self) -> bool:
        """Whether the same parameters are trainable as at registration."""
        return list(map(_requires_grad, self._all)) == self._flags

    def difference(self) -> str | None:
        """The first thing that has changed since registration, or None. Costs about 0.2 us per parameter."""
        if (
            self.flags_are_kept
            and list(map(torch.Tensor.data_ptr, self.parameters)) == self._pointers
            and list(map(torch.Tensor.numel, self.parameters)) == self._numels
            and list(map(len, self._tables)) == self._sizes
            and all(map(operator.is_, self._held_now(), self._contents))
        ):
            return None
        if self._are_borrowed() or not self._has_changed():
            return None
        return self._explained()

    def refuse_change(self) -> None:
        """A backward pass begins, and no forward pass gave the chance to take in what has changed.

        Raises:
            ConfigurationError: something has, and gradients would be missed. What is frozen for a while has none.
        """
        change = self.difference()
        frozen = (before and not one.requires_grad for one, before in zip(self._all, self._flags, strict=True))
        if change is not None and not any(frozen):
            raise ConfigurationError(
                f"{change}, and the backward pass began without a forward pass of the model",
                argument="model",
                expected="a call of the model itself after it has changed",
                seen="a method of it, or of a part",
                advice="Call model(...) on all ranks in the first step after the change, or wrap the model again.",
            )

    def refuse_other_devices(self, served: Collection[str]) -> None:
        """Check that the parameters are where they can be exchanged.

        Args:
            served: types of devices.

        Raises:
            InvalidTensorError: naming the first one that is not.
        """
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.device.type not in served:
                raise InvalidTensorError(
                    f"parameter {name} is on a device whose tensors this process group cannot exchange",
                    argument="module",
                    expected=f"parameters on {' or '.join(sorted(served))}",
                    seen=parameter.device,
                    advice="Move the module before you wrap it, or initialize with another backend.",
                )

    def _are_borrowed(self) -> bool:
        """Whether ``torch.func.functional_call`` has put plain tensors in the places of parameters, for one call."""
        held = (place.table.get(place.key) for place in self._places)
        return any(isinstance(one, torch.Tensor) and not isinstance(one, torch.nn.Parameter) for one in held)

    def _has_changed(self) -> bool:
        """The slow look: submodules without parameters may come and go."""
        found = [parameter for name, parameter in self._module.named_parameters() if name not in self._ignored]
        flags = [parameter.requires_grad for parameter in found]
        if list(map(id, found)) != list(map(id, self._all)) or flags != self._flags or self._data_explained():
            return True
        self._remember_places()
        return False

    def _explained(self) -> str:
        for place in self._places:
            if place.table.get(place.key) is not place.held:
                kind = "module" if isinstance(place.held, torch.nn.Module) else "tensor"
                return f"{place.name} is another {kind} now{'' if kind == 'module' else _ASSIGNED}"
        for (name, parameter), flag in zip(self.every, self._flags, strict=True):
            if parameter.requires_grad != flag:
                return f"{name} was {'frozen' if flag else 'unfrozen'}"
        return self._data_explained() or "parameters or submodules were added or removed"

    def _data_explained(self) -> str:
        for name, parameter, dtype in zip(self.names, self.parameters, self._dtypes, strict=True):
            if parameter.dtype != dtype:
                return f"{name} was {dtype} and is {parameter.dtype} now"
        held = zip(self.names, self.parameters, self._pointers, self._numels, strict=True)
        for name, parameter, pointer, numel in held:
            if parameter.data_ptr() != pointer:
                return f"the data of {name} lies elsewhere now"
            if parameter.numel() != numel:  # The memory may be the same.
                return f"{name} had {numel} elements and has {parameter.numel()} now"
        return ""


def _checked(name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if torch.nn.parameter.is_lazy(parameter):
        problem, seen = "has no shape yet; run a forward pass first", "an uninitialized parameter"
    elif parameter.layout is not torch.strided:
        problem, seen = "is not dense", str(parameter.layout)
    elif parameter.device.type == "meta":
        problem, seen = "has no memory; materialize the module first", "device meta"
    elif type(parameter.data) is not torch.Tensor:
        problem, seen = "is not an ordinary tensor", type(parameter.data).__name__
    elif getattr(parameter, "_is_flat_param", False):
        problem, seen = "is one of FSDP", "FlatParameter"
    else:
        return parameter
    raise InvalidTensorError(
        f"parameter {name} {problem}",
        argument="module",
        expected="dense parameters",
        seen=seen,
        advice=_SHARDED if seen in {"DTensor", "FlatParameter"} else "",
    )


def _refuse_modules(module: torch.nn.Module, ignored: frozenset[str]) -> None:
    """Refuse gradients that somebody else exchanges, or that fit into no bucket."""
    for prefix, submodule in module.named_modules():
        if hasattr(type(submodule), "set_all_reduce_hook"):  # Of FSDP2, which puts its class before the user's.
            raise InvalidTensorError(
                "fully_shard has sharded this module",
                argument="module",
                expected="dense parameters",
                seen=prefix or type(submodule).__name__,
                advice=_SHARDED,
            )
    for prefix, submodule in module.named_modules():
        name = f"{prefix}.weight" if prefix else "weight"
        embeds = isinstance(submodule, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if embeds and submodule.sparse and submodule.weight.requires_grad and name not in ignored:
            raise InvalidTensorError(
                f"{name} has sparse gradients, which cannot be put into a bucket",
                argument="module",
                expected="dense gradients",
                seen=f"{type(submodule).__name__}(sparse=True)",
                advice="Use sparse=False, or name it in module._ddp_params_and_buffers_to_ignore.",
            )
    for prefix, submodule in module.named_modules():
        if not isinstance(submodule, torch.nn.parallel.DistributedDataParallel):
            continue
        names = [f"{prefix}.{name}" if prefix else name for name, p in submodule.named_parameters() if p.requires_grad]
        if not ignored.issuperset(names):
            raise ConfigurationError(
                "torch's DistributedDataParallel exchanges the gradients of this module already",
                argument="module",
                expected="a module that one of the two trains",
                seen=prefix or type(submodule).__name__,
                advice="Wrap its .module in place of it; or register a communication hook, as "
                "bagua.integrations.ddp_comm_hooks.bagua_hook.",
            )


def require_outside(module: torch.nn.Module, outer: torch.nn.Module) -> None:
    """Refuse two exchanges of the same gradients."""
    if any(inner is module for inner in outer.modules()):
        raise ConfigurationError(
            "torch's DistributedDataParallel and bagua would both exchange the gradients of this module",
            argument="module",
            expected="a module that one of the two trains",
            seen=type(module).__name__,
            advice="Train what with_bagua returns as it is. Accelerate and Trainer wrap each model that they prepare: "
            "see attach in bagua.integrations.accelerate and bagua.integrations.transformers.",
        )


def checked_model(
    module: torch.nn.Module,
    registration: Registration,
    optimizers: Sequence[torch.optim.Optimizer],
    declaration: Algorithm,
) -> Model:
    """What ``declaration`` may know of ``module``.

    Raises:
        ConfigurationError: the model cannot be trained this way.
    """
    named = dict(zip(registration.names, registration.parameters, strict=True))
    model = Model(named, optimizers, partial(floating_buffers_of, module))
    declaration.check(model)
    for one in declaration.every_exchange():
        for dtype in {parameter.dtype for parameter in named.values()}:
            if one.how is not None:
                one.how.check_dtype(dtype)
        if "buffers" not in one.needs:
            parts = [list(named)] if one.parts.by == "arrival" else one.parts.cut(named)
            one.then.check_parameters([named[name] for part in parts for name in part])
    return model


def has_finite_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` has gradients to step with, and none of them has an Inf or NaN."""
    given = [one.grad for one in stepped_by(optimizer) if one.grad is not None]
    dense = [one.coalesce().values() if one.is_sparse else one for one in given]
    gradients = [one for one in dense if one.numel()]  # There is no largest one among none.
    if not gradients:
        return bool(given)
    # The usual norm takes a twentieth of the time that the largest element takes on the CPU, but it may overflow.
    norms = torch._foreach_norm  # noqa: SLF001 - as in clip_grad_norm_
    return _are_finite(norms(gradients)) or _are_finite(norms(gradients, float("inf")))


def _are_finite(norms: Sequence[torch.Tensor]) -> bool:
    # One look at the device for all of them, in a dtype that holds what each of theirs does.
    together = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])
    return bool(together.isfinite().all())


def optimizers_of(
    optimizers: Sequence[torch.optim.Optimizer], arrived: Collection[torch.Tensor]
) -> Sequence[torch.optim.Optimizer]:
    """Those of ``optimizers`` that step one of the parameters ``arrived``; all, if none does."""
    came = set(map(id, arrived))
    found = [one for one in optimizers if not came.isdisjoint(id(each) for each in stepped_by(one))]
    return found or optimizers


def sentinels_of(
    optimizers: Sequence[torch.optim.Optimizer],
    trained: Collection[torch.nn.Parameter],
    arrived: Collection[torch.nn.Parameter],
) -> tuple[torch.nn.Parameter, ...]:
    """One parameter of each optimizer, whose gradient tells of a pass: one that has ``arrived``, if one has.

    For phases without an exchange of gradients.
    """
    ours, came = set(trained), set(arrived)
    found: dict[torch.nn.Parameter, None] = {}
    for optimizer in optimizers:
        own = [one for one in stepped_by(optimizer) if one in ours]
        found.update(dict.fromkeys([one for one in own if one in came][-1:] or own[-1:]))
    return tuple(found)


def stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of all groups of ``optimizer``."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def warn_of_strangers(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Say which optimizers step nothing of ``module``: it would train without ever changing."""
    own = set(map(id, module.parameters()))
    for place, optimizer in enumerate(optimizers):
        stepped = stepped_by(optimizer)
        if stepped and own.isdisjoint(map(id, stepped)):
            _log.warning(
                "optimizer %d (%s) steps no parameter of this model. Was the model copied, or its layers replaced, "
                "after the optimizer had been made? Make the optimizer of model.parameters() last.",
                place,
                type(optimizer).__name__,
            )


def warn_of_unseen(optimizers: Sequence[torch.optim.Optimizer], stepped: torch.optim.Optimizer) -> None:
    """Say that an optimizer steps with gradients that were not exchanged."""
    _log.warning(
        "optimizer %d (%s) steps with gradients that no backward pass has brought, so they are not exchanged: call "
        "backward() in place of torch.autograd.grad, and step once for each backward pass",
        optimizers.index(stepped),
        type(stepped).__name__,
    )


def warn_of_accumulation(steps: int, nbytes: int) -> None:
    """Say that gradients of one update are exchanged more than once.

    Args:
        steps: backward passes before one update.
        nbytes: bytes of all gradients; 0 where other things are exchanged.
    """
    sizes = f", {steps * nbytes / 1e6:.3g} MB of gradients where {nbytes / 1e6:.3g} MB suffice" if nbytes else ""
    _log.warning(
        "each of the last updates came after %d backward passes that were exchanged%s: run all but the last forward "
        "and backward pass of an update inside model.no_sync()",
        *(steps, sizes),
    )


#: So many objects of unknown classes are looked into, one inside the other. Outputs that
#: keep a reference to their model, or to a trainer, would lead everywhere otherwise.
_DEPTH_OF_UNKNOWN = 3

_LEAVES = (str, bytes, int, float, complex, type, ModuleType, torch.nn.Module)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested sequences, mappings, dataclasses and plain objects with attributes.

    Args:
        value: value that a forward pass returned. Objects that contain themselves are visited once.

    Example:
        >>> [tensor.item() for tensor in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), None]})]
        [1, 2]
    """
    pending: list[tuple[Any, int]] = [(value, 0)]
    seen = set()
    while pending:
        item, depth = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not None and id(item) not in seen:
            seen.add(id(item))
            parts, deeper = _parts(item)
            if depth + deeper <= _DEPTH_OF_UNKNOWN:
                pending.extend((part, depth + deeper) for part in reversed(parts))


def _parts(item: Any) -> tuple[list[Any], int]:
    """What ``item`` is made of, and 1 if that is a guess."""
    if isinstance(item, _LEAVES) or callable(item):
        return [], 0
    if isinstance(item, Mapping):
        return list(item.values()), 0
    if isinstance(item, list | tuple | set | frozenset):
        return list(item), 0
    if dataclasses.is_dataclass(item):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)], 0
    return list(getattr(item, "__dict__", {}).values()), 1
