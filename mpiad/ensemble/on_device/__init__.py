"""Solves by array operations on a device.

In each round all trajectories attempt one step, and a few numbers are copied to the host. Rejected steps are masked. Ended
trajectories take steps of size zero, until at least half of the columns have ended and are removed. For derivatives, the
steps of each round and the states before it are recorded, and sweeps visit the rounds again, backwards or forwards.
"""

from mpiad.ensemble.on_device.rounds import integrate

__all__ = ["integrate"]
