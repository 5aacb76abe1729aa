"""Who takes part: every registered algorithm, torch's DDP with and without its hooks, and whatever you write.

A contender is written as text, so that it fits on a command line and reaches the rank processes:

* ``ddp``, ``ddp_fp16``, ``ddp_powersgd``: torch's DistributedDataParallel, plain or with a hook of torch;
* ``ddp_8bit``: the same with our hook that sends one byte for each element;
* ``silent``: bagua's engine with an exchange that does nothing: the least that a step can take;
* ``decentralized_data_parallel``: DecentralizedDataParallel with one other peer in each step;
* ``adam``, ``lamb``, ``dion_optimizer``: gradient allreduce with another optimizer in place of the task's, to compare
  algorithms with that need one; ``adam:lr=0.03`` with another learning rate than what usually suits it;
* ``bytegrad`` or ``bytegrad:hierarchical=False``: a registered algorithm, with options, also of the optimizer that it
  needs; ``lr``, the highest learning rate, is taken for the optimizer of the task by those that need none;
* ``package.module:function``, with options or without: ``function(model, optimizer, **options)`` returns a
  :class:`Prepared`.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import bagua.torch_api  # noqa: F401  # puts with_bagua on modules
from bagua.algorithms import Algorithm, registry
from bagua.integrations.ddp_comm_hooks import HookState, bagua_hook
from bagua.optim import DionOptimizer, OneBitLambOptimizer
from bagua.parallel.decentralized import DecentralizedDataParallel
from benchmarks.silent import SilentAlgorithm

__all__ = [
    "PEERS",
    "Follower",
    "Prepared",
    "every_algorithm",
    "every_contender",
    "find_maker",
    "one_like",
    "rate_of",
    "read_options",
    "split_options",
]

#: Steps before torch's PowerSGD hook compresses; it demands more than one, as DDP forms its buckets anew after one.
POWERSGD_WARM_UP_STEPS = 3
POWERSGD_RANK = 4
#: torch's PowerSGD hook aborts on Gloo with several buckets in flight: ranks issue their calls in different orders.
ONE_BUCKET_MB = 100_000
#: Optimizers whose learning rates suit Adam; it gets the other one in place of all others.
ADAM_LIKE = (torch.optim.Adam, torch.optim.AdamW)
ADAM_LEARNING_RATE = 1e-3
#: Of SGD that steps by signs, where the task's optimizer is no kind of Adam.
SIGN_LEARNING_RATE = 3e-3
#: Of other optimizers, over that of Adam.
RATES: dict[object, float] = {OneBitLambOptimizer: 3.0, DionOptimizer: 5.0, torch.optim.SGD: 0.55}  # SGD of signs
#: More steps than anybody takes.
NEVER = 10**9


def nothing() -> None:
    """Nothing to do between two turns."""


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be trained by one contender.

    Args:
        model: what to call.
        optimizer: steps the model; the one that was given, or one of the contender's own.
        resume: called before the first step of a turn.
        pause: called after the last step of a turn: other contenders get the network, so it waits until everything
            that was started has ended.
        finish: called after the last step of all, to make one model of those of all ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    resume: Callable[[], object] = nothing
    pause: Callable[[], object] = nothing
    finish: Callable[[], object] = nothing


Maker = Callable[[nn.Module, torch.optim.Optimizer], Prepared]


def through_ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """DistributedDataParallel as it comes."""
    return Prepared(nn.parallel.DistributedDataParallel(model), optimizer)


def through_ddp_fp16(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """DDP with the hook that sends float16."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Prepared(wrapped, optimizer)


