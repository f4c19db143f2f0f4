"""What Gaussian priors share: their cost, samples, and the checks of their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import LocalArray, ReplicatedArray
from mpiad.domain import Domain
from mpiad.primitives import stop
from mpiad.transport import channel
from mpiad.transport.agreement import raising_together, require_same

__all__ = ["GaussianPrior", "agreed_fields", "own_block", "positive"]


class GaussianPrior:
    """A Gaussian random field on the cells of a domain.

    Attributes
    ----------
    domain : Domain
    mean : array of shape local_shape
        This rank's block, as all others.
    variance : array of shape local_shape
        Of each cell.
    noise : tuple of int
        Leading shape of the noise that `sqrt` takes.

    Examples
    --------
    >>> from mpiad.inverse import Bilaplacian, GaussianPrior
    >>> prior = Bilaplacian(mpiad.Domain(32), correlation_length=8.0)
    >>> m = prior.sample(seed=1)
    >>> print(isinstance(prior, GaussianPrior), np.allclose(prior.solve(prior.apply(m)), m))
    True True
    """

    domain: Domain
    mean: LocalArray
    variance: LocalArray
    noise: tuple[int, ...] = ()

    def apply(self, v: LocalArray) -> LocalArray:
        """Return the product of the inverse covariance with blocks (..., *local_shape); collective, differentiable."""
        raise NotImplementedError

    def solve(self, g: LocalArray) -> LocalArray:
        """Return the product of the covariance with plain blocks (..., *local_shape), solved for together; collective."""
        raise NotImplementedError

    def precondition(self, r: LocalArray) -> LocalArray:
        """Return about what `solve` does, symmetric and positive definite, by a V-cycle for each solve; collective."""
        raise NotImplementedError

    def sqrt(self, xi: LocalArray) -> LocalArray:
        """Return S ξ, where S Sᵀ is the covariance, of plain noise of shape (*noise, *local_shape); collective."""
        raise NotImplementedError

    def cost(self, m: LocalArray) -> ReplicatedArray:
        """Return half the square of m - mean in the inverse covariance: the negative log of the density, but a constant.

        Parameters
        ----------
        m : array of shape local_shape

        Returns
        -------
        scalar
            The same on all ranks.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        To m the inverse covariance's product with m - mean.
        """
        away = m - self.mean
        return 0.5 * self.domain.dot(away, self.apply(away))

    def sample(self, seed: int) -> LocalArray:
        """Return this rank's block of a sample, the same on any number of ranks; collective."""
        return self.mean + self.sqrt(self.domain.normal(seed, self.noise))


def positive(value: object, name: str) -> float:
    """Return a positive number; a ValueError where it isn't one."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if 0.0 < number < math.inf:
        return number
    raise ValueError(f"{name} must be a positive number, but got {value!r:.60}.")


def own_block(domain: Domain, block: LocalArray, call: str, several: bool = False) -> LocalArray:
    """Return this rank's plain block; a ValueError on all ranks, where one has a block of another grid; collective.

    With `several` it may be some blocks, along leading axes.
    """
    with raising_together(channel(domain.comm, call)):
        shape = np.shape(block)
        if (shape[-len(domain.shape) :] if several else shape) != domain.local_shape:
            raise ValueError(
                f"{call}: expected this rank's block of a field on a grid of {domain.shape} cells, of shape "
                f"{domain.local_shape}, but got one of shape {shape}."
            )
    return block


def agreed_fields(domain: Domain, fields: dict[str, Any], numbers: dict[str, Any], call: str) -> list[LocalArray]:
    """Return blocks of numbers or blocks, the first of which may have any sign; check all arguments on all ranks.

    By their names `fields` are numbers or arrays of shape local_shape, `numbers` what must be positive, one or one for each
    dimension, and the same on all ranks. A TypeError or ValueError on all ranks, where one of any is wrong.
    """
    if not isinstance(domain, Domain):
        raise TypeError(f"{call}: domain must be an mpiad.Domain, but got {type(domain).__name__} {domain!r:.60}.")
    used, found = channel(domain.comm, call), []
    with raising_together(used):
        for name, value in numbers.items():
            several = isinstance(value, (Sequence, np.ndarray))
            if several and len(value) != len(domain.shape):
                raise ValueError(
                    f"{call}: {name} must be a number or one for each of {len(domain.shape)} dimensions, but got "
                    f"{value!r:.60}."
                )
            for each in value if several else [value]:
                positive(each, f"{call}: {name}")
        for k, (name, value) in enumerate(fields.items()):
            block = np.asarray(stop(value), dtype=float)
            if block.shape not in ((), domain.local_shape):
                raise ValueError(
                    f"{call}: {name} must be a number or a block of shape {domain.local_shape}, but has shape "
                    f"{block.shape}."
                )
            if not np.all(np.isfinite(block)) or (k > 0 and not np.all(block > 0.0)):
                raise ValueError(f"{call}: {name} must be {'finite' if k == 0 else 'positive'}, but isn't everywhere.")
            found.append(np.broadcast_to(block, domain.local_shape).copy())
    require_same(used, ", ".join(f"{name}={value!r}" for name, value in numbers.items()), call)
    return found
