"""L-BFGS, Newton-CG and MMA for distributed variables: only scalars are sent to the root, which makes all decisions."""

from mpiad.optimize.sharded.sharded_solve import LocalArguments, Sharded, check_local_arguments

__all__ = ["LocalArguments", "Sharded", "check_local_arguments"]
