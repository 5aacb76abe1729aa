"""The collectives as functions: ``f(..., comm=None)`` is ``comm.f(...)``.

``comm`` is a communicator or a group of ``bagua.comm``, or a group of ``torch.distributed``, whose
members must all be calling when it is first given. ``None`` means all ranks. ``NON_MEMBER``, which
``new_group`` returns on ranks outside, makes the call return None at once. What each one takes, promises and
raises is said once, at the method of ``Communicator`` with the same name, from which it is made.

Example:
    With two ranks that hold ``[1, 2]`` and ``[3, 4]``, both hold ``[4, 6]`` afterwards.

    >>> import torch, bagua.comm
    >>> bagua.comm.init_process_group()
    >>> tensor = torch.tensor([1, 2])
    >>> bagua.comm.allreduce(tensor)
    >>> tensor
    tensor([1, 2])
    >>> bagua.comm.destroy_process_group()
"""

from __future__ import annotations

import inspect

from bagua.comm.call import KINDS
from bagua.comm.communicator import Communicator
from bagua.comm.startup.adoption import communicator_of
from bagua.comm.startup.default_group import default_communicator

_COMPOSED = ("allreduce_coalesced", "broadcast_coalesced")
_OF_OBJECTS = ("broadcast_object", "allgather_object", "gather_object", "scatter_object")


def _make(name: str) -> None:
    """Make a function of the method ``name`` of ``Communicator``: ``comm`` follows what may be given by position."""
    method = getattr(Communicator, name)
    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()
    options = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    comm = inspect.Parameter("comm", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="Group | None")
    positional = [*parameters[: len(parameters) - len(options)], comm]
    taken = ", ".join([*(one.name for one in positional), "*", *(one.name for one in options)])
    passed = ", ".join([*(one.name for one in positional[:-1]), *(f"{one.name}={one.name}" for one in options)])
    # As data classes are made: the call costs as much as if it stood here.
    who = "(default_communicator() if comm is None else communicator_of(comm))"
    source = compile(f"def {name}({taken}): return {who}.{name}({passed})", __file__, "exec")
    scope = {"communicator_of": communicator_of, "default_communicator": default_communicator, "__name__": __name__}
    exec(source, scope)  # noqa: S102 - names of our own
    globals()[name] = made = scope[name]
    made.__defaults__ = tuple(one.default for one in positional if one.default is not one.empty)
    made.__kwdefaults__ = {one.name: one.default for one in options}
    made.__annotations__ = {one.name: one.annotation for one in (*positional, *options)}
    made.__annotations__["return"] = signature.return_annotation
    summary = str(inspect.getdoc(method)).partition("\n")[0]
    made.__doc__ = f"{summary}\n\nSee ``Communicator.{name}``; ``comm`` are the ranks that take part, None means all."


# ``functional.pyi`` tells type checkers of them.
FUNCTIONS = (*KINDS, *_COMPOSED, *_OF_OBJECTS)
__all__ = list(FUNCTIONS)
for _name in FUNCTIONS:
    _make(_name)
