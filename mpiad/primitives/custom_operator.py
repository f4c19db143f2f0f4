"""An operator of the user's own that communicates, as the ordered tape and plain autograd see it.

It is one node, recorded whether or not an input is traced, and visited always, on every rank. Its body runs on plain arrays
with no tape current. `mpiad.extend` makes such operators and gives them their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from autograd.core import JVPNode, VJPNode, primitive_jvps, primitive_vjps
from autograd.tracer import Box, new_box

from mpiad._typing import Array, Function
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.foreign import checked_adjoint
from mpiad.primitives.noting import noted_methods
from mpiad.primitives.operation import Tape, current, differentiable, refuse_suspended, suspended
from mpiad.transport import calls
from mpiad.transport.channels import communications
from mpiad.transport.device_arrays import arrays_of, is_device_array
from mpiad.transport.tracing import tracing

__all__ = ["Communicating", "InPlace"]

_box_types = Box.types


class InPlace(NamedTuple):
    """How an operator works in one buffer, for compiled programs, which put its first argument there from the start.

    Each function takes the operator's further arguments; shapes and indices are without leading axes.

    Parameters
    ----------
    shape, made : callable
        The buffer's shape, and that of the result.
    given, result : callable
        Where the argument lies in the buffer before, and the result afterwards: the first indices.
    run : callable
        ``run(buffer, *rest)`` does it.
    prepared : callable
        ``prepared(buffer, *rest)`` returns the same for a buffer on the host that stays, a function without arguments,
        for programs that run again and again; it isn't noted. The function returns an iterator that does it, and that
        comes back wherever messages are under way: what they don't change can be read meanwhile.
    still : callable
        The part of the buffer that stays as it is: for each axis the first index and the one after the last. None where
        nothing travels.
    changes_given : bool
        Whether the argument isn't there any more afterwards.
    """

    shape: Callable[..., Sequence[int]]
    made: Callable[..., Sequence[int]]
    given: Callable[..., Sequence[int]]
    result: Callable[..., Sequence[int]]
    run: Callable[..., None]
    prepared: Callable[..., Callable[[], Iterator[None]]]
    still: Callable[..., Sequence[tuple[int, int]] | None]
    changes_given: bool


class Communicating:
    """An operator that communicates; made by `communicating`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpiad.extend import Communicating, communicating
    >>> total = communicating(lambda x: MPI.COMM_WORLD.allreduce(x))
    >>> print(isinstance(total, Communicating), total(1.0) == size)
    True True
    """

    # Whether the adjoint takes several cotangents, along axes before those of the result, and returns as many.
    several = False
    # Whether the result has always the shape and dtype of the first argument.
    alike = False

    def __init__(self, fun: Function):
        self.fun = fun
        self.__name__ = getattr(fun, "__name__", "operator")
        self.__doc__ = getattr(fun, "__doc__", None)
        # Both are set later, by `defvjp` and `defjvp` of `extend`.
        self.backward: Callable | None = None
        self.forward: Callable | None = None
        self.in_place: InPlace | None = None
        primitive_vjps[self] = self._foreign_vjp
        primitive_jvps[self] = self._foreign_jvp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the operator, recorded on the current tape and on those around it."""
        next(communications)
        return _apply(self, current.tape, args, kwargs)

    def __repr__(self) -> str:
        return f"<communicating operator {self.__name__}>"

    def body(self, args: tuple, kwargs: dict) -> Any:
        """Run the function on plain arrays, as one node."""
        # Read-only: a body that wrote into its argument would change what others hold, and what adjoints were given.
        args = tuple([_lent(arg) for arg in args])
        with suspended():
            ans = self.fun(*args, **kwargs)
        # Read-only is what returns a lent argument: the result must be an array of its own.
        return ans.copy() if type(ans) is np.ndarray and not ans.flags.writeable else _result(ans, self.__name__)

    def run_in_place(self, buffer: Array, *rest: Any) -> None:
        """Run the function in a buffer that holds its first argument (see `InPlace`)."""
        call = calls.begin(self.__name__, buffer, None) if calls.is_noting() else None
        try:
            with suspended():
                self.in_place.run(buffer, *rest)  # type: ignore[union-attr]
        finally:
            if call is not None:
                calls.end(call)

    def vjp(self, ans: Array, args: tuple, kwargs: dict, argnums: tuple[int, ...], level: int) -> Callable:
        """Return the function that maps the cotangent of the result to those of its traced arguments."""
        if self.backward is None:
            raise NotImplementedError(f"{self.__name__} has no adjoint: give it one with mpiad.extend.defvjp.")
        rule, several = self.backward(ans, args, kwargs), self.several
        ndim = len(spec_like(ans).shape) if several else 0

        def vjp(g: Array) -> tuple:
            lead = spec_like(g).shape[: -ndim or None] if several else ()
            # All of it runs, also for arguments that aren't traced here: other ranks may wait for their part.
            return _parts(rule(g), argnums, args, self.__name__, lead)

        return vjp

    def jvp(self, tangents: dict[int, Any], ans: Array, args: tuple, kwargs: dict, level: int) -> Any:
        """Return the tangent of the result."""
        if self.forward is None:
            raise NotImplementedError(f"{self.__name__} has no tangent: give it one with mpiad.extend.defjvp.")
        return self.forward(tangents, ans, args, kwargs)

    def _foreign_vjp(self, argnums: tuple, ans: Array, args: tuple, kwargs: dict) -> Callable:
        level, kwargs = kwargs["level"], kwargs["params"]
        # Plain autograd knows no order of communication: an adjoint that it runs too early raises.
        vjp, spec = self.vjp(ans, args, kwargs, argnums, level), spec_like(ans)
        return checked_adjoint(lambda g: vjp(conform(g, *spec)), self.__name__, level)

    def _foreign_jvp(self, argnums: tuple, gs: list, ans: Array, args: tuple, kwargs: dict) -> Any:
        return self.jvp(dict(zip(argnums, gs)), ans, args, kwargs["params"], kwargs["level"])


