"""L-BFGS and Newton-CG with variables distributed over the ranks: only scalars are sent to the root, which decides."""

from mpiad.optimize.sharded.sharded_solve import LocalArguments, Sharded, check_local_arguments

__all__ = ["LocalArguments", "Sharded", "check_local_arguments"]
