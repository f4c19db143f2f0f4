"""`Domain`: a grid divided among the ranks, with operations on its fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from typing import Any, TypeVar, overload

import autograd.numpy as anp
import numpy as np
import scipy
from autograd.tracer import getval

from mpiad import higher_layers
from mpiad._typing import Array, Function, LocalArray, Rank, ReplicatedArray, Rng, RootArray, Shape, Tree
from mpiad.domain import (
    field_exchange,
    interpolation,
    random_fields,
    scatter_gather,
    stencils,
)
from mpiad.domain.boundary import Boundary
from mpiad.domain.decomposition import Decomposition, checked_block, listed
from mpiad.domain.field_exchange import ActiveExchange
from mpiad.domain.interpolation import Location, PointTables, lattice_of
from mpiad.domain.stencils import Stencil
from mpiad.primitives import mpi_allreduce
from mpiad.transport import MAX, MIN
from mpiad.transport.devices.device_arrays import is_device_array

Block = TypeVar("Block", bound=np.ndarray)


class Domain(Decomposition):
    """Divide a 1-, 2- or 3-dimensional grid among the ranks, one block per rank.

    Parameters
    ----------
    shape : int or tuple of int
        Number of cells of the whole grid along each dimension.
    halo : int or tuple of int
        Number of halo layers that `exchange` adds on each side of a block: one number, or one per dimension.
    periodic : bool or tuple of bool
        Whether the last cell along a dimension is adjacent to the first.
    dims : tuple of int, optional
        Number of ranks along each dimension; by default the numbers that minimize the size of halos.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    shape, halo, periodic, dims : tuple
        The arguments, with one entry for each dimension.
    position : tuple of int
        This rank's position in the grid of ranks.
    neighbours : tuple of pairs of int or None
        Ranks before and after along each dimension; None beyond a physical side.
    owned : tuple of slice
        The ranges of this rank's cells in the whole grid.
    local_shape, padded_shape : tuple of int
        Shape of this rank's block, without and with its halo.
    interior : tuple of slice
        The index of the block in an array that includes its halo.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid or differs between ranks, if a rank would own no cells, or if the halo is
        wider than the smallest block. By methods, if a field isn't an array of the stated shape.

    Ranks
    -----
    All ranks of `comm` call it, with the same arguments, and each method that doesn't state otherwise. Blocks are numbered
    in row-major order. If the cells along a dimension don't divide evenly, the first blocks have one additional cell.

    Examples
    --------
    >>> rank = mpiad.mpi_rank()
    >>> domain = mpiad.Domain(12)
    >>> (x,) = domain.coordinates(0.5)  # of this rank's cells
    >>> print(domain.sum(1.0 + 0 * x), domain.max(x))
    12.0 5.5
    """

    @cached_property
    def _tables(self) -> PointTables:
        return PointTables(self)

    @overload
    def exchange(self, u: Block, boundary: Boundary = "zero", *, corners: bool = True) -> Block: ...
    @overload
    def exchange(self, u: Any, boundary: Boundary = "zero", *, corners: bool = True) -> Any: ...
    def exchange(self, u: LocalArray | Sequence[LocalArray], boundary: Boundary = "zero", *, corners: bool = True) -> Tree:
        """Return the block with its halo, which contains copies of the neighbors' cells.

        Parameters
        ----------
        u : array of shape (..., *local_shape), or a tuple or list of them
            Several fields of one dtype are sent in one message to each neighbor.
        boundary : {"zero", "edge", "reflect"} or number, or a tuple
            Values beyond the nonperiodic sides of the grid: a number, or as in the modes "edge" and "reflect" of
            `numpy.pad`. A tuple contains one such entry, or a pair (before, after) of entries, per dimension. A number may
            be traced if it is the same on all sides that have a number.
        corners : bool
            Whether to fill the halo cells at the corners of the block. If False, these cells are zero, and all messages are
            sent at once; this suffices for star stencils.

        Returns
        -------
        array of shape (..., *padded_shape), or a list of them
            The block is at the index ``[..., *interior]``.

        Raises
        ------
        TypeError, ValueError
            If `u` isn't an array of that shape, or the boundary is unknown.

        Ranks
        -----
        All ranks call it, with the same boundary.

        Adjoint
        -------
        The cotangent of each halo cell is added, on the owner's rank, to the cotangent of the cell that it copies.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> padded = domain.exchange(x, boundary="edge")
        >>> print(domain.max(padded[2:] - x), domain.min(padded[2:] - x))  # beyond the end, the last cell is copied
        1.0 0.0
        """
        return field_exchange.exchange(self, u, boundary, corners)

    def begin_exchange(
        self, u: LocalArray | Sequence[LocalArray], boundary: Boundary = "zero", *, corners: bool = True
    ) -> ActiveExchange:
        """Start an exchange that `end_exchange` completes; computations between the two calls overlap with the messages.

        Parameters
        ----------
        u, boundary, corners
            As in `exchange`. The program may overwrite `u` after this call, since a copy is exchanged.

        Returns
        -------
        request
            The argument of `end_exchange`.

        Raises
        ------
        TypeError, ValueError, RequestError
            As in `exchange`; and if the exchange that began 224 exchanges earlier on the same communicator hasn't ended.

        Ranks
        -----
        All ranks begin their exchanges in the same order. All messages start at once; with `corners` there are more
        messages than in `exchange`: up to 8 in two dimensions, 26 in three.

        Adjoint
        -------
        The cotangents of halo cells, which the adjoint of `end_exchange` has started to send, are received and added.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> begun = domain.begin_exchange(np.ones(domain.local_shape), boundary="edge")
        >>> inside = np.sin(0.0)  # any computation that doesn't need the halo
        >>> print(np.min(domain.end_exchange(begun)))
        1.0
        """
        return field_exchange.begin_exchange(self, u, boundary, corners)

    def end_exchange(self, begun: ActiveExchange) -> Tree:
        """Complete an exchange.

        Parameters
        ----------
        begun : request
            The result of `begin_exchange`.

        Returns
        -------
        array of shape (..., *padded_shape), or a list of them
            As in `exchange`.

        Raises
        ------
        TypeError, RequestError
            If `begun` isn't a result of `begin_exchange`, if the exchange has already ended, or began in another trace.

        Ranks
        -----
        Each rank ends every exchange that it has begun, in any order.

        Adjoint
        -------
        The sends of the cotangents of halo cells to the ranks that own these cells are started.
        """
        return field_exchange.end_exchange(begun)

    def stencil(self, weights: Array, boundary: Boundary = "zero") -> Stencil:
        """Create an operator that returns weighted sums over each cell's neighbors, with the same weights in all cells.

        Parameters
        ----------
        weights : real array with an odd length along each dimension of the grid
            The weights of the neighbors; the center is the weight of the cell itself.
        boundary : {"zero", "edge", "reflect"} or number, or a tuple
            Values beyond the sides, as in `exchange`, but not traced.

        Returns
        -------
        Stencil
            ``stencil(u)`` returns an array like u. The operator exchanges as many halo layers as the weights need,
            regardless of the domain's `halo`. It is differentiable to any order; a reverse pass takes about as long as a
            forward pass.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if `weights` isn't a real array with odd lengths, or needs a halo wider than the smallest block.

        Ranks
        -----
        All ranks create the operator with the same arguments, and all ranks call it.

        Adjoint
        -------
        The stencil with reversed weights along each dimension; values in halo cells are added to the copied cells.
        """
        return stencils.stencil(self, weights, boundary)

    def laplacian(self, spacing: float | Sequence[float] = 1.0, *, order: int = 2, boundary: Boundary = "zero") -> Stencil:
        """Create the Laplacian by central differences, as an operator on fields.

        Parameters
        ----------
        spacing : float, or one per dimension
            Distance between cells.
        order : {2, 4, 6, 8, ...}
            Order of accuracy in the spacing, at most 40; the stencil uses order / 2 neighbors on each side.
        boundary : {"zero", "edge", "reflect"} or number, or a tuple
            As in `stencil`.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if the order isn't an even number from 2 to 40, or the spacing isn't positive; and as in
            `stencil`.

        Adjoint
        -------
        As in `stencil`; the Laplacian is self-adjoint if each dimension is periodic or has the boundary "zero".

        References
        ----------
        B. Fornberg, "Generation of finite difference formulas on arbitrarily spaced grids", Mathematics of Computation 51
        (1988), table 1.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> curvature = domain.laplacian(boundary="edge")(x**2)
        >>> print(domain.sum(curvature))
        0.0
        """
        return stencils.laplacian(self, spacing, order, boundary)

    def correlate(self, u: LocalArray, weights: LocalArray, boundary: Boundary = "zero") -> LocalArray:
        """Return weighted sums over the neighbors of each cell, with different weights in each cell.

        Parameters
        ----------
        u : array of shape (..., *local_shape)
        weights : array of shape (*lengths, *local_shape)
            ``weights[k]`` contains, for each cell, the factor of the neighbor at offset ``k - lengths // 2``. The lengths
            must be odd. Differentiable.
        boundary : {"zero", "edge", "reflect"} or number, or a tuple
            Values beyond the sides, as in `exchange`, but not traced.

        Returns
        -------
        array of shape (..., *local_shape)
            In cell i, the sum over k of ``weights[k][i] * u[i + k - lengths // 2]``.

        Raises
        ------
        TypeError, ValueError
            If an array has another shape, the weights need a halo wider than the smallest block, or a boundary value is
            traced or doesn't fit into the dtype of `u`.

        Adjoint
        -------
        The cotangent of a cell, times a weight, is added to the cotangent of the neighbor. The cotangent of the cell, times
        the neighbor's value, is added to the cotangent of the weight.
        """
        return stencils.correlate(self, u, weights, boundary)

    def scatter(self, u: RootArray, root: Rank = 0) -> LocalArray:
        """Send each rank its block of the root's whole array.

        Parameters
        ----------
        u : array of shape (..., *shape)
            Used on the root only; other ranks may pass None.
        root : int

        Returns
        -------
        array of shape (..., *local_shape)

        Raises
        ------
        TypeError, ValueError
            On all ranks, if the root's `u` isn't an array of that shape, or `root` isn't a rank.

        Adjoint
        -------
        The blocks' cotangents are assembled on the root: `gather`.

        Examples
        --------
        >>> rank = mpiad.mpi_rank()
        >>> domain = mpiad.Domain(12)
        >>> block = domain.scatter(np.arange(12.0) if rank == 0 else None)
        >>> print(np.array_equal(block, np.arange(12)[domain.owned]))
        True
        """
        return scatter_gather.scatter(self, u, root)

    def gather(self, u: LocalArray, root: Rank = 0) -> RootArray:
        """Assemble the blocks of all ranks on the root.

        Parameters
        ----------
        u : array of shape (..., *local_shape)
        root : int

        Returns
        -------
        array
            On the root, an array of shape (..., *shape); on other ranks an empty array, with length 0 along the grid's
            first dimension.

        Raises
        ------
        TypeError, ValueError
            If `u` isn't an array of that shape; on all ranks, if the blocks don't fit together.

        Adjoint
        -------
        Each rank gets the cotangent of its block: `scatter`.

        Examples
        --------
        >>> rank = mpiad.mpi_rank()
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> whole = domain.gather(x)
        >>> print(np.array_equal(whole, np.arange(12)) == (rank == 0))
        True
        """
        return scatter_gather.gather(self, u, root)

    def owner(self, index: Array) -> Array:
        """Return the ranks that own cells.

        Parameters
        ----------
        index : int array of shape (..., dimensions), or a tuple of int for one cell
            Indices in the whole grid: any integers along periodic dimensions, nonnegative integers along other dimensions.

        Returns
        -------
        int array of shape (...), or int for one cell

        Raises
        ------
        IndexError
            If a cell isn't in the grid.
        TypeError, ValueError
            If `index` isn't an array of integers of that shape.

        Ranks
        -----
        Any rank may call it; there is no communication.

        Examples
        --------
        >>> size = mpiad.mpi_size()
        >>> domain = mpiad.Domain(12)
        >>> print(domain.owner([0]) == 0, domain.owner([11]) == size - 1)
        True True
        """
        return scatter_gather.owner(self, index)

    def to_local(self, index: Array, *, halo: bool = False) -> Array:
        """Convert indices of the whole grid to indices of this rank's block.

        Parameters
        ----------
        index : int array of shape (..., dimensions), or a tuple of int for one cell
            As in `owner`.
        halo : bool
            Whether to return indices in the block with its halo. If True, cells of the halo are allowed.

        Returns
        -------
        int array of the shape of `index`
            The value of one cell is ``u[tuple(local)]``; the values of a list of cells are ``u[tuple(local.T)]``.

        Raises
        ------
        IndexError
            If a cell isn't in the grid, or isn't in this rank's block.

        Ranks
        -----
        Any rank may call it; there is no communication.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> first = domain.owned[0].start
        >>> print(domain.to_local([first]), domain.to_global([0]) - first)
        [0] [0]
        """
        return scatter_gather.to_local(self, index, halo)

    def to_global(self, index: Array, *, halo: bool = False) -> Array:
        """Convert indices of this rank's block to indices of the whole grid.

        Parameters
        ----------
        index, halo
            Indices in this rank's block, as `to_local` returns them.

        Returns
        -------
        int array of the shape of `index`

        Raises
        ------
        IndexError
            If an index isn't in the block, or is in a halo beyond a physical side.

        Ranks
        -----
        Any rank may call it; there is no communication.
        """
        return scatter_gather.to_global(self, index, halo)

    def coordinates(
        self,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
        halo: bool = False,
    ) -> tuple[LocalArray, ...]:
        """Return the coordinates of this rank's cells: one array per dimension; the arrays broadcast to the block's shape.

        Parameters
        ----------
        spacing, origin : float, or one per dimension
            Cell i lies at ``origin + i * spacing``.
        extent : float, or a length or pair (low, high) for each dimension, optional
            The interval that the whole grid covers, instead of `spacing` and `origin`. The first and last cells lie at the
            ends of the interval. Along a periodic dimension, the upper end of the interval coincides with the first cell.
        centred : bool
            Whether to shift cells by half a spacing. With `extent`, cells then lie at the centers of equal intervals.
        halo : bool
            Whether to include the cells of the halo.

        Returns
        -------
        tuple of array
            In two dimensions, arrays of shapes (n, 1) and (1, m).

        Raises
        ------
        ValueError
            If an argument doesn't have one entry per dimension of the grid.

        Ranks
        -----
        Any rank may call it; there is no communication.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates(0.5)
        >>> print(domain.min(x), domain.max(x))
        0.0 5.5
        """
        return interpolation.coordinates(self, lattice_of(self, spacing, origin, extent, centred), halo)

    def locate(
        self,
        points: Array,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
    ) -> Location:
        """Return the owners of points, their cells, and their positions between cells.

        Parameters
        ----------
        points : array of shape (..., dimensions)
            Coordinates; along periodic dimensions any finite number is valid.
        spacing, origin, extent, centred
            Positions of the cells, as in `coordinates`.

        Returns
        -------
        Location
            ``owner`` of shape (...): the rank that owns ``cell``. ``cell`` of shape (..., dimensions): the index, in the
            whole grid, of the last cell at or before the point along each dimension. Along nonperiodic dimensions, a point
            at the last cell has the index of the cell before it. ``fraction`` of the shape of `points`: the distance from
            ``cell``, in units of the spacing, from 0 to 1; differentiable. For points on a device the results are computed
            on the host and copied to the device.

        Raises
        ------
        ValueError
            If a point lies outside the grid, that is, before its first cell or beyond its last cell.
        TypeError
            If `points` isn't an array of real numbers.

        Ranks
        -----
        Any rank may call it; there is no communication.

        Adjoint
        -------
        The cotangent of `fraction`, divided by the spacing, goes to `points`.
        """
        return interpolation.locate(self, points, lattice_of(self, spacing, origin, extent, centred))

    def interpolate(
        self,
        u: LocalArray,
        points: Array,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
        result: str = "all",
    ) -> Array:
        """Interpolate a field at points, linearly along each dimension.

        Parameters
        ----------
        u : array of shape (..., *local_shape)
        points : array of shape (..., dimensions)
            Coordinates. With ``result="own"`` each rank passes its own points, otherwise all ranks pass the same points.
            For a field on a device, points on the host are faster: each call copies points on a device to the host.
        spacing, origin, extent, centred
            Positions of the cells, as in `coordinates`.
        result : {"all", "share", "own"}
            "all": every rank gets the values at all points. "share": a rank gets the values at the points in its block, and
            zeros at all other points. The sum of the shares over the ranks is the result of "all", so a program that adds
            the results of many steps can reduce once, at the end. "own": each rank gets the values at its own points.

        Returns
        -------
        array
            The leading axes of `u`, then all axes of `points` but the last; doubles for a field of integers or booleans.

        Raises
        ------
        ValueError
            If a point lies outside the grid (with "own", on all ranks), or `result` is unknown. With "all", on all ranks,
            if points differ between ranks so that a point has no owner or several owners.
        ReplicationError
            On all ranks, under ``MPIAD_DEBUG=1`` and with "all" or "share", if points differ between ranks in any bit.
        TypeError
            If `u` or `points` isn't a supported array; if points are on a device and `u` isn't.

        Ranks
        -----
        All ranks call it. With "own", points and values are sent only between the rank that passes a point and the rank
        that owns it, after the ranks have exchanged the numbers of these points.

        Adjoint
        -------
        The cotangent of a value, times the interpolation weights, is added to the cotangents of the cells around the point.
        The cotangent of a value, times the slopes between these cells, is added to the cotangent of the point.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> print(domain.interpolate(x**2, [[1.0], [2.5]]))
        [1.  6.5]
        """
        lattice = lattice_of(self, spacing, origin, extent, centred)
        return interpolation.interpolate(self, self._tables, u, points, lattice, result)

    def deposit(
        self,
        points: Array,
        values: Array,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
    ) -> LocalArray:
        """Add values at points to the cells around them, with the weights of linear interpolation.

        This is the transpose of `interpolate` with ``result="own"``. Use it for sources between cells, or for particles.

        Parameters
        ----------
        points : array of shape (..., dimensions)
            Coordinates of this rank's points, anywhere in the grid; in a periodic dimension also between the last cell and
            the first one.
        values : array of floats
            The axes are any leading axes, followed by all axes of `points` but the last.
        spacing, origin, extent, centred
            Positions of the cells, as in `coordinates`.

        Returns
        -------
        array of shape (..., *local_shape)
            For each cell, the sum over the points of all ranks.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if an argument is invalid, a point lies outside the grid, or the dtype or leading axes of `values`
            differ between ranks.

        Ranks
        -----
        All ranks call it, each with its own points, or with none. Messages are those of ``interpolate(result="own")``.

        Adjoint
        -------
        A value gets the cotangent, interpolated at its point; a point gets the slope of the cotangent times the value.

        Examples
        --------
        >>> rank = mpiad.mpi_rank()
        >>> domain = mpiad.Domain(8)
        >>> point = np.array([[2.25]]) if rank == 0 else np.zeros((0, 1))
        >>> source = domain.deposit(point, 4.0 * np.ones(len(point)))
        >>> print(domain.sum(source), domain.max(source))
        4.0 3.0
        """
        return interpolation.deposit(self, self._tables, points, values, lattice_of(self, spacing, origin, extent, centred))

    def sum(self, u: LocalArray) -> ReplicatedArray:
        """Return the sum of an array over the whole grid.

        Parameters
        ----------
        u : array of shape (..., *local_shape)

        Returns
        -------
        scalar
            The sum over all axes, the same on all ranks.

        Adjoint
        -------
        The cotangent of every cell is the sum of all ranks' cotangents.
        """
        return mpi_allreduce(anp.sum(checked_block(self, u, "Domain.sum")), comm=self.comm)

    def mean(self, u: LocalArray) -> ReplicatedArray:
        """Return the mean of an array over the whole grid; see `sum`."""
        lead = np.shape(getval(u))[: -len(self.shape)]
        return self.sum(u) / math.prod(lead + self.shape)

    def dot(self, u: LocalArray, v: LocalArray) -> ReplicatedArray:
        """Return the sum of the product of two arrays over the whole grid, without conjugation; see `sum`.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> u = np.ones(domain.local_shape)
        >>> print(domain.dot(u, 2 * u), domain.mean(u))
        24.0 1.0
        """
        u = checked_block(self, u, "Domain.dot")
        return self.sum(u * checked_block(self, v, "Domain.dot"))

    def gram(self, u: LocalArray, v: LocalArray) -> ReplicatedArray:
        """Return the inner products of k arrays with l other arrays over the whole grid, in one reduction.

        Parameters
        ----------
        u : array of shape (k, *local_shape)
        v : array of shape (l, *local_shape)

        Returns
        -------
        array of shape (k, l)
            Products without conjugation, as in `dot`; the same on all ranks.

        Adjoint
        -------
        The cotangents of u and v are G v and Gᵀ u, where G is the sum of all ranks' cotangents of the result.
        """
        for fields in (u, v):
            if np.ndim(getval(checked_block(self, fields, "Domain.gram"))) != len(self.shape) + 1:
                raise ValueError(
                    f"Domain.gram: expected arrays of shape (k, {listed(self.local_shape)}), "
                    f"but got {np.shape(getval(fields))}."
                )
        flat = [anp.reshape(fields, (np.shape(getval(fields))[0], math.prod(self.local_shape))) for fields in (u, v)]
        return mpi_allreduce(anp.dot(flat[0], flat[1].T), comm=self.comm)

    def norm(self, u: LocalArray) -> ReplicatedArray:
        """Return the square root of the sum of |u|² over the whole grid; the derivative at u = 0 is zero.

        See `sum` for arguments and errors.
        """
        u = checked_block(self, u, "Domain.norm")
        if getval(u).dtype.kind in "biu":  # squares of integers of few bits would overflow
            u = u.astype(float)
        square = anp.real(self.dot(anp.conj(u), u))
        if is_device_array(getval(square)):  # no Python branch, which would copy the square to the host
            zero = getval(square) == 0
            # If the square is zero, it is replaced by one in the root, since the derivative would be zero times infinity.
            return anp.where(zero, square**1.5, anp.sqrt(anp.where(zero, 1.0, square)))
        # At zero the first derivative of the power is zero, and its second derivative is NaN: the norm has none.
        return anp.sqrt(square) if getval(square) else square**1.5

    def max(self, u: LocalArray) -> ReplicatedArray:
        """Return the largest value of the whole grid; NaN if any cell is NaN.

        Parameters
        ----------
        u : real array of shape (..., *local_shape)

        Returns
        -------
        scalar
            The same on all ranks.

        Adjoint
        -------
        The sum of all ranks' cotangents goes to the cell with the largest value. If several cells have this value, the sum
        is divided equally among their ranks, and on each rank among its cells. All cotangents are NaN if a cell is NaN.
        """
        return mpi_allreduce(anp.max(checked_block(self, u, "Domain.max")), MAX, comm=self.comm)

    def min(self, u: LocalArray) -> ReplicatedArray:
        """Return the smallest value of the whole grid; see `max`."""
        return mpi_allreduce(anp.min(checked_block(self, u, "Domain.min")), MIN, comm=self.comm)

    def minimize(
        self,
        fun: Function,
        x0: LocalArray | Tree,
        *,
        method: str = "L-BFGS-sharded",
        jac: Function | bool | None = None,
        hessp: Function | None = None,
        bounds: Sequence | scipy.optimize.Bounds | None = None,
        constraints: Sequence | dict | scipy.optimize.LinearConstraint | scipy.optimize.NonlinearConstraint = (),
        tol: float | None = None,
        options: dict | None = None,
        callback: Function | None = None,
        objective: str = "root",
        args: tuple = (),
        checkpoint: str | PathLike[str] | tuple | None = None,
        progress: bool = False,
    ) -> scipy.optimize.OptimizeResult:
        """Minimize a function of a field; each rank has its own block of the field.

        This is `mpiad.minimize` with a method for distributed variables. Inner products are sums over the whole grid.

        Parameters
        ----------
        fun : callable
            ``fun(u, *args)`` is called on every rank r with the block of r, and returns a real number L_r; see `objective`.
        x0 : array of shape (..., *local_shape), or pytree of them
            This rank's block of the starting point.
        method : {"L-BFGS-sharded", "Newton-CG-sharded", "MMA-sharded"}
        jac, hessp, bounds, constraints, tol, options, callback, args, progress
            As in `minimize`. Points, gradients and products with the Hessian are those of this rank's block; bounds and the
            columns of a LinearConstraint are those of the block, flattened.
        objective : {"root", "sum", "mean"}
            The minimized function J: L_0 (for a `fun` that returns `Domain.sum`), the sum of all L_r, or their mean.
        checkpoint : path or mpiad.optimize.CheckpointFile, optional
            As in `minimize`. Each rank writes files next to this path; any number of ranks can resume from these files.

        Returns
        -------
        mpiad.optimize.MinimizeResult
            As in `minimize` with this method, also for exceptions and the adjoint: `x` and `jac` are this rank's blocks.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> result = domain.minimize(lambda u: domain.sum((u - x) ** 2), np.zeros(domain.local_shape))
        >>> print(np.allclose(result.x, x))
        True
        """
        function = {"jac": jac, "hessp": hessp, "objective": objective, "args": args}
        solver = {"bounds": bounds, "constraints": constraints, "tol": tol, "options": options}
        output = {"callback": callback, "progress": progress}
        return higher_layers.minimize_field(self, fun, x0, method, checkpoint, **function, **solver, **output)

    def normal(self, rng: Rng = None, shape: Shape = ()) -> LocalArray:
        """Return this rank's block of independent standard normal numbers.

        The number of a cell is the Box-Muller transform of two numbers of a counter-based generator, whose key is drawn
        from `rng`. It depends only on the key and the cell's index in the grid, and not on the number of ranks.

        Parameters
        ----------
        rng : Generator, SeedSequence or int, optional
            The source of the key, the same on all ranks; each call advances a Generator by 128 bits. For None the root
            draws the key from the system's entropy.
        shape : tuple of int
            Leading axes, for several independent fields.

        Returns
        -------
        array of shape (*shape, *local_shape)

        Raises
        ------
        TypeError, ValueError
            If `rng` is none of the above. On all ranks, under ``MPIAD_DEBUG=1``, if arguments differ.

        Ranks
        -----
        All ranks call it with the same rng and shape. It communicates only for ``rng=None``, and under ``MPIAD_DEBUG=1``
        to compare the arguments.

        Adjoint
        -------
        None: the result is a constant.

        References
        ----------
        J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11 (2011).
        """
        return random_fields.normal(self, rng, shape)

    def save(self, path: str | PathLike[str], u: LocalArray) -> None:
        """Write a field atomically to one file, which `numpy.load` reads as the whole array.

        Parameters
        ----------
        path : path
            The same on all ranks, on a file system that all ranks share. The suffix ``.npy`` isn't added.
        u : array of shape (..., *local_shape)
            This rank's block, on the host; leading axes and dtype are the same on all ranks.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if any rank's `u` isn't such an array of numbers, or if paths, leading axes or dtypes differ.
        OSError
            On all ranks, if the file can't be written, or `path` is a folder, pipe or device. An existing file is then
            unchanged.

        Ranks
        -----
        All ranks call it. They write a file with a random name in the folder of `path`, and rename it at the end. If
        several jobs save to the same path, the last one replaces the file.
        """
        return scatter_gather.save(self, path, u)

    def load(self, path: str | PathLike[str]) -> LocalArray:
        """Read this rank's block of a field from a file written by `save`, on any number of ranks, or by `numpy.save`.

        Parameters
        ----------
        path : path

        Returns
        -------
        array of shape (..., *local_shape)

        Raises
        ------
        OSError, ValueError
            On all ranks, if the file doesn't exist, is damaged or truncated, or contains an array for another grid.

        Ranks
        -----
        All ranks call it. They read the same file, even if another job saves to the path at the same time.
        """
        return scatter_gather.load(self, path)
