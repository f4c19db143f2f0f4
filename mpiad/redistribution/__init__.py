"""Data between any ranks: redistributions that aren't halo exchanges."""
