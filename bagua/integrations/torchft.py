"""bagua under torchft, whose manager makes a new group whenever replicas come and go."""

# Annotations are not strings here: torch compares those of a hook with its own types.
import importlib
from datetime import timedelta
from typing import Any

import torch

from bagua.checks import install_command
from bagua.comm import GradBucket, TorchBackendOptions, create_torch_group
from bagua.errors import ConfigurationError

__all__ = ["distributed_data_parallel", "process_group"]


def process_group(timeout: float | timedelta = 60.0) -> Any:
    """What ``torchft.Manager(pg=...)`` takes; its groups are on shared memory where replicas share a host.

    A replica that is lost is an error of the calls under way, which the manager counts: it skips the step, and goes on
    with those that are left.

    Args:
        timeout: default deadline of every call, and of connecting, in seconds or as a ``timedelta``.

    Raises:
        ImportError: torchft is not installed.
        ConfigurationError: it is of a version that makes groups in another way.
    """
    wrapper = getattr(_module("torchft.process_group"), "ProcessGroupWrapper", None)
    if not hasattr(wrapper, "_create_pg"):
        raise _other_version("torchft.process_group.ProcessGroupWrapper._create_pg")

    class ProcessGroupBagua(wrapper):  # type: ignore[misc, valid-type]  # known only at run time
        """torchft's frame of a group, around ours."""

        _pg: Any

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            # The manager handles errors itself; and takes for granted that callbacks of complete calls run at once.
            options = TorchBackendOptions(raise_in_backward=False, ordered_callbacks=False)
            return create_torch_group(store, rank, world_size, self._timeout, name="torchft", options=options)

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return "torchft-bagua"

        def shutdown(self) -> None:
            group: Any = self._pg
            self._pg = None
            if group is not None:
                group.shutdown()

    return ProcessGroupBagua(timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout))


def distributed_data_parallel(manager: Any, module: torch.nn.Module, **options: Any) -> Any:
    """What torchft has under this name, which also survives a replica that is lost in the backward pass.

    The class of torchft 0.2 ends with an ``AssertionError`` there, on every backend.

    Args:
        manager: a ``torchft.Manager``.
        module: the module to train.
        options: options of torchft's class.

    Raises:
        ImportError: torchft is not installed.
        ConfigurationError: it is of a version that registers its hook in another way.
    """
    parent = getattr(_module("torchft.ddp"), "DistributedDataParallel", None)
    if not hasattr(parent, "_comm_hook"):
        raise _other_version("torchft.ddp.DistributedDataParallel._comm_hook")

    class _DistributedDataParallel(parent):  # type: ignore[misc, valid-type]  # known only at run time
        """torchft's class, with another hook."""

        _comm_hook = staticmethod(_exchange_bucket)

    return _DistributedDataParallel(manager, module, **options)


def _exchange_bucket(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Let the manager average a bucket. After an error the step is not committed, whatever the bucket holds."""
    state.allreduce(bucket.buffer()).wait()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"bagua.integrations.torchft needs torchft: {install_command('torchft')}") from error


def _other_version(missing: str) -> ConfigurationError:
    return ConfigurationError(
        "this version of torchft is not known",
        argument="torchft",
        expected="torchft 0.2",
        seen=f"one without {missing}",
        advice=f"{install_command('torchft')} installs one that is known.",
    )
