"""The bucket manager: collects gradients, forms buckets, and has them exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua.buckets import Bucket
from bagua.checks import check_whole
from bagua.comm import ReduceOp
from bagua.engine.agreement import compare_or_refuse
from bagua.engine.formation import DEFAULT_BUCKET_BYTES, BucketFormation
from bagua.engine.layout import foreign, positions_of, unused
from bagua.engine.options import BucketType
from bagua.engine.saving import Remembered, check_owner, collect, from_checkpoint, is_of_one_rank
from bagua.errors import CommunicationError, CommunicatorClosedError, ConfigurationError, blame

__all__ = ["DEFAULT_BUCKET_BYTES", "BucketType", "Reducer"]


class Reducer(BucketFormation):
    """Collects the gradients of a module in buckets, and has each bucket exchanged when it is complete.

    Building one is collective: it makes a private duplicate of the process group and
    compares the models of all ranks. In the first backward pass ``add_param`` notes in
    which order gradients appear; ``initialize_buckets`` then forms buckets in rank 0's
    order. Later, ``mark_tensor_ready`` takes each gradient as it arrives, and
    ``mark_on_complete`` ends the step.

    Args:
        module: whose trainable parameters are exchanged.
        optimizers: that step them.
        bucket_type: gradients, or weights, which chooses a decentralized algorithm.
        hierarchical_reduce: inside each host first, then between hosts.
        align_bytes: buckets are padded to a multiple of this power of two.
        chunking: choose a scatter-gather algorithm, and pad buckets so that they split
            evenly over the ranks.
        fusion: gradients and weights of a bucket live in flat memory. Otherwise gradients
            are copied into it and back.
        decentralize_reduce: choose a decentralized algorithm.
        buckets: lists of parameters, or of their names, to use instead of forming buckets.
        process_group: the ranks; None means all.
        algorithm: overrides the choice by flags.
        bucket_bytes: a bucket is closed when it holds so many bytes.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it
            is an error.
        delay_reduce: start no exchange before the end of backward.
        grad_scaler: the ``GradScaler`` of the training loop, for algorithms that must know
            by how much gradients are scaled.
        intra_comm_root_rank: the local rank that speaks for its host in hierarchical
            exchanges, on every host.
        autotune: True or ``AutotuneSettings``: find out by itself, during training, how large
            buckets should be and whether to exchange hierarchically; None leaves that to
            ``BAGUA_AUTOTUNE``.
        unknown: refused.

    Attributes:
        group: private to this reducer.
        algorithm: bound to the group.
        step: synchronized backward passes so far.
        buckets: empty before they are formed.
        tuning: who measures for tuning.
        autotune: how.

    Raises:
        CollectiveMismatchError: the models or options of the ranks differ.
        InvalidTensorError: a parameter that cannot be put into a bucket.
        ConfigurationError: an argument that cannot be used.
        TypeError: an argument that does not exist.

    Example:
        >>> from bagua.comm import solo_group
        >>> layer = torch.nn.Linear(2, 2)
        >>> reducer = Reducer(layer, [], BucketType.Gradient, False, 8, False, True, process_group=solo_group())
        >>> for parameter in layer.parameters():
        ...     reducer.add_param(parameter)
        >>> [len(bucket) for bucket in reducer.initialize_buckets()]
        [2]
    """

    # Every backward pass.

    def fill_slot(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The tensor that is communicated for ``param``: its part of the bucket's flat memory.

        Before buckets are formed, what will be copied there: its gradient, or its weights.

        Raises:
            ConfigurationError: it is no parameter of the module, or has no gradient yet.
        """
        if id(param) not in self._known:
            raise foreign(param)
        if self._scheduler is None:
            value = param.grad if self.algorithm.traits.gathers_gradients else param.detach()
            if value is None:
                raise _not_formed()
            return value
        slot = self._scheduler.slots[id(param)]
        if slot.view is not None:
            return slot.view
        bucket = slot.lane.bucket
        return bucket.views(bucket.buffer())[bucket.names.index(slot.name)]

    @property
    def taker(self) -> Callable[[torch.nn.Parameter], None]:
        """What hooks call for each gradient of this backward pass: ``add_param`` or ``mark_tensor_ready``."""
        if self.between_steps:
            return _leave_alone
        return self.add_param if self._scheduler is None else self._scheduler.take

    def before_step(self) -> bool:
        """A training forward begins. For algorithms that work between steps; whether the phase has changed."""
        if self._scheduler is None or not self.algorithm.traits.background:
            return False
        changed = self.algorithm.phase(self.step) != self._phase
        if changed:
            self._form_anew()
        self.algorithm.safe_point(self.step)
        return changed

    def begin_step(self) -> None:
        """A synchronized backward pass starts."""
        self.check_usable()
        if self._scheduler is None or self.between_steps:
            return
        # A phase between steps begins with a forward pass.
        if self.algorithm.phase(self.step) != self._phase and not self.algorithm.between_steps(self.step):
            self._form_anew()
        if self._grad_scaler is not None:
            self.algorithm.loss_scale = self._grad_scaler.get_scale()
        self._scheduler.begin(self.step)

    def mark_tensor_ready(self, param: torch.Tensor) -> None:
        """Take the gradient of ``param``; start the exchange of its bucket if it was the last one.

        Raises:
            ConfigurationError: its gradient was there before in the same backward pass, or it is no parameter of the
                module.
        """
        if self._scheduler is None:
            raise _not_formed()
        if id(param) not in self._scheduler.slots:
            raise foreign(param)
        if not self._scheduler.active:
            self.begin_step()
        self._scheduler.take(param)

    def mark_bucket_ready(self, bucket: Bucket | Sequence[torch.Tensor], bucket_idx: int | None = None) -> None:
        """Take the gradients of all parameters of a bucket.

        Args:
            bucket: one of the lists that ``initialize_buckets`` returned, or of ``buckets``.
            bucket_idx: its place among them; None means that it is not checked.

        Raises:
            ConfigurationError: there is another bucket in that place, or something else than a parameter in ``bucket``.
        """
        parameters = list(bucket.parameters if isinstance(bucket, Bucket) else bucket)
        if bucket_idx is not None:
            self._check_place(parameters, bucket_idx)
        for parameter in parameters:
            self.mark_tensor_ready(parameter)

    def _check_place(self, parameters: Sequence[torch.Tensor], bucket_idx: int) -> None:
        check_whole(0, bucket_idx=bucket_idx)
        there = self.buckets[bucket_idx].parameters if bucket_idx < len(self.buckets) else ()
        if [id(parameter) for parameter in parameters] != [id(parameter) for parameter in there]:
            raise ConfigurationError(
                "this bucket is not in this place",
                argument="bucket_idx",
                expected=f"the index of the bucket among {len(self.buckets)}",
                seen=bucket_idx,
            )

    def mark_on_complete(self) -> None:
        """End the step: start what has not started, and wait for what this step needs.

        A backward pass that brought no gradient at all, as that of ``torch.autograd.grad``
        for the inputs, is no step, unless ``find_unused_parameters`` is on.

        Raises:
            ConfigurationError: parameters without a gradient, and ``find_unused_parameters`` is off.
            CommunicationError: what happened in an exchange, wherever it ran.
        """
        scheduler = self._scheduler
        if scheduler is None:
            raise _not_formed()
        if self.between_steps:
            self.step += 1
            return
        missing = scheduler.missing()
        if missing and not self._find_unused:
            if len(missing) == len(scheduler.slots):
                return
            raise unused({self.group.rank: [slot.name for slot in missing]})
        without = scheduler.fill_missing(missing)
        scheduler.complete()
        if self._find_unused and self.algorithm.traits.gathers_gradients and self.group.size > 1:
            self._restore_unused({slot.name for slot in without})
        self.step += 1

    def _restore_unused(self, unused_here: set[str]) -> None:
        """Gradients that no rank has stay None, so that optimizers skip them as without bagua."""
        communicator = self.communicator
        device = torch.device("cpu") if "cpu" in communicator.device_types else self.buckets[0].device
        flags = [name not in unused_here for name in self.registration.names]
        used = torch.tensor(flags, dtype=torch.uint8, device=device)
        communicator.allreduce(used, ReduceOp.MAX)
        for parameter, flag in zip(self.registration.parameters, used.tolist(), strict=True):
            if not flag:
                parameter.grad = None

    # Between backward passes.

    @property
    def owes(self) -> bool:
        """Whether an exchange waits for the optimizers."""
        return self._scheduler is not None and self._scheduler.owes

    def after_optimizers(self) -> None:
        """The optimizers have stepped: exchange what waited for that."""
        if self._scheduler is None:
            return
        try:
            self._scheduler.after_optimizers()
        except BaseException as error:
            self.give_up(error)
            raise

    def flush(self) -> None:
        """Leave no exchange owed or under way. Collective if the algorithm is."""
        self.algorithm.settle()
        if self._scheduler is not None:
            self._scheduler.flush()

    def suspend_exchanges(self) -> list[int]:
        """Wait for exchanges under way, and set their results aside; later steps do not apply them.

        Returns:
            For each bucket the step of its result, or -1; for ``resume_exchanges``.
        """
        if self._scheduler is None:
            return []
        steps = self._scheduler.settle()
        self._scheduler.forget()
        return steps

    def resume_exchanges(self, steps: list[int]) -> None:
        """Apply the results that ``suspend_exchanges`` set aside when their time comes, after all."""
        if self._scheduler is not None:
            self._scheduler.resume(steps)

    def give_up(self, reason: BaseException | str) -> None:
        """End a step that cannot be finished here; ranks that wait for the rest of it get ``PeerLostError``."""
        problem = reason if isinstance(reason, str) else getattr(reason, "problem", None) or repr(reason)
        rank = self.group.ranks[self.group.rank]
        culprit, told = (
            (rank, f"it gave up: {reason}") if isinstance(reason, str) else blame(reason, rank, "a training step")
        )
        self.group.abort(told, culprit)
        self._failure = self._failure or str(problem)
        self.algorithm.close()
        if self._scheduler is not None:
            self._scheduler.forget()
        self._close_soon()

    def check_usable(self) -> None:
        """Raise if an earlier step could not be finished.

        Raises:
            CommunicatorClosedError: it could not.
        """
        if self._failure:
            raise CommunicatorClosedError(
                f"this model can no longer be synchronized: {self._failure}",
                rank=self.group.ranks[self.group.rank],
                advice="Wrap it anew on all ranks, from a checkpoint: ranks may have made different steps.",
            )

    def close(self) -> None:
        """Give back threads and communicators; the module keeps working on its own. Idempotent.

        Exchanges under way end first, and what is owed to other ranks is not sent any more.
        """
        self.algorithm.close()
        if self._scheduler is not None:
            with contextlib.suppress(CommunicationError):  # Nobody will use what this rank would have received.
                self.end_exchanges()
            self._scheduler.owe_nothing()
        self.belongings.close()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm remembers on this rank; the weights are in the module's own ``state_dict``.

        Every rank saves its own. Made of numbers, strings, lists, dictionaries and tensors.
        """
        remembered = self._remembered
        if self._scheduler is not None:
            self.after_optimizers()
            remembered = collect(self.buckets, self._scheduler.settle())
        return {
            "algorithm": repr(self.declaration),
            "rank": self.group.rank,
            "world_size": self.group.size,
            "step": self.step,
            **(remembered or collect([], [])),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, in the same buckets. Collective.

        Args:
            state_dict: of this rank. Where it is the same on all ranks, as for gradient allreduce, that
                of any rank will do.

        Raises:
            ConfigurationError: it belongs to another algorithm or to other parameters; or to another
                rank, or number of ranks, and it matters.
            CollectiveMismatchError: ranks load different checkpoints.
        """
        refusal: ConfigurationError | None = None
        facts: list[str] = []
        try:
            remembered, members = self._readable(state_dict)
            facts = [f"step {state_dict['step']}", *(f"bucket {names}" for names in remembered["buckets"])]
        except ConfigurationError as error:
            refusal = error
        compare_or_refuse(facts, self.communicator, "checkpoints", refusal)
        self._put_aside()
        self.step = state_dict["step"]
        self._remembered = remembered
        if members and not self.idle:
            self._form(members)

    def _readable(self, state_dict: dict[str, Any]) -> tuple[Remembered, list[list[int]]]:
        """What is in a checkpoint, and the positions of the parameters in its buckets."""
        remembered = from_checkpoint(state_dict)
        kind = type(self.declaration).__name__
        if state_dict["algorithm"].partition("(")[0] != kind:
            raise ConfigurationError(
                "this state belongs to another algorithm",
                argument="state_dict",
                expected=kind,
                seen=state_dict["algorithm"],
            )
        # Neighbours have replicas of the weights that a rank of theirs had, so the layout is not all that counts.
        traits = self.algorithm.traits
        if is_of_one_rank(remembered) or (traits.result == "consensus" and not traits.background):
            check_owner(state_dict, self.group.rank, self.group.size)
        return remembered, positions_of(self.registration, remembered["buckets"]) if remembered["buckets"] else []


def _leave_alone(_: torch.nn.Parameter) -> None:
    """What is done with gradients where nothing is exchanged in a step."""


def _not_formed() -> ConfigurationError:
    return ConfigurationError(
        "buckets have not been formed yet",
        argument="buckets",
        expected="initialize_buckets() after the first backward pass",
        seen="none",
    )
