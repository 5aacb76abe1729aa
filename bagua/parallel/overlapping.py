"""The wrapper that overlaps communication with the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from bagua.engine import BackwardHooks, BucketType, EngineAccess, Reducer, ReducerOptions, check_module, optimizer_list
from bagua.errors import ConfigurationError


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module


class DistributedModule(torch.nn.Module):
    """Base of wrappers: an ordinary module that runs another one.

    Its ``state_dict`` has the keys of the inner module, and a copy or a pickle of it is
    a copy or a pickle of the inner module.

    Args:
        module: the inner module.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> wrapper = DistributedModule(layer)
        >>> wrapper.unwrap() is layer, list(wrapper.state_dict())
        (True, ['weight', 'bias'])
    """

    def __init__(self, module: torch.nn.Module) -> None:
        check_module(module)
        super().__init__()
        self.module = module
        # For the case that this wrapper is a submodule of a module whose load_state_dict is called.
        self.register_load_state_dict_pre_hook(_insert_prefix)  # type: ignore[no-untyped-call]

    def unwrap(self) -> torch.nn.Module:
        """The inner module."""
        return self.module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the inner module."""
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the inner module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the inner module."""
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _itself, (self.module,)


def _insert_prefix(_wrapper: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    inner = prefix + "module."
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]:
        state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)


class OverlappingWrapper(EngineAccess, DistributedModule):
    """Runs a module, and exchanges its gradients while the backward pass is still going on.

    Building one is collective. It starts from the parameters that the module has;
    ``broadcast_parameters`` makes them equal.

    Args:
        module: the module to train.
        optimizers: one or several optimizers that step its parameters.
        delay_reduce: exchange everything at the end of backward instead.
        bucket_type: ``Weight`` chooses a decentralized algorithm.
        hierarchical_reduce: inside each host first, then between hosts.
        decentralize_reduce: choose a decentralized algorithm.
        parameter_manager: not supported.
        align_bytes: buckets are padded to a multiple of this power of two.
        chunking: choose a scatter-gather algorithm, and pad buckets so that they split
            evenly over the ranks.
        fusion: one flat storage for the gradients and one for the weights of each bucket.
        kwargs: keyword arguments of ``Reducer``.

    Raises:
        CollectiveMismatchError: the models or options of the ranks differ.
        ConfigurationError: an argument that cannot be used.

    Example:
        >>> import bagua.comm
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model = OverlappingWrapper(layer, [optimizer], process_group=bagua.comm.solo_group())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer,
        delay_reduce: bool = False,
        bucket_type: BucketType = BucketType.Gradient,
        hierarchical_reduce: bool = False,
        decentralize_reduce: bool = False,
        parameter_manager: None = None,
        align_bytes: int = 8,
        chunking: bool = False,
        fusion: bool = True,
        **kwargs: Unpack[ReducerOptions],
    ) -> None:
        super().__init__(module)
        if parameter_manager is not None:
            raise ConfigurationError(
                "parameter managers are not supported",
                argument="parameter_manager",
                expected=None,
                seen=type(parameter_manager).__name__,
            )
        reducer = Reducer(
            module,
            optimizer_list(optimizers),
            bucket_type,
            hierarchical_reduce=hierarchical_reduce,
            align_bytes=align_bytes,
            chunking=chunking,
            fusion=fusion,
            decentralize_reduce=decentralize_reduce,
            delay_reduce=delay_reduce,
            **kwargs,
        )
        self._engine = BackwardHooks(reducer)
        self.create_hooks()

    @property
    def _bagua_engine(self) -> BackwardHooks:  # type: ignore[override]
        return self._engine

    @property
    def reducer(self) -> Reducer:
        """The bucket manager."""
        return self._engine.reducer

    def create_hooks(self) -> None:
        """Attach to the parameters and the optimizers. Done by the constructor; idempotent."""
        self._engine.create_hooks()

    def reset_reducer(
        self,
        hierarchical_reduce: bool | None = None,
        buckets: Sequence[Sequence[torch.Tensor | str]] | None = None,
        *,
        bucket_bytes: int | None = None,
    ) -> None:
        """Go on with other settings. Collective; what the algorithm remembers is carried over.

        Args:
            hierarchical_reduce: None leaves it as it is.
            buckets: lists of parameters or names; None forms buckets in the next backward pass.
            bucket_bytes: None leaves it as it is.
        """
        self.reducer.formation.reset(hierarchical_reduce, buckets, bucket_bytes)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the inner module, after everything that is owed to it was exchanged."""
        self.reducer.after_optimizers()
        return super().state_dict(*args, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        # Some trainers bring only the inner module back to training after an evaluation.
        self._engine.before_forward(self.module.training)
        output = self.module(*inputs, **kwargs)
        self._engine.after_forward(output)
        return output
