"""Averaging of weights in the background, on two planes, so that no rank waits in a collective for one that is gone.

**Control** goes through a notice board in the store. Nothing in it blocks on another rank.

* A rank writes only its own record. What it says about a round (*ready*) it cannot take back, except by
  the decision about that round.
* All that several ranks do together follows from a *decision*: a cell that is written once, by whichever of them first
  sees that it can be made. Ranks that meet in round ``r`` have one cell for it. It says *go*, with the ranks that take
  part and the connection that they use; or *void*, because one of them leaves; or *stop*.
* *Go* is proposed only when all who meet, and are not gone, are ready. So everybody named in it has its weights in a
  buffer already, and enters the exchange whatever its training thread does.
* *Stop* is proposed only when all ranks are gone or have called ``abort``. That stays true, so each rank meets a *stop*
  in the first of its cells that does not say *go*; and a member that a *go* names has not stopped before.
* Every rank goes through its own rounds in order. The lowest round in which anybody is, is one in which
  all who meet either are, or will be; so there is always a round that does not wait for another one.
* A member that leaves while it is ready writes *void* into its cell. If that says *go*, it takes part first; or, when
  it has no time left, breaks the connection, which the others survive.

**Data** moves over connections of their own, made by those who meet, of whom each has read *go*. The deadline of
an exchange begins there. When one breaks off, whatever the reason, the connection is dropped, the weights are as
they were, and the next round makes a new connection with the members that are left.

**The model** belongs to the training thread. It puts a snapshot into the handoff buffer and adds what it finds
there; the background thread knows the buffer and not the model. After ``abort`` its weights are at rest, and it keeps
putting them there, for those who still train, until all have agreed to stop. A last exchange of all then makes them
equal.

Who is dead is judged by the beats of the records, each rank by its own clock; who is dead for one is dead for all.
"""

from bagua.averaging.averager import Averager
from bagua.averaging.handoff import Buffers, Part, parts_of_buffers
from bagua.averaging.rounds import AveragingStatus, Schedule, topology_of

__all__ = ["Averager", "AveragingStatus", "Buffers", "Part", "Schedule", "parts_of_buffers", "topology_of"]
