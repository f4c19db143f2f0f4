"""The same programs in one process: what the tests of the primitives are compared with. Only NumPy is used here.

The inputs x_0, ..., x_{P-1} of P ranks, flattened and joined, are one global vector, and so are their results.
A program of P ranks is then one function of a vector. Its Jacobian is built here from the definition of each
primitive: for a linear one, which entries of whose x each entry of each y_r is the sum of. Programs are tiny,
so matrices are dense. Where lists have one item for each rank, the item's place is the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """One function of the global vector.

    `jacobian(x)` is its matrix of derivatives at x, and `bend(x, v)` the derivative of that matrix along v.
    """

    in_shapes: list[Shape]
    out_shapes: list[Shape]
    value: Callable[[np.ndarray], np.ndarray]
    jacobian: Callable[[np.ndarray], np.ndarray]
    bend: Callable[[np.ndarray, np.ndarray], np.ndarray]
    linear: bool

    def __call__(self, xs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return every rank's result."""
        return split(self.value(join(xs)), self.out_shapes)

    def adjoint(self, xs: Sequence[np.ndarray], cotangents: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return every rank's cotangent of x, for every rank's cotangent of its result."""
        return split(self.jacobian(join(xs)).T @ join(cotangents), self.in_shapes)

    def tangent(self, xs: Sequence[np.ndarray], vs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return every rank's tangent, for every rank's direction."""
        return split(self.jacobian(join(xs)) @ join(vs), self.out_shapes)


def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the global vector of every rank's array, in double precision."""
    parts = [np.ravel(array) for array in arrays]
    return np.concatenate([part.astype("c16" if part.dtype.kind == "c" else "f8") for part in parts])


def split(vector: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
    """Return every rank's array of the global vector."""
    return [vector[numbers] for numbers in numbering(shapes)]


def numbering(shapes: Sequence[Shape]) -> list[np.ndarray]:
    """Return for every rank's array the places of its entries in the global vector."""
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
    return [np.arange(end - np.prod(shape, dtype=int), end).reshape(shape) for shape, end in zip(shapes, ends)]


# ---- Linear programs ----


def linear(in_shapes: Sequence[Shape], out_shapes: Sequence[Shape], matrix: np.ndarray) -> Program:
    """Return the program that multiplies by a matrix."""
    return Program(
        list(in_shapes),
        list(out_shapes),
        lambda x: matrix @ x,
        lambda x: matrix,
        lambda x, v: np.zeros_like(matrix),
        True,
    )


def sums_of(in_shapes: Sequence[Shape], terms: Sequence[list[np.ndarray]], nothing: Sequence[Shape]) -> Program:
    """Return the linear program in which y_r is the sum of some arrays of inputs.

    `terms[r]` lists them, each by the places of its entries in the global vector. Where it lists none, y_r is
    zero and has the shape `nothing[r]`.
    """
    out_shapes = [arrays[0].shape if arrays else empty for arrays, empty in zip(terms, nothing)]
    rows = numbering(out_shapes)
    matrix = np.zeros((sum(r.size for r in rows), sum(x.size for x in numbering(in_shapes))))
    for row, arrays in zip(rows, terms):
        for array in arrays:
            matrix[row.ravel(), array.ravel()] += 1
    return linear(in_shapes, out_shapes, matrix)


def bcast(shapes: Sequence[Shape], root: int) -> Program:
    """y_r = x_root."""
    x = numbering(shapes)
    return sums_of(shapes, [[x[root]] for _ in x], shapes)


def sum_to_root(shapes: Sequence[Shape], root: int) -> Program:
    """y_root = Σ_s x_s, zeros elsewhere."""
    x = numbering(shapes)
    return sums_of(shapes, [x if rank == root else [] for rank in range(len(x))], shapes)


def allreduce(shapes: Sequence[Shape]) -> Program:
    """y_r = Σ_s x_s."""
    x = numbering(shapes)
    return sums_of(shapes, [x for _ in x], shapes)


def gather(shapes: Sequence[Shape], root: int, axis: int | None = None) -> Program:
    """y_root = all x_s, stacked or joined along an axis; empty elsewhere."""
    x = numbering(shapes)
    whole = np.stack(x) if axis is None else np.concatenate(x, axis)
    empty = list(whole.shape)
    empty[axis or 0] = 0
    return sums_of(shapes, [[whole] if rank == root else [] for rank in range(len(x))], [tuple(empty)] * len(x))


def allgather(shapes: Sequence[Shape], axis: int | None = None) -> Program:
    """y_r = all x_s, stacked or joined along an axis."""
    x = numbering(shapes)
    whole = np.stack(x) if axis is None else np.concatenate(x, axis)
    return sums_of(shapes, [[whole] for _ in x], shapes)


def pieces(x: np.ndarray, size: int, axis: int | None, counts: Sequence[int] | None) -> list[np.ndarray]:
    """Return the pieces of one array for `size` ranks: of even lengths, the first ones longer, without counts."""
    if axis is None:
        return list(x)
    if counts is None:
        return np.array_split(x, size, axis)
    return np.split(x, np.cumsum(counts)[:-1], axis)


def scatter(shapes: Sequence[Shape], root: int, axis: int | None = None, counts: list[int] | None = None) -> Program:
    """y_r = the r-th piece of x_root."""
    x = numbering(shapes)
    return sums_of(shapes, [[piece] for piece in pieces(x[root], len(x), axis, counts)], shapes)


def reduce_scatter(shapes: Sequence[Shape], axis: int | None = None, counts: list[int] | None = None) -> Program:
    """y_r = Σ_s the r-th piece of x_s."""
    x = numbering(shapes)
    cut = [pieces(array, len(x), axis, counts) for array in x]
    return sums_of(shapes, [[of_rank[rank] for of_rank in cut] for rank in range(len(x))], shapes)


def alltoall(shapes: Sequence[Shape]) -> Program:
    """y_r[s] = x_s[r]."""
    x = numbering(shapes)
    return sums_of(shapes, [[np.stack([array[rank] for array in x])] for rank in range(len(x))], shapes)


def alltoallv(shapes: Sequence[Shape], counts: Sequence[Sequence[int]], axis: int = 0) -> Program:
    """y_r = the r-th pieces of all x_s, joined along an axis; `counts[s]` are the lengths of the pieces of x_s."""
    cut = [pieces(array, len(shapes), axis, list(of_rank)) for array, of_rank in zip(numbering(shapes), counts)]
    return sums_of(shapes, [[np.concatenate([of_rank[r] for of_rank in cut], axis)] for r in range(len(shapes))], shapes)


def scan(shapes: Sequence[Shape]) -> Program:
    """y_r = x_0 + ... + x_r."""
    x = numbering(shapes)
    return sums_of(shapes, [x[: rank + 1] for rank in range(len(x))], shapes)


def exscan(shapes: Sequence[Shape]) -> Program:
    """y_r = x_0 + ... + x_{r-1}."""
    x = numbering(shapes)
    return sums_of(shapes, [x[:rank] for rank in range(len(x))], shapes)


def move(shapes: Sequence[Shape], sources: Sequence[int | None], nothing: Sequence[Shape] | None = None) -> Program:
    """y_r = x_{sources[r]}, zeros where there is none: what messages between ranks do."""
    x = numbering(shapes)
    terms = [[] if source is None else [x[source]] for source in sources]
    return sums_of(shapes, terms, shapes if nothing is None else nothing)


def keep(shapes: Sequence[Shape]) -> Program:
    """y_r = x_r."""
    return move(shapes, range(len(shapes)))


def stack(*programs: Program) -> Program:
    """Return the linear program whose y_r stacks those of several programs, along a new first axis."""
    matrices = [program.jacobian(np.zeros(0)) for program in programs]
    inner = numbering(programs[0].out_shapes)
    shapes = [(len(programs), *shape) for shape in programs[0].out_shapes]
    outer = numbering(shapes)
    matrix = np.zeros((len(programs) * matrices[0].shape[0], matrices[0].shape[1]))
    for of_rank, numbers in zip(outer, inner):
        for place, part in enumerate(matrices):
            matrix[of_rank[place].ravel()] = part[numbers.ravel()]
    return linear(programs[0].in_shapes, shapes, matrix)


def within(groups: Sequence[Sequence[int]], shapes: Sequence[Shape], make: Callable[[list[Shape]], Program]) -> Program:
    """Return the linear program in which each group of ranks runs the one that `make` makes for its shapes.

    A group lists its ranks in their order in the group's communicator.
    """
    made = [make([shapes[rank] for rank in group]) for group in groups]
    out_shapes = list(shapes)
    for group, program in zip(groups, made):
        for rank, shape in zip(group, program.out_shapes):
            out_shapes[rank] = shape
    rows, columns = numbering(out_shapes), numbering(shapes)
    matrix = np.zeros((sum(r.size for r in rows), sum(c.size for c in columns)))
    for group, program in zip(groups, made):
        own_rows = np.concatenate([rows[rank].ravel() for rank in group])
        own_columns = np.concatenate([columns[rank].ravel() for rank in group])
        matrix[np.ix_(own_rows, own_columns)] = program.jacobian(np.zeros(0))
    return linear(shapes, out_shapes, matrix)


# ---- Reductions that aren't linear, entry by entry over the ranks ----


def reduction(name: str, shapes: Sequence[Shape], root: int | None = None) -> Program:
    """Return the program y_r = PROD, MAX or MIN of all x_s; on the root alone where there is one, zeros elsewhere."""
    size, length = len(shapes), np.prod(shapes[0], dtype=int)
    value, slope, bend = {
        "PROD": (lambda x: x.prod(axis=0), product_of_others, bend_of_product),
        "MAX": (lambda x: x.max(axis=0), lambda x: share_of_ties(x, x.max(axis=0)), lambda x, v: np.zeros_like(x)),
        "MIN": (lambda x: x.min(axis=0), lambda x: share_of_ties(x, x.min(axis=0)), lambda x, v: np.zeros_like(x)),
    }[name]
    has_result = np.array([root is None or rank == root for rank in range(size)], dtype=float)

    def by_rank(x: np.ndarray) -> np.ndarray:
        return x.reshape(size, length)

    def matrix(slopes: np.ndarray) -> np.ndarray:
        # Entry k of y_r depends on entry k of each x_s, by slopes[s, k].
        full = np.einsum("r,sk,kl->rksl", has_result, slopes, np.eye(length))
        return full.reshape(size * length, size * length)

    return Program(
        list(shapes),
        list(shapes),
        lambda x: np.outer(has_result, value(by_rank(x))).ravel(),
        lambda x: matrix(slope(by_rank(x))),
        lambda x, v: matrix(bend(by_rank(x), by_rank(v))),
        False,
    )


def product_of_others(x: np.ndarray) -> np.ndarray:
    """Return ∂(Π_t x_t)/∂x_s = Π_{t≠s} x_t, for x of shape (ranks, entries)."""
    return np.stack([np.delete(x, s, axis=0).prod(axis=0) for s in range(len(x))])


def bend_of_product(x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the derivative of `product_of_others` along v: Σ_{t≠s} v_t Π_{q≠s,t} x_q."""
    out = np.zeros_like(x * v)
    for s in range(len(x)):
        for t in range(len(x)):
            if t != s:
                out[s] += v[t] * np.delete(x, [s, t], axis=0).prod(axis=0)
    return out


def share_of_ties(x: np.ndarray, extremum: np.ndarray) -> np.ndarray:
    """Return 1/n for the n ranks that hold the extremum, 0 for the others, entry by entry."""
    tied = (x == extremum).astype(float)
    return tied / tied.sum(axis=0)


# ---- A nonlinear loss around a program ----


@dataclass(frozen=True)
class Loss:
    """J(x) = Re Σ w · h(y), y the results for inputs u(x), with h(y) = y + y²/2 + y³/6 and u(x) = x + x²/2.

    `weights` has each rank's own w. Written out, with ȳ = w h'(y) and A the Jacobian at u:
    the gradient is u' Aᵀȳ, and its derivative along v is v Aᵀȳ + u' ((dA)ᵀȳ + Aᵀ(w h''(y) A u'v)), since u'' = 1.
    Derivatives by complex numbers are without conjugation: dJ = Re Σ g dx.
    """

    program: Program
    weights: list[np.ndarray]

    def value(self, xs: Sequence[np.ndarray]) -> float:
        y = self.program.value(before(join(xs)))
        return float(np.real(np.sum(join(self.weights) * after(y))))

    def gradient(self, xs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return every rank's gradient."""
        x, w = join(xs), join(self.weights)
        y = self.program.value(before(x))
        return split((1 + x) * (self.program.jacobian(before(x)).T @ (w * (1 + y + y**2 / 2))), self.program.in_shapes)

    def hessian_product(self, xs: Sequence[np.ndarray], vs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return every rank's part of the Hessian times v."""
        x, w, v = join(xs), join(self.weights), join(vs)
        u, du = before(x), (1 + x) * v
        y, matrix = self.program.value(u), self.program.jacobian(u)
        cotangent, its_change = w * (1 + y + y**2 / 2), w * (1 + y) * (matrix @ du)
        changed = self.program.bend(u, du).T @ cotangent + matrix.T @ its_change
        return split(v * (matrix.T @ cotangent) + (1 + x) * changed, self.program.in_shapes)


def before(x: np.ndarray) -> np.ndarray:
    """Return u(x)."""
    return x + x * x / 2


def after(y: np.ndarray) -> np.ndarray:
    """Return h(y)."""
    return y + y * y / 2 + y * y * y / 6
