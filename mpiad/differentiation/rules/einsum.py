"""Einstein summation: as products of matrices, and its adjoint.

NumPy's `einsum` loops over all indices. `contraction` reshapes two operands to matrices, or stacks of them, as views if
possible, and calls `matmul`, which is BLAS; it contracts more than two operands in pairs. `autograd.numpy.einsum` of NumPy
arrays calls it, too.

Autograd's adjoint fails for device arrays if an index occurs in one operand only, and is wrong if an operand has length one
along an axis and another operand is longer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from string import ascii_letters, ascii_lowercase, ascii_uppercase
from typing import Any

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, Shape
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.expansion import expand
from mpiad.differentiation.rules.protocol import Argnums, Vjp, identity, substitute

_LETTERS = ascii_uppercase + ascii_lowercase  # for the numbers in lists of subscripts, as in NumPy
_BLAS = "fdFD"  # the dtypes that BLAS multiplies
# Number of terms, and length of the result of a matrix times a vector, up to which NumPy's loops are as fast.
_FEW, _SHORT = 1 << 14, 7
_NARROW = 32  # columns


def contraction(subscripts: str, operands: Sequence[Array]) -> Array | None:
    """Return `einsum` of arrays, which may be traced by `jit`; None for calls that must be left to `numpy.einsum`."""
    if len(operands) < 2 or not all(hasattr(x, "dtype") and x.dtype.char in _BLAS for x in operands):
        return None
    inputs, out, path, count = _path(subscripts, tuple([x.shape for x in operands]))
    if not path or count <= _FEW and all(type(x) is np.ndarray for x in operands):
        return None
    terms = list(zip(operands, inputs))
    for places in path:
        chosen = [terms.pop(place) for place in sorted(places, reverse=True)][::-1]
        while len(chosen) > 1:
            (x, a), (y, b), *rest = chosen
            needed = "".join([out, *[letters for _, letters in terms + rest]])
            made = "".join([letter for letter in dict.fromkeys(a + b) if letter in needed]) if terms or rest else out
            chosen = [(_product(x, a, y, b, made), made), *rest]
        terms += chosen
    return terms[0][0] if out else terms[0][0][()]


@lru_cache(maxsize=1024)
def _path(subscripts: str, shapes: tuple[Shape, ...]) -> tuple[list[str], str, list[tuple[int, ...]], int]:
    """Return the letters of operands and result, the operands of each step, and the number of terms.

    There are no steps if the subscripts are wrong, for which NumPy raises its error, or repeat a letter in an operand.
    """
    inputs, out = letters_of(subscripts, [len(shape) for shape in shapes])
    path: Any = [""]
    if all(len(set(letters)) == len(letters) for letters in inputs):
        with contextlib.suppress(ValueError, IndexError):
            path = np.einsum_path(subscripts, *[np.broadcast_to(np.int8(0), shape) for shape in shapes])[0]
    lengths = {letter: n for n, letter in sorted(zip([n for shape in shapes for n in shape], "".join(inputs)))}
    return inputs, out, path[1:], math.prod(lengths.values())


def _product(x: Array, a: Sequence[str], y: Array, b: Sequence[str], out: str) -> Array:
    """Contract two operands, whose axes have the letters `a` and `b`."""
    long = [[letter for letter, n in zip(letters, z.shape) if n != 1] for z, letters in ((x, a), (y, b))]
    (x, a), (y, b) = (_summed(z, own, [*other, *out]) for z, own, other in zip((x, y), long, long[::-1]))
    lengths = dict(zip([*a, *b], [*x.shape, *y.shape]))
    target = [letter for letter in out if letter in lengths]
    batch = [letter for letter in target if letter in a and letter in b]
    # The order of the summed axes is that of the larger operand, so that this operand isn't copied.
    summed = [letter for letter in (a if x.size > y.size else b) if letter in a and letter in b and letter not in batch]
    rows, columns = [letter for letter in a if letter not in b], [letter for letter in b if letter not in a]
    if rows and columns:
        height, width = (math.prod([lengths[letter] for letter in letters]) for letters in (rows, columns))
        turned = target.index(columns[0]) < target.index(rows[0])
        if min(height, width) <= _NARROW and a[0] in summed and b[0] in summed:
            # BLAS computes xᵀy up to twice as fast if the narrow operand is the transposed one.
            turned = height > width
        if turned:
            x, a, y, b, rows, columns = y, b, x, a, columns, rows
    is_long = rows and columns or math.prod([lengths[letter] for letter in rows + columns]) > _SHORT
    if summed and is_long:
        first, second = _grouped(x, a, [*batch, rows, summed]), _grouped(y, b, [*batch, summed, columns])
        made, letters = np.matmul(_for_blas(first), _for_blas(second)), [*batch, *rows, *columns]
        made = np.reshape(made, [lengths[letter] for letter in letters])
        made = np.transpose(made, [letters.index(letter) for letter in target])
    elif summed and type(x) is type(y) is np.ndarray:
        made = np.einsum(f"{''.join(a)},{''.join(b)}->{''.join(target)}", x, y)
    else:
        made = _grouped(x, a, [*target, *summed]) * _grouped(y, b, [*target, *summed])
        made = np.sum(made, axis=tuple(range(len(target), made.ndim))) if summed else made
    return np.reshape(made, [lengths.get(letter, 1) for letter in out])


def _summed(x: Array, letters: Sequence[str], others: Sequence[str]) -> tuple[Array, list[str]]:
    """Drop the axes of length 1, and sum over axes whose letters occur neither in the result nor in the other operand."""
    x = np.reshape(x, [n for n in x.shape if n != 1])
    axes = tuple([place for place, letter in enumerate(letters) if letter not in others])
    return np.sum(x, axis=axes) if axes else x, [letter for letter in letters if letter in others]


def _grouped(x: Array, letters: Sequence[str], groups: Sequence[Sequence[str]]) -> Array:
    """Transpose an operand, with one axis for each group of letters; letters that it lacks have length 1."""
    places = [[letters.index(letter) for letter in group if letter in letters] for group in groups]
    shape = [math.prod([x.shape[place] for place in group]) for group in places]
    # Successive axes of a group are merged first, so that the result is a transposed view if possible.
    merged = {after for group in places for before, after in pairwise(group) if after == before + 1}
    first = [place for place in range(len(letters)) if place not in merged]
    x = np.reshape(x, [math.prod(x.shape[start:stop]) for start, stop in pairwise([*first, len(letters)])])
    return np.reshape(np.transpose(x, [first.index(place) for group in places for place in group if place in first]), shape)


def _for_blas(x: Array) -> Array:
    """Return an array whose last two axes BLAS reads as they are, transposed or not."""
    if type(x) is not np.ndarray:
        return x
    (m, n), (row, column) = x.shape[-2:], x.strides[-2:]
    fits = column == x.itemsize and row >= n * column or row == x.itemsize and column >= m * row
    return x if fits else np.ascontiguousarray(x)


def _einsum(*args: Any, **kwargs: Any) -> Array:
    """Compute `numpy.einsum`, by products of matrices if possible."""
    made = None
    if type(args[0]) is str and not kwargs.keys() - {"optimize"} and all(type(x) is np.ndarray for x in args[1:]):
        made = contraction(args[0], args[1:])
    return np.einsum(*args, **kwargs) if made is None else made


def einsum_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """For each operand, multiply the cotangent by the other operands, and sum over the indices that the operand lacks."""
    places = [i - 1 if isinstance(args[0], str) else i // 2 for i in argnums]
    if isinstance(args[0], str):
        subscripts, *operands = args
    else:  # subscripts as lists of numbers
        texts = ["".join(["..." if k is Ellipsis else _LETTERS[k] for k in part]) for part in [*args[1::2], *args[-1:]]]
        operands, out = list(args[0 : len(args) // 2 * 2 : 2]), f"->{texts[-1]}" if len(args) % 2 else ""
        subscripts = f"{','.join(texts[: len(operands)])}{out}"
    inputs, out = letters_of(subscripts, [len(anp.shape(operand)) for operand in operands])
    return lambda g: tuple([_part(g, k, inputs, out, operands) for k in places])


def _part(g: Array, k: int, inputs: list[str], out: str, operands: Sequence[Any]) -> Array:
    axes, shape = inputs[k], anp.shape(operands[k])
    others = [operand for j, operand in enumerate(operands) if j != k]
    subscripts = [letters for j, letters in enumerate(inputs) if j != k]
    # The cotangent is constant along an index that occurs neither in the result nor in another operand.
    present = set(out).union(*subscripts)
    kept = [letter for letter, n in dict(zip(axes, shape)).items() if letter in present and n != 1]
    part = anp.einsum(f"{','.join([out, *subscripts])}->{''.join(kept)}", g, *others)
    # If a letter is repeated, all of its axes but the first one are those of identity matrices.
    lengths, first = dict(zip(kept, anp.shape(part))), dict(zip(reversed(axes), range(len(axes) - 1, -1, -1)))
    ones = tuple([lengths.get(letter, 1) if first[letter] == place else 1 for place, letter in enumerate(axes)])
    stretched = tuple([n if first[letter] == place else 1 for place, (letter, n) in enumerate(zip(axes, shape))])
    part = anp.reshape(part, ones) if stretched == ones else expand(part, stretched, ones)
    for place, letter in enumerate(axes):
        if first[letter] != place:
            diagonal = [n if j in (first[letter], place) else 1 for j, n in enumerate(shape)]
            part = part * np.reshape(identity(part, shape[place]), diagonal)
    return fitted(part, operands[k])


def letters_of(subscripts: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand's axes, one string per operand, and the letters of the result's axes."""
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    unused = [letter for letter in ascii_letters if letter not in subscripts]
    dots = "".join(unused[: max(ndims, default=0)])
    inputs, longest = [], ""
    for part, ndim in zip(left.split(","), ndims):
        count = ndim - len(part.replace("...", ""))
        ellipsis = dots[len(dots) - count :] if "..." in part else ""
        longest = max(longest, ellipsis, key=len)
        inputs.append(part.replace("...", ellipsis))
    if arrow:
        return inputs, right.replace("...", longest)
    named = left.replace("...", "").replace(",", "")
    # Without an arrow, NumPy's result has the letters that occur once, in alphabetical order.
    return inputs, longest + "".join(sorted(letter for letter in set(named) if named.count(letter) == 1))


VJPS = {anp.einsum: einsum_vjp}
JVPS: dict = {}
substitute(anp.einsum, _einsum)
