"""Contractions over a few components as parts of loops: a 3 x 3 matrix times the components of a field, entry by entry.

NumPy's products are calls on whole arrays, and what comes before and after them is in memory then. Where what is summed
over is short, the sum is written out, term by term; so are the components of the result that a field among the operands
doesn't have. They are arrays of their own, put together, and so all components are computed in one loop over the field, in
which each entry of what is contracted is computed once. Long contractions stay calls: there BLAS is faster.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from functools import partial, reduce
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiad._typing import Shape
from mpiad.differentiation.rules.einsum import letters_of
from mpiad.programs.array_program import SHORT, Opaque, Value
from mpiad.programs.index_maps import Axis

if TYPE_CHECKING:
    from mpiad.programs.trace_translation import Translation

# So many products are written out at most. What has no more entries may be read once more at each place of a loop.
_MOST_TERMS = _SMALL = 64


def einsum(t: Translation, shape: Shape, dtype: np.dtype, subscripts: Any, *operands: Any, optimize: Any = None) -> int:
    """Append what np.einsum makes of subscripts in a text."""
    if not isinstance(subscripts, str):
        raise Opaque
    inputs, out = letters_of(subscripts, [len(_value(x).shape) for x in operands])
    return _Contraction(t, dtype, operands, inputs, list(out)).made()


def matmul(t: Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
    """Append x @ y."""
    labels = [_of_matrix(_value(x), "ik"), _of_matrix(_value(y), "kj" if len(_value(y).shape) > 1 else "jk")]
    batch = range(2 - max(2, len(x.shape), len(y.shape)), 0)
    out = [*batch, *[label for found, label in zip(labels, "ij") if label in found]]
    return _Contraction(t, dtype, (x, y), labels, out).made()


def _of_matrix(x: Value, last: str) -> list[Hashable]:
    ndim = len(x.shape)
    if not ndim:
        raise Opaque
    return [*range(2 - ndim, 0), *last] if ndim > 1 else [last[1]]


def dot(t: Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
    """Append np.dot of arrays, one of which has more than one axis."""
    ndim = len(_value(y).shape)
    return tensordot(t, shape, dtype, x, y, (len(_value(x).shape) - 1, max(ndim - 2, 0)) if x.shape and ndim else 0)


def inner(t: Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
    """Append np.inner of arrays, one of which has more than one axis."""
    return tensordot(t, shape, dtype, x, y, (-1, -1) if _value(x).shape and _value(y).shape else 0)


def tensordot(t: Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any, axes: Any = 2) -> int:
    """Append np.tensordot."""
    m, n = len(_value(x).shape), len(_value(y).shape)
    axes = _numbers(t, axes)
    pair = (range(m - axes, m), range(axes)) if isinstance(axes, int) else axes
    of_x, of_y = [(k,) if isinstance(k, int) else k for k in pair]
    first: list[Hashable] = [("x", k) for k in range(m)]
    second: list[Hashable] = [("y", k) for k in range(n)]
    for k, j in zip(of_x, of_y, strict=True):
        second[j] = first[k]
    out = [label for label in (*first, *second) if (label in first) != (label in second)]
    return _Contraction(t, dtype, (x, y), [first, second], out).made()


def _numbers(t: Translation, x: Any) -> Any:
    """Return whole numbers that came as arrays, or lists of them, as Python's."""
    if isinstance(x, Value):
        node = t.program.nodes[x.number]
        if node.kind != "constant":
            raise Opaque
        return t.program.constants[node.data].tolist()
    return [_numbers(t, part) for part in x] if isinstance(x, Iterable) else int(x)


def _value(x: Any) -> Value:
    if not isinstance(x, Value):
        raise Opaque
    return x


class _Contraction:
    """A sum of products.

    `labels`: a label for each axis of each operand, as in Einstein's notation. `out`: labels of the result's axes.
    """

    def __init__(self, t: Translation, dtype: np.dtype, operands: Sequence[Value], labels: Any, out: list[Hashable]):
        self.t, self.dtype, self.labels, self.out = t, dtype, labels, out
        self.operands = [t.of(x, dtype) for x in operands]
        self.lengths: dict[Hashable, int] = {}
        for x, found in zip(self.operands, labels):
            for label, n in zip(found, x.shape):
                self.lengths[label] = max(n, self.lengths.get(label, 1))
        self.written, self.folded = self._parted([math.prod(x.shape) for x in self.operands])

    def _parted(self, sizes: Sequence[int]) -> tuple[set[Hashable], list[Hashable]]:
        """Return the labels whose places are written out, and those over which loops add; the others are loops'."""
        lengths = self.lengths
        fields = [set(found) for found, size in zip(self.labels, sizes) if size > _SMALL]
        of_fields = set(lengths).intersection(*fields)
        summed = [label for label in lengths if label not in self.out]
        folded = [label for label in summed if all(label in found for found in self.labels)]
        if max((lengths[label] for label in folded), default=0) <= SHORT:
            folded = []
        loops = {label for label in self.out if label in of_fields}
        written = lengths.keys() - loops - set(folded)
        terms = [lengths[label] for label in written]
        if folded and loops or 0 in sizes or max(terms, default=0) > SHORT or math.prod(terms) > _MOST_TERMS:
            raise Opaque
        return written, folded

    def made(self) -> int:
        """Return the node of the result."""
        self.t.program.contracts = True
        return self._put_together(0, {})

    def _put_together(self, axis: int, at: dict[Hashable, int]) -> int:
        """Return the part of the result at places of the axes before one."""
        if axis == len(self.out):
            return self._summed(at)
        label = self.out[axis]
        if label not in self.written:
            return self._put_together(axis + 1, at)
        parts = [self._put_together(axis + 1, {**at, label: k}) for k in range(self.lengths[label])]
        return self.t.program.components(parts, axis)

    def _summed(self, at: dict[Hashable, int]) -> int:
        """Return the sum of products at places of those axes of the result that are written out."""
        labels = [label for label in self.lengths if label in self.written and label not in self.out]
        places = product(*[range(self.lengths[label]) for label in labels])
        terms = [self._product(at | dict(zip(labels, place))) for place in places]
        total = reduce(partial(self._combined, np.add), terms)
        left, axes = total.shape[: len(self.out)], tuple(range(len(self.out), len(total.shape)))
        return self.t.reduce("add", total, axes, shape=left) if self.folded else total.number

    def _product(self, at: dict[Hashable, int]) -> Value:
        """Return the product of one entry, or one array, of each operand."""
        factors = [self._part(x, labels, at) for x, labels in zip(self.operands, self.labels)]
        return reduce(partial(self._combined, np.multiply), factors)

    def _part(self, x: Value, labels: Sequence[Hashable], at: dict[Hashable, int]) -> Value:
        """Return an operand at the places that are given, with the axes of loops in their order."""
        axes = [*self.out, *self.folded]
        map, shape = [], [1] * len(axes)
        for label, n in zip(labels, x.shape):
            if label in at or n == 1:  # what is of length 1 is broadcast
                map.append(Axis(None, 0, min(at.get(label, 0), n - 1)))
            else:
                place = axes.index(label)
                shape[place] = n
                map.append(Axis(place, 1, 0))
        return Value(self.t.program, self.t.program.view(x.number, tuple(map), tuple(shape)))

    def _combined(self, ufunc: np.ufunc, x: Value, y: Value) -> Value:
        shape = np.broadcast_shapes(x.shape, y.shape)
        return Value(self.t.program, self.t.computed(ufunc, [x, y], shape, self.dtype))
