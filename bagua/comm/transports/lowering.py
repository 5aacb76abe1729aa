"""All collectives, dtypes and reductions for a transport that can only send and receive.

Every collective is one or two swaps: each rank sends to some ranks and receives from some. Data travels as
bytes, so every dtype does. Reductions gather the operands and fold them in rank order, so all ranks get the
same bits.

Collectives and messages of the user have connections of their own: a message that waits for its receiver never
holds up a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.autograd.graph import increment_version
from torch.distributed import PrefixStore

from bagua.comm.call import COLLECTIVES, POINT_TO_POINT, Call
from bagua.comm.lifetime.closing import run_all
from bagua.comm.lifetime.forks import family
from bagua.comm.reduction import fold
from bagua.comm.transports.base import DONE, Handle, Membership, Transport
from bagua.comm.transports.failure.finder import FailureFinder
from bagua.comm.transports.memory.lanes import COLLECTIVE, Lane, Lanes, Pending, join
from bagua.comm.transports.memory.line import Deadline
from bagua.comm.transports.mailroom import Mailroom
from bagua.errors import CommunicationError

__all__ = ["LoweredTransport", "as_bytes", "flat"]

#: Up to here an allreduce is one swap, in which each rank sends all it has to all others.
_SMALL_BYTES = 16 * 1024
#: A lane finds out who is missing after the deadline of its call; its error names the ranks.
_GRACE_S = 2.0
_SENDER: Lane = ("sender", -1)
