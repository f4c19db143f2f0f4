"""L-BFGS and Newton-CG with variables distributed over the ranks: nothing is gathered; a root decides by small sums."""

from mpiad.optimize.sharded.sharded_solve import Piece, Sharded, piece_of

__all__ = ["Piece", "Sharded", "piece_of"]