def through_ddp_powersgd(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """DDP with the hook that sends factors of low rank."""
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_WARM_UP_STEPS,
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Prepared(wrapped, optimizer)


def through_ddp_8bit(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """DDP with our hook that sends one byte for each element."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(HookState("bytegrad"), bagua_hook)
    return Prepared(wrapped, optimizer)


def through_decentralized(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """DecentralizedDataParallel, which steps with optimizers of its own, made like the task's."""
    follower = Follower(optimizer)
    wrapped = DecentralizedDataParallel(model, follower.make, topology="one-peer-exp")
    return Prepared(wrapped, follower, pause=wrapped.bagua_state_dict)  # which leaves no exchange under way


class Follower(torch.optim.Optimizer):
    """Stands for optimizers that step in the backward pass, so that a schedule of the training loop reaches them.

    Args:
        optimizer: one of the kind, and with the options, that these will have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        lr = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])  # of a schedule that began
        super().__init__([nn.Parameter(torch.zeros(1))], {"lr": lr})
        self.like, self.made = optimizer, list[torch.optim.Optimizer]()

    def make(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """An optimizer of these parameters."""
        self.made.append(one_like(self.like, [parameter for _, parameter in named_parameters]))
        return self.made[-1]

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # as in torch
        """Take the learning rate over, before the backward pass that steps with it."""
        for group in (group for optimizer in self.made for group in optimizer.param_groups):
            group["lr"] = self.param_groups[0]["lr"]

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # as in torch
        """All have stepped."""


def one_like(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], **changed: object
) -> torch.optim.Optimizer:
    """An optimizer of other parameters, of the same kind and with the same options but for ``changed``."""
    kind = type(optimizer)
    known = inspect.signature(kind).parameters  # AdamW's defaults hold more than it takes
    options = {key: value for key, value in optimizer.defaults.items() if key in known}
    return kind(parameters, **{**options, **changed})


def without_exchange(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """The engine with an exchange that sends nothing: the mutant that must not pass for training together."""
    prepared = through_bagua(model, optimizer, SilentAlgorithm(), check_every=0)  # It leaves ranks different.
    return dataclasses.replace(prepared, finish=nothing)


def with_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: object, lr: float | None = None, **options: object
) -> Prepared:
    """Gradient allreduce with another kind of optimizer: the peer of algorithms that need one like it."""
    rate = rate_of(kind, optimizer) if lr is None else lr
    own: torch.optim.Optimizer = kind(model.parameters(), lr=rate, **options)  # type: ignore[operator]
    return through_bagua(model, own, Algorithm.init("gradient_allreduce"))


def rate_of(kind: object, optimizer: torch.optim.Optimizer) -> float:
    """What suits an optimizer of this kind, of which some take longer or shorter steps than Adam."""
    if kind is torch.optim.SGD and not isinstance(optimizer, ADAM_LIKE):
        return SIGN_LEARNING_RATE
    return adam_learning_rate(optimizer) * RATES.get(kind, 1.0)


def adam_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """What suits Adam: the task's learning rate if its optimizer is a kind of Adam."""
    if not isinstance(optimizer, ADAM_LIKE):
        return ADAM_LEARNING_RATE
    group = optimizer.param_groups[0]
    return float(group.get("initial_lr", group["lr"]))  # a schedule may have begun to change it


def through_bagua(
    model: nn.Module, optimizer: torch.optim.Optimizer, algorithm: Algorithm, check_every: int | None = None
) -> Prepared:
    """An algorithm of bagua; one that goes on between steps is aborted and resumed."""
    # The import put it on all modules.
    wrapped = model.with_bagua([optimizer], algorithm, check_every=check_every)  # type: ignore[operator]
    bound = wrapped.bagua_algorithm
    if hasattr(bound, "abort") and hasattr(bound, "resume"):
        return Prepared(
            wrapped, optimizer, functools.partial(bound.resume, wrapped), functools.partial(bound.abort, wrapped)
        )
    # Saving the algorithm's state waits for exchanges under way, and applies none before its time.
    return Prepared(wrapped, optimizer, pause=wrapped.bagua_state_dict, finish=wrapped.bagua_finish)


def named(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, options: dict[str, object]) -> Prepared:
    """A registered algorithm, with an optimizer of its own if it needs one."""
    own, of_optimizer = split_options(name, options)
    make_optimizer = registry.get(name).optimizer_class
    if make_optimizer is not None:
        of_optimizer.setdefault("lr", rate_of(make_optimizer, optimizer))
        optimizer = make_optimizer(model.parameters(), **of_optimizer)
    elif of_optimizer:
        optimizer = one_like(optimizer, model.parameters(), **of_optimizer)
    return through_bagua(model, optimizer, Algorithm.init(name, **own))


def split_options(name: str, options: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Those of the algorithm, and those of the optimizer; if it needs none of its own, only ``lr`` is for that."""
    declaration = registry.get(name)
    if declaration.optimizer_class is None:
        for_optimizer = {"lr"}
    else:
        known = {field.name for field in dataclasses.fields(declaration)}  # type: ignore[arg-type]  # all are dataclasses
        for_optimizer = options.keys() - known
    own = {key: value for key, value in options.items() if key not in for_optimizer}
    return own, {key: value for key, value in options.items() if key in for_optimizer}


PEERS: dict[str, Maker] = {
    "ddp": through_ddp,
    "ddp_fp16": through_ddp_fp16,
    "ddp_powersgd": through_ddp_powersgd,
    "ddp_8bit": through_ddp_8bit,
    "decentralized_data_parallel": through_decentralized,
    "silent": without_exchange,
    "adam": functools.partial(with_optimizer, kind=torch.optim.Adam),
    "lamb": functools.partial(with_optimizer, kind=OneBitLambOptimizer, warmup_steps=NEVER),
    "dion_optimizer": functools.partial(with_optimizer, kind=DionOptimizer),
}
#: Those of them that take ``lr``.
WITH_OPTIMIZER = ("adam", "lamb", "dion_optimizer")
#: Registered algorithms that take part with other options than their defaults, and in how many forms.
FORMS: dict[str, tuple[str, ...]] = {
    "decentralized": ("decentralized:peer_selection_mode='all'", "decentralized:peer_selection_mode='shift_one'"),
}
#: More of them where few steps are taken: compression has to begin before the first step that is timed.
TIMED_FORMS = {
    **FORMS,
    "sign_sgd": ("sign_sgd:warmup_steps=0",),
    "loco": ("loco:warmup_steps=0",),
    "top_k": ("top_k:warmup_steps=0,density_steps=0",),
    "qadam": ("qadam:warmup_steps=3",),
    "one_bit_adam": ("one_bit_adam:warmup_steps=3",),
    "one_bit_lamb": ("one_bit_lamb:warmup_steps=3",),
}


def every_algorithm(forms: Mapping[str, tuple[str, ...]] = FORMS) -> list[str]:
    """Every registered algorithm."""
    return [form for name in registry for form in forms.get(name, (name,))]


def every_contender() -> list[str]:
    """The peers, and every registered algorithm."""
    return [*PEERS, *every_algorithm(TIMED_FORMS)]


def find_maker(contender: str) -> Maker:
    """What prepares a model for ``contender``.

    Args:
        contender: as in the text at the top of this file.

    Raises:
        ValueError: it is none of these, or its options cannot be read.
        BaguaError: the algorithm refuses its options.
    """
    if contender in PEERS:
        return PEERS[contender]
    name, _, rest = contender.partition(":")
    function, _, options_of_function = rest.partition(":")
    if function and "=" not in function:
        return functools.partial(load_function(name, function), **read_options(options_of_function))
    options = read_options(rest)
    if name in WITH_OPTIMIZER:
        if options.keys() != {"lr"}:
            raise ValueError(f"{contender!r}: {name} has no option but lr")
        return functools.partial(PEERS[name], **options)
    Algorithm.init(name, **split_options(name, options)[0])  # refuses here what the ranks would refuse
    return functools.partial(named, name=name, options=options)


def load_function(module: str, function: str) -> Maker:
    """A maker from somebody else's module."""
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module}:{function}: {error}") from error
    maker: Maker = found
    return maker


def read_options(text: str) -> dict[str, object]:
    """``a=1,b='x',c=word`` as a dict; what is no literal of Python is a string."""
    options: dict[str, object] = {}
    for assignment in filter(None, text.split(",")):
        key, equals, value = assignment.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{assignment!r}: options are written NAME=VALUE, with a comma between them")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options
