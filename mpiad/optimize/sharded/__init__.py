"""L-BFGS and Newton-CG with the variables in pieces on their ranks: nothing is gathered; a root leads in small sums."""

from mpiad.optimize.sharded.sharded_solve import Piece, Sharded, piece_of

__all__ = ["Piece", "Sharded", "piece_of"]