_BARE = Communicating.body, Communicating.vjp, Communicating.jvp
_NOTED = noted_methods(*_BARE)


def _switch_noting(on: bool) -> None:
    Communicating.body, Communicating.vjp, Communicating.jvp = _NOTED if on else _BARE


calls.register(_switch_noting)


def _lent(array: Array) -> Any:
    """Return an array as MPI takes it, which can't be written to (on a device it could): others may hold it too."""
    if type(array) is not np.ndarray:
        arrays = arrays_of(array)
        return array if arrays is None else arrays.contiguous(array)
    lent = (array if array.flags.c_contiguous else array.copy(order="C")).view()
    lent.flags.writeable = False
    return lent


def _result(ans: Array, name: str) -> Any:
    if isinstance(ans, (np.ndarray, np.generic, bool, int)) or ans is None or is_device_array(ans):
        return ans
    if isinstance(ans, (float, complex)):
        return np.asarray(ans)[()]
    if type(ans) in _box_types:
        raise TypeError(
            f"{name}: its body returned a traced value, so it uses a traced variable from outside. "
            "Pass every variable to differentiate by as an argument."
        )
    raise TypeError(f"{name}: an operator must return one array, a number or None, but returned {type(ans).__name__}.")


def _parts(cotangents: Any, argnums: tuple[int, ...], args: tuple, name: str, lead: tuple[int, ...]) -> tuple:
    if not isinstance(cotangents, (tuple, list)) or len(cotangents) > len(args):
        raise TypeError(
            f"{name}: its adjoint must return a tuple with the cotangent of each of {len(args)} argument(s), but returned "
            f"{type(cotangents).__name__}{f' of {len(cotangents)}' if isinstance(cotangents, (tuple, list)) else ''}."
        )
    return tuple([_part(cotangents[k] if k < len(cotangents) else None, k, args, name, lead) for k in argnums])


def _part(part: Array, k: int, args: tuple, name: str, lead: tuple[int, ...]) -> Any:
    if part is None:
        return None
    spec = spec_like(args[k])
    if lead:
        spec = spec._replace(shape=lead + spec.shape)
    if np.shape(part) != spec.shape:
        raise TypeError(
            f"{name}: the cotangent of argument {k} must have its shape, {spec.shape}, but the adjoint gave "
            f"{np.shape(part)}."
        )
    return conform(part, *spec)


def _apply(operator: Communicating, tape: Tape | None, args: tuple, kwargs: dict) -> Any:
    number = -1 if tape is None else tape.number
    levels = [arg._trace if type(arg) in _box_types else -1 for arg in args]  # -1: untraced
    top = max(levels, default=-1)
    if top < 0 and tape is None:
        recorder = tracing.recorder
        return operator.body(args, kwargs) if recorder is None else recorder.operate(operator, args, kwargs)
    level = max(top, number)
    argnums = tuple([k for k, found in enumerate(levels) if found == level])
    parents = tuple([args[k]._node for k in argnums])
    inner = tuple([arg._value if found == level else arg for arg, found in zip(args, levels)])
    if top > number:  # the innermost trace isn't that of the current tape
        return _apply_above(operator, tape, inner, kwargs, argnums, parents, top)
    ans = _apply(operator, tape.outer, inner, kwargs)  # type: ignore[union-attr]
    if not differentiable(ans):
        return ans
    node = tape.communicated(operator, ans, inner, kwargs, argnums, parents)  # type: ignore[union-attr]
    return ans if node is None else new_box(ans, number, node)


def _apply_above(
    operator: Communicating, tape: Tape | None, args: tuple, kwargs: dict, argnums: tuple, parents: tuple, level: int
) -> Any:
    """Apply to values of a trace inside the current tape: plain autograd's, or an ended one of ours (constants)."""
    for parent in parents:
        refuse_suspended(parent, operator.__name__)
    ans = _apply(operator, tape, args, kwargs)
    node_type = type(parents[0])
    if (node_type is not VJPNode and node_type is not JVPNode) or not hasattr(ans, "dtype") or not differentiable(ans):
        return ans
    return new_box(ans, level, node_type(ans, operator, args, {"params": kwargs, "level": level}, argnums, parents))
