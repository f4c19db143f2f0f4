"""`Domain.minimize`: `mpiad.minimize` for distributed fields."""

from __future__ import annotations

from importlib import import_module
from os import PathLike
from typing import Any

import scipy

from mpiad._typing import Function, LocalArray, Tree
from mpiad.domain.decomposition import Decomposition, checked_block
from mpiad.pytrees import flatten, is_variable
from mpiad.transport.core.agreement import raising_together
from mpiad.transport.devices.device_arrays import is_array

_CALL = "Domain.minimize"


def minimize(
    domain: Decomposition, fun: Function, x0: LocalArray | Tree, method: str, checkpoint: object, **keywords: Any
) -> scipy.optimize.OptimizeResult:
    """See `Domain.minimize`."""
    with raising_together(domain._channel):
        if not (isinstance(method, str) and method.lower().endswith("-sharded")):
            raise ValueError(
                f"{_CALL}: method must be 'L-BFGS-sharded', 'Newton-CG-sharded' or 'MMA-sharded', for which each rank has "
                f"its own block, but got {method!r}. Use mpiad.minimize for methods that need all variables on the root."
            )
        for leaf in [x0] if is_array(x0) else filter(is_variable, flatten(x0)[0]):
            checked_block(domain, leaf, _CALL)
    # Imported at the first call, because the package `optimize` imports `domain`.
    optimize = import_module("mpiad.optimize")
    file: Any = optimize.CheckpointFile(checkpoint) if isinstance(checkpoint, (str, PathLike)) else checkpoint
    # The files contain the positions of blocks, so that any number of ranks can read them.
    if isinstance(file, optimize.CheckpointFile) and file.blocks is None:
        file = file._replace(blocks=domain.owned)
    return optimize.minimize(fun, x0, method=method, comm=domain.comm, checkpoint=file, **keywords)
