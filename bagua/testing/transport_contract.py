"""Every promise of a transport as a test. Needs pytest.

To hold a transport to it, derive a class and give it a pool of ranks on that transport:

    >>> import collections, functools, queue, uuid
    >>> import pytest
    >>> from bagua.comm import DONE, LoweredTransport, Transport, register_transport
    >>> from bagua.testing import ThreadRanks
    >>> boxes = collections.defaultdict(queue.SimpleQueue)
    >>> class Queues(Transport):
    ...     def __init__(self, membership):
    ...         super().__init__(membership)
    ...         self.key = membership.store.compare_set("key", "", uuid.uuid4().hex)
    ...
    ...     def start(self, call, source, target, timeout_s, asynchronous):
    ...         if call.kind == "send":
    ...             boxes[self.key, self.rank, call.root].put(source.clone())
    ...             return DONE
    ...         try:
    ...             data = boxes[self.key, call.root, self.rank].get(timeout=timeout_s)
    ...         except queue.Empty:
    ...             raise TimeoutError("nothing came") from None
    ...         if data is None:
    ...             raise ConnectionError("it was closed")
    ...         target.copy_(data)
    ...         return DONE
    ...
    ...     def abort(self, reason, culprit=None):
    ...         for peer in range(self.size):
    ...             boxes[self.key, self.rank, peer].put(None)
    ...             boxes[self.key, peer, self.rank].put(None)
    ...
    ...     def close(self):
    ...         self.abort("it closed its communicator")
    >>> register_transport("queues", functools.partial(LoweredTransport, Queues))
    >>> class TestQueues(TransportContract):
    ...     compares_calls = False
    ...
    ...     @pytest.fixture
    ...     def pool(self):
    ...         return ThreadRanks(3, backend="queues")

``pytest`` runs all of its tests; by hand one looks like this:

    >>> TestQueues().test_every_root(ThreadRanks(3, backend="queues"))

A transport that connects processes uses ``ProcessRanks(3, backend="queues", modules=["my_package.transport"])``,
where importing the module registers it. What a transport cannot do it says with the class attributes of
``ContractBase``; the tests that need it are skipped, with that declaration as the reason.
"""

from __future__ import annotations

from bagua.testing.contract.arguments import ArgumentsContract
from bagua.testing.contract.asynchronous import AsynchronousContract
from bagua.testing.contract.disagreements import DisagreementsContract
from bagua.testing.contract.failures import FailuresContract
from bagua.testing.contract.messages import MessagesContract
from bagua.testing.contract.records import RecordsContract
from bagua.testing.contract.results import ResultsContract

__all__ = ["TransportContract"]


class TransportContract(
    ResultsContract,
    ArgumentsContract,
    AsynchronousContract,
    FailuresContract,
    DisagreementsContract,
    RecordsContract,
    MessagesContract,
):
    """All chapters. The attributes of ``ContractBase`` say what the transport declares about itself."""
