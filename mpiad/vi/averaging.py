"""The average of the variational parameters over the last part of a run, made on the way.

At a constant learning rate the draws of each epoch push the parameters about, and they never come to rest: the mean of
many epochs lies nearer to the optimum than any one of them (Polyak and Juditsky, 1992; for variational inference, Dhaka et
al., 2020). The first epochs are still on their way there and mustn't count. So after epoch k the average goes the part
(η + 1) / (k + η) of the way to the newest parameters, which weighs epoch j by about j^η ("polynomial-decay averaging",
Shamir and Zhang, 2013). It needs one copy, and it doesn't need to know when the run ends.

With η = 8 it is as old and as steady as the plain mean of the last fifth of the epochs: the weights' mean age is the part
1 / (η + 2) = 1/10 of the run, and the sum of their squares (η + 1)² / (2η + 1) ≈ 5 by the number of epochs.
"""

from __future__ import annotations

from mpiad._typing import Tree
from mpiad.differentiation.trees import flatten, is_variable
from mpiad.vi.placement import copied

__all__ = ["Average"]

_ETA = 8


class Average:
    """A weighted mean of the parameters that were added, the last fifth of them above all.

    Attributes
    ----------
    params : nest of arrays
        The mean, where the parameters lie. Leaves that aren't floats are the newest.
    """

    def __init__(self) -> None:
        self.params: Tree = None
        self._count = 0

    def add(self, params: Tree) -> None:
        """Let the mean go its part of the way to further parameters; these may be overwritten afterwards."""
        self._count += 1
        if self._count == 1:
            self.params = copied(params)
            return
        part = (_ETA + 1) / (self._count + _ETA)
        means, build = flatten(self.params)
        for k, leaf in enumerate(flatten(params)[0]):
            if is_variable(leaf):
                means[k] += part * (leaf - means[k])  # in memory of its own; a scalar is replaced
            else:
                means[k] = leaf
        self.params = build(means)
