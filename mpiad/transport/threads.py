"""Limit the threads of BLAS where the ranks of a node would fight for its cores."""

from __future__ import annotations

import logging
import os

import threadpoolctl

from mpiad.cache_folder import first_time

__all__ = ["limit_threads"]

_log = logging.getLogger("mpiad")
_TOLD = "told-of-threads"
_USERS_OWN = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "MPIAD_THREADS")


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def limit_threads(ranks_on_node: int, logs: bool) -> int | None:
    """Limit each rank's thread pools to its share of the node's cores, unless the user has set them.

    Parameters
    ----------
    ranks_on_node : int
        Number of ranks that share this node.
    logs : bool
        Whether this rank writes the line that says so to the log, the first time that it happens to this user.

    Returns
    -------
    int or None
        The number of threads that each pool was limited to, or None where nothing was changed.
    """
    if ranks_on_node < 2 or any(name in os.environ for name in _USERS_OWN):
        return None
    share = max(1, _cores() // ranks_on_node)
    pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
    if pools and max(pools) <= share:
        return None
    threadpoolctl.threadpool_limits(share)
    # Libraries that are loaded later (SciPy brings a BLAS of its own) read these when they start.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(share)
    if logs and first_time(_TOLD):
        _log.warning(
            "%d ranks share %d cores: thread pools limited to %d thread(s) each. "
            "Set OMP_NUM_THREADS (or MPIAD_THREADS=0) to decide yourself. This is said once.",
            ranks_on_node, _cores(), share,
        )
    return share
