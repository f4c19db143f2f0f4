"""`Domain`: a grid divided among the ranks, with the communication that programs on it need."""

from __future__ import annotations

from mpiad.domain.field_exchange import Exchanging
from mpiad.domain.field_files import FieldFiles
from mpiad.domain.grid_sums import Reductions
from mpiad.domain.minimization import Minimization
from mpiad.domain.points import Points
from mpiad.domain.random_fields import RandomFields
from mpiad.domain.scatter_gather import Placement
from mpiad.domain.stencils import Stencils


class Domain(Exchanging, FieldFiles, Minimization, Placement, Points, RandomFields, Reductions, Stencils):
    """Divide a 1-, 2- or 3-dimensional grid among the ranks, one block for each.

    Parameters
    ----------
    shape : int or tuple of int
        Cells of the whole grid along each dimension.
    halo : int or tuple of int
        Width of the halo that `exchange` puts around a block; one number, or one for each dimension.
    periodic : bool or tuple of bool
        Whether the last cell along a dimension is followed by the first.
    dims : tuple of int, optional
        Ranks along each dimension; by default those with the least halo surface.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    shape, halo, periodic, dims : tuple
        As given or chosen, one entry for each dimension.
    position : tuple of int
        This rank's position in the grid of ranks.
    neighbours : tuple of pairs of int or None
        Ranks before and after along each dimension; None beyond a physical side.
    owned : tuple of slice
        This rank's cells, as slices of the whole grid.
    local_shape, padded_shape : tuple of int
        Cells of this rank's block, without and with its halo.
    interior : tuple of slice
        The block within the block with its halo.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if an argument is invalid or differs between ranks, a rank would own nothing, or the halo is
        wider than the smallest block.

    Ranks
    -----
    All ranks of `comm` call it, with the same arguments. A block's position follows from its rank, the last dimension
    fastest; along each dimension the first blocks are longer by one if the cells don't divide evenly.

    Examples
    --------
    >>> domain = mpiad.Domain(12)
    >>> (x,) = domain.coordinates(0.5)  # those of this rank's cells
    >>> print(domain.sum(1.0 + 0 * x), domain.max(x))
    12.0 5.5
    """
