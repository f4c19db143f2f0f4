"""Problems whose compiled kernels can be read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Readable"]

_KERNELS = "_kernels"


class Text(NamedTuple):
    """What a pickle has of a kernel, whose machine code is of one process."""

    text: str


class Readable:
    """A problem that knows, on a solution, the kernels that solved it."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if _KERNELS in state:
            state[_KERNELS] = {name: Text(kernel.text) for name, kernel in state[_KERNELS].items()}
        return state

    def kernel_source(self, name: str = "forward") -> str:
        """Return the source of a kernel that a solve compiled, as ``sol.problem.kernel_source()``.

        Parameters
        ----------
        name : {"forward", "reverse"}
            The solve, or, after a gradient by an adjoint, the way back over its steps.

        Raises
        ------
        ValueError
            Where there is none.
        """
        kernels: Mapping[str, Any] = self.__dict__.get(_KERNELS, {})
        if name not in kernels:
            raise ValueError(
                f"kernel_source: there is no {name!r} kernel of this problem, only {sorted(kernels)}. Ask the problem of a "
                "solution: solve(problem, compile=True).problem.kernel_source()."
            )
        return kernels[name].text

    def read_from(self, kernels: Mapping[str, Any]) -> Any:
        """Return the problem as that of a solution, with the kernels by their names."""
        made = copy.copy(self)
        made.__dict__[_KERNELS] = kernels
        return made
