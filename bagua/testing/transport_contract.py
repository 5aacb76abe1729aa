"""Every promise of a transport as a test. Needs pytest.

To hold a transport to it, derive a class and give it a pool of ranks on that transport::

    class TestMyTransport(TransportContract):
        sizes = (2, 4)

        @pytest.fixture
        def pool(self):
            return ProcessRanks(4, backend="mine", modules=["my_package.backend"])

What a transport cannot do it says with the class attributes of ``ContractBase``; the tests that
need it are skipped, with that declaration as the reason.
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
