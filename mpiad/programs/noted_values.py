"""The values of a trace: a number for each, and what is known of the memory that they lie in.

Arrays that are not traced are constants, kept as they are when they are used. A traced array that is written to gets the
number of the result; other names of the same memory are stale from then on.
"""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.programs.same_bits import is_writable, same_bits
from mpiad.programs.steps import Constant, Ref, Traced, mapped
from mpiad.transport.device_arrays import is_device_array

_OBJECT = np.dtype(object)


class NotedValues:
    """What a recorder knows of its values.

    - `specs`: of each value.
    - `constants`: as they were when they were used: copies of those that can change.
    - `inputs`: numbers of the arguments.
    - `weak`: numbers that are Python's.
    """

    def __init__(self, kind: type):
        self.kind = kind
        self.specs: list[tuple[Shape, np.dtype]] = []
        self.constants: list[Array] = []
        # By identity, what isn't an array and is handed on from step to step: requests under way, records of tapes.
        self._objects: dict[int, tuple[Any, int]] = {}
        self._constant_of: dict[int, tuple[Any, int]] = {}
        self._holders: dict[int, WeakSet[Any]] = {}
        # By identity, which is nobody else's as long as they are kept.
        self._inputs: dict[int, Array] = {}
        self.inputs: list[int] = []
        self.weak: set[int] = set()

    def refuse(self, reason: str) -> NoReturn:
        """Give the trace up."""
        raise NotImplementedError

    def is_noting(self) -> bool:
        """Tell whether what is done with traced arrays is noted."""
        raise NotImplementedError

    def input(self, value: Any, weak: bool = False) -> Any:
        """Return a traced array for an argument; `weak`: a number of Python's."""
        made = self._wrapped(value)
        if weak:
            self.weaken(made)
        self.inputs.append(made.number)
        if isinstance(value, np.ndarray):
            root = _root(value)
            self._inputs[id(root)] = root
        return made

    def weaken(self, made: Any) -> Any:
        """Take a number for one of Python's, and return it."""
        if isinstance(made, Traced) and self.is_noting():
            made.weak = True
            self.weak.add(made.number)
        return made

    def _number(self, value: Any) -> int:
        self.specs.append((value.shape, value.dtype))
        return len(self.specs) - 1

    def _number_of_object(self, found: Any) -> int:
        self.specs.append(((), _OBJECT))
        if found is not None:
            self._objects[id(found)] = found, len(self.specs) - 1
        return len(self.specs) - 1

    def _wrapped(self, value: Any) -> Any:
        made = self.kind(self, self._number(value), value)
        if isinstance(value, np.ndarray):
            self._holders.setdefault(id(_root(value)), WeakSet()).add(made)
        return made

    def _noted(self, x: Any) -> Any:
        """Return arguments with references to values and constants."""
        return mapped(x, self._noted_leaf)

    def _noted_leaf(self, x: Any) -> Any:
        if isinstance(x, Traced):
            if x.recorder is not self:
                x.recorder.is_noting()
                return self._constant(np.asarray(x.value))  # of a trace that is given up by this
            if x.stale is not None:
                self.refuse("it reads an array after other names of the same memory were written to")
            return Ref(x.number)
        if id(x) in self._objects:
            return Ref(self._objects[id(x)][1])
        if is_device_array(x):
            self.refuse("it computes with an array on a device, and only NumPy's are compiled yet")
        if type(x) is np.ndarray:
            return self._constant(x)
        return self._constant(np.asarray(x)) if isinstance(x, np.ndarray) else x

    def _constant(self, x: Array) -> Constant:
        known = self._constant_of.get(id(x))
        if known is None or not same_bits(self.constants[known[1]], x):
            stays = x.flags.c_contiguous and x.flags.aligned and not is_writable(x)
            self.constants.append(x if stays else x.copy())
            known = self._constant_of[id(x)] = x, len(self.constants) - 1
        return Constant(known[1])

    def _check_writing(self, target: Any) -> None:
        if id(_root(target.value)) in self._inputs:
            self.refuse("it changes an argument in place: work on a copy, or write y = x + 1 instead of x += 1")

    def _written(self, target: Any, number: int, part: Any = None) -> None:
        for other in self._holders.get(id(_root(target.value)), ()):
            if other is not target and other is not part and np.shares_memory(other.value, target.value):
                other.stale = target
        target.number = number


def _root(value: Any) -> Any:
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return value
