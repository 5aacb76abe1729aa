"""Keyword options that wrappers pass on, with their types: type checkers find one that does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    import torch

    from bagua.algorithms import Algorithm, DistributedAlgorithm, Outer
    from bagua.comm import Group
    from bagua.compression import Codec
    from bagua.optim import QAdamOptimizer
    from bagua.topology import Topology


class EngineKeywords(TypedDict, total=False):
    """What each entry point takes."""

    bucket_bytes: int
    buckets: Sequence[Sequence[torch.Tensor | str]]
    check_every: int | None
    find_unused_parameters: bool
    grad_scaler: torch.amp.GradScaler | None
    process_group: Group | None


class ReducerOptions(EngineKeywords, total=False):
    """Keyword options of ``Reducer``."""

    algorithm: Algorithm | DistributedAlgorithm | str | None
    intra_comm_root_rank: int


class SwitchOptions(EngineKeywords, total=False):
    """Keyword options of ``ModelSwitchWrapper`` beside the documented ones."""

    align_bytes: int
    chunking: bool
    fusion: bool


class AlgorithmOptions(TypedDict, total=False):
    """Options of the algorithms of this package, where one is given by its name."""

    alpha: float
    anchor_device: Literal["cpu"] | None
    anchor_dtype: Literal["float32", "weights"]
    average: bool
    average_buffers: bool
    averaging: float
    beta: float
    blend: float
    block_numel: int
    clip_norm: float | None
    codec: Codec | str | None
    communication_interval: int
    density_steps: int
    eager: bool
    error_feedback: bool | float
    fragment_order: Literal["strided", "bytes"]
    fragments: int
    inner: Algorithm | str | None
    kept: int
    matrix_rank: int
    mix: Literal["blend", "add"]
    momentum: float | None
    outer: str | Outer
    outer_lr: float | None
    outer_momentum: float | None
    overlap: int
    pace: Literal["equal", "own"]
    peer_selection_mode: str | Topology
    q_adam_optimizer: QAdamOptimizer | None
    ratio: float
    reset_every: int
    seed: int
    start_after: int
    sync_every: int
    sync_interval_ms: float
    topology: str | Topology
    value_bits: int | None
    warmup_steps: int


class InitOptions(SwitchOptions, AlgorithmOptions, total=False):
    """Keyword options of ``bagua_init``."""

    intra_comm_root_rank: int
