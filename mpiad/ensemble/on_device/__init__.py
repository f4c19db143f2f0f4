"""Ensembles whose states are device arrays: all trajectories in rounds, with one small copy to the host per round.

Columns aren't gathered or compared from round to round as on the host. Steps that aren't accepted are masked, trajectories
that have ended stay with steps of length zero until half of all have, and per round the host reads two numbers: the number
of trajectories that still move, and the number of saved times in the longest step. The record of a round is the states
before it with the steps, so that derivatives go through the same rounds, backwards or forwards.
"""

from mpiad.ensemble.on_device.rounds import integrate

__all__ = ["integrate"]
