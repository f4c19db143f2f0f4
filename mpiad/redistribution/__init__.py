"""Data between any ranks: entries that other ranks own, by their global numbers."""

from mpiad.redistribution.ghosts import GhostExchange

__all__ = ["GhostExchange"]
