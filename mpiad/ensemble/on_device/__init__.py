"""Ensembles whose states are device arrays: all trajectories in rounds, and of each round one look at a few numbers.

Nothing is gathered or compared from round to round as on the host. Steps that aren't accepted are masked, trajectories that
have ended stay with steps of length zero until half of all have, and of what happens the host learns two numbers: how many
still move, and how many saved times lie in the longest step. The record of a round is the states before it with the steps,
so that derivatives go through the same rounds, backwards or forwards.
"""

from mpiad.ensemble.on_device.rounds import integrate

__all__ = ["integrate"]
