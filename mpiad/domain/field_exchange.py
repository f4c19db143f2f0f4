"""`exchange` and its two halves, of one field or of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.device.assembly import concatenate
from mpiad.domain.boundary import Boundary, Sides, check_values, shifted, sides_of
from mpiad.domain.decomposition import Decomposition
from mpiad.domain.halo import fill_halo
from mpiad.domain.nonblocking_exchange import Begun, begin_fill, end_fill
from mpiad.domain.routes import FACES, IN_TURN, TOGETHER

Finish = Callable[[LocalArray], Any]


class Exchanging(Decomposition):
    """What a domain exchanges with its neighbours."""

    def exchange(self, u: LocalArray | Sequence[LocalArray], boundary: Boundary = "zero", *, corners: bool = True) -> Any:
        """Return the block with its halo: the neighbours' cells around it.

        Parameters
        ----------
        u : array of shape (..., *local_shape), or a tuple or list of them
            Several fields of one dtype travel in one message to each neighbour.
        boundary : {"zero", "edge", "reflect"} or number, or a tuple
            What lies beyond the sides of the grid that aren't periodic, as `numpy.pad` fills constant, edge and reflect;
            in a tuple, one of these or a pair (before, after) for each dimension. A traced number is allowed, the same
            on all sides that have a value.
        corners : bool
            False for stencils that are stars: all messages travel at once, and halo cells that lie beyond two sides or
            more hold zero.

        Returns
        -------
        array of shape (..., *padded_shape), or a list of them
            The block itself is at ``[..., *interior]``.

        Raises
        ------
        TypeError, ValueError
            Where `u` isn't an array of that shape, or there is no such boundary.

        Ranks
        -----
        All ranks call it, with the same boundary.

        Adjoint
        -------
        The cotangent of each halo cell is added, on its owner's rank, to that of the cell it is a copy of.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> padded = domain.exchange(x, boundary="edge")
        >>> print(domain.max(padded[2:] - x), domain.min(padded[2:] - x))  # no difference across the end
        1.0 0.0
        """
        u, sides, finish = self._prepared(u, boundary, corners, "Domain.exchange")
        return [] if u is None else finish(fill_halo(u, self._halo, sides, IN_TURN if corners else FACES))

    def begin_exchange(
        self, u: LocalArray | Sequence[LocalArray], boundary: Boundary = "zero", *, corners: bool = True
    ) -> Begun:
        """Start an exchange; what doesn't need the halo is computed until `end_exchange` completes it.

        Parameters
        ----------
        u, boundary, corners
            As `exchange` takes them. `u` may be changed at once: a copy is exchanged.

        Returns
        -------
        request
            For `end_exchange`.

        Raises
        ------
        TypeError, ValueError
            As `exchange`.
        RequestError
            Where more than 200 exchanges are under way.

        Ranks
        -----
        All ranks begin their exchanges in the same order. The messages to all neighbours start at once, so there are
        more of them than in `exchange`, where corners are asked for: up to 8 in two dimensions, 26 in three.

        Adjoint
        -------
        Receives the cotangents of the cells that neighbours have copies of, which the adjoint of the end has started
        to send.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> begun = domain.begin_exchange(np.ones(domain.local_shape), boundary="edge")
        >>> inside = np.sin(0.0)  # while the halo travels
        >>> print(np.min(domain.end_exchange(begun)))
        1.0
        """
        u, sides, finish = self._prepared(u, boundary, corners, "Domain.begin_exchange")
        if u is None:
            raise ValueError("Domain.begin_exchange: expected a field, or several, but got an empty sequence.")
        begun = begin_fill(u, self._halo, sides, TOGETHER if corners else FACES)
        begun.finish = finish
        return begun

    def end_exchange(self, begun: Begun) -> Any:
        """Complete an exchange.

        Parameters
        ----------
        begun : request
            What `begin_exchange` returned.

        Returns
        -------
        array of shape (..., *padded_shape), or a list of them
            As `exchange` returns them.

        Raises
        ------
        TypeError
            Where it isn't what `begin_exchange` returned.
        RequestError
            Where it has ended before, or began in another trace.

        Ranks
        -----
        Each rank ends every exchange that it has begun, in any order.

        Adjoint
        -------
        Starts to send the cotangents of the halo to the owners of its cells.
        """
        padded = end_fill(begun)
        return begun.finish(padded)

    def _prepared(self, u: Array, boundary: Boundary, corners: bool, call: str) -> tuple[Any, Sides, Finish]:
        """Return one array to exchange, with what beyond its sides, and how to make the result of its padded form."""
        # A traced value must stay on the tape, but the exchange is one node of u alone.
        value, sides = shifted(sides_of(boundary, len(self.shape), call), call)
        if value is not None and not corners:
            raise TypeError(f"{call}: a traced boundary value needs corners=True, since corners then hold it too.")
        u, finish = self._joined(u, call) if isinstance(u, (tuple, list)) else (self._field(u, call), _as_it_is)
        if u is None:
            return u, sides, finish
        check_values(sides, u.dtype, call)
        self._check_reflection(sides, call, self.halo)
        if value is None:
            return u, sides, finish
        return u - value, sides, lambda padded: finish(padded + value)

    def _field(self, u: Array, call: str) -> LocalArray:
        return self._checked(u, self.local_shape, call)

    def _joined(self, fields: Sequence[LocalArray], call: str) -> tuple[LocalArray | None, Finish]:
        fields = [self._field(field, call) for field in fields]
        if len({field.dtype for field in fields}) > 1:
            raise TypeError(
                f"{call}: fields that travel in one message must have one dtype, but got "
                f"{', '.join(str(field.dtype) for field in fields)}. Convert them, or exchange them apart."
            )
        if not fields:
            return None, _as_it_is
        leads = [field.shape[: field.ndim - len(self.shape)] for field in fields]
        stops = np.cumsum([math.prod(lead) for lead in leads])

        def apart(padded: LocalArray) -> list[LocalArray]:
            pieces = [padded[stop - math.prod(lead) : stop] for stop, lead in zip(stops, leads)]
            return [piece.reshape(lead + self.padded_shape) for piece, lead in zip(pieces, leads)]

        # Leading axes are made one, so that fields with different ones fit into one message.
        return concatenate([field.reshape((-1, *self.local_shape)) for field in fields]), apart


def _as_it_is(padded: LocalArray) -> LocalArray:
    return padded
