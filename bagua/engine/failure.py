"""Why a model can no longer be trained on all ranks together."""

from __future__ import annotations

from collections.abc import Iterable

from bagua.comm import ProcessGroup
from bagua.errors import CommunicatorClosedError, blame


class StepFailure:
    """What a rank could not finish, and has told the others that wait for it.

    Args:
        group: private to the model.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._problem = ""

    def tell(self, reason: BaseException | str, doing: str, others: Iterable[ProcessGroup] = ()) -> None:
        """End what cannot be finished here; ranks that wait for the rest of it get ``PeerLostError``.

        Args:
            reason: error that was raised here, or words.
            doing: words for what this rank was doing.
            others: connections of the model beside its group.
        """
        rank = self._group.ranks[self._group.rank]
        if isinstance(reason, str):
            problem, culprit, told = reason, rank, f"it gave up: {reason}"
        else:
            problem = str(getattr(reason, "problem", None) or repr(reason))
            culprit, told = blame(reason, rank, doing)
        for group in (self._group, *others):
            group.abort(told, culprit)
        self._problem = self._problem or problem

    def check(self) -> None:
        """Raise if something could not be finished.

        Raises:
            CommunicatorClosedError: it could not.
        """
        if self._problem:
            raise CommunicatorClosedError(
                f"this model can no longer be synchronized: {self._problem}",
                rank=self._group.ranks[self._group.rank],
                advice="Wrap it anew on all ranks, from a checkpoint: ranks may have made different steps.",
            )
