"""Packing of variables: a pytree of arrays for the user is a vector of doubles for the method and the messages."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from autograd.tracer import Box

from mpiad._typing import Array, Shape, Tree
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import fetched, flatten, is_variable, leaf_on_device, named_leaves, put, refuse_objects, split
from mpiad.transport.core.agreement import FAILURES
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of


@dataclass(frozen=True)
class RemoteArray:
    """The placeholder of an array on the root's device; `arrays` is the array module of this rank's device."""

    shape: Shape
    dtype: np.dtype
    fingerprint: str
    arrays: ArrayModule | None = None


_NUMBERS = (int, float, np.integer, np.floating)


def as_variables(x0: Tree, call: str = "minimize", name: str = "x0") -> Tree:
    """Return x0 with a list as an array, and integers as doubles, as in SciPy; raise a TypeError if it is invalid."""
    if isinstance(x0, (list, tuple)) and not hasattr(x0, "_fields") and x0 and all(map(_is_number, x0)):
        x0 = np.array(x0, dtype=float)
    elif _is_number(x0) or (isinstance(x0, np.ndarray) and x0.dtype.kind in "iu"):
        x0 = x0.astype(float) if isinstance(x0, np.ndarray) else float(x0)  # type: ignore[arg-type]
    leaves = flatten(x0)[0]
    if any(type(leaf) in Box.types for leaf in leaves):
        raise TypeError(
            f"{call}: {name} is a traced value, but a solve can't be differentiated. Pass mpiad.stop_gradient({name})."
        )
    if not any(is_variable(leaf) for leaf in leaves):
        got = f"{type(x0).__name__} {x0!r:.60}"
        raise TypeError(f"{call}: {name} must hold real or complex numbers or arrays of them on the root, but got {got}.")
    refuse_objects(x0, name, call)
    return x0


def sendable_variables(x0: Tree, call: str, name: str = "x0") -> Tree:
    """Return the root's x0 as the pytree for the function on all ranks; raise if it is invalid."""
    start = as_variables(x0, call, name)
    leaves, build = flatten(start)
    if not any(np.size(leaf) for leaf in leaves if is_variable(leaf)):  # SciPy's methods need a variable
        raise ValueError(f"{call}: {name} must hold at least one number, but got {start!r:.60}.")
    # The structure, and the leaves that aren't variables, are sent to the other ranks.
    try:
        pickle.dumps(build([None if is_variable(leaf) else leaf for leaf in leaves]))
    except FAILURES as error:  # pickling runs user code
        raise TypeError(
            f"{call}: {name} is sent to all ranks, but holds an object that can't be pickled ({error}). Pass functions and "
            "other objects as args, and define classes at the top level of a module."
        ) from error
    return start


def _is_number(x: Array) -> bool:
    return isinstance(x, _NUMBERS) and not isinstance(x, bool)


class Packing:
    """The layout of a pytree like `template` in one vector of doubles of length `size`, with complex numbers as pairs."""

    def __init__(self, template: Tree, call: str = "minimize", name: str = "x0"):
        self._call, self._name = call, name  # for errors
        self._leaves, self._build = flatten(template)
        self._positions = [k for k, leaf in enumerate(self._leaves) if is_variable(leaf) or type(leaf) is RemoteArray]
        found = [self._leaves[p] for p in self._positions]
        # A dtype from a message isn't NumPy's singleton, so pickled results would differ.
        self.specs = [(shape, np.dtype(dtype.str)) for shape, dtype, *_ in map(spec_like, found)]
        self.namespaces = [leaf.arrays if type(leaf) is RemoteArray else arrays_of(leaf) for leaf in found]
        self._on_device = any(xp is not None for xp in self.namespaces)
        # A complex number is packed as two variables, since methods work with real variables.
        self._lengths = [(int(np.prod(shape)) * (1 + (dtype.kind == "c")),) for shape, dtype in self.specs]
        self.size = sum(length for (length,) in self._lengths)
        self.holds_complex = any(dtype.kind == "c" for _, dtype in self.specs)

    def pack(self, tree: Tree, convert: Callable[[Array], Array] = lambda z: z) -> np.ndarray:
        """Return a pytree's variables as a new vector, shape (size,); raise unless they match the template."""
        leaves, parts = flatten(tree)[0], []
        if len(leaves) != len(self._leaves):
            raise TypeError(
                f"{self._call}: expected a pytree of {len(self._leaves)} leaves like {self._name}, but got {len(leaves)}."
            )
        leaves = fetched(leaves) if self._on_device else leaves
        for position, (shape, dtype) in zip(self._positions, self.specs):
            flat = self._array(leaves[position], position, shape).reshape(-1)
            if flat.dtype.kind == "c" and dtype.kind != "c":
                path = self._path(position)
                raise TypeError(f"{self._call}: expected {dtype}, like {path}, but got {flat.dtype}. Return its real part.")
            parts.append(convert(flat).astype(complex).view(float) if dtype.kind == "c" else flat.astype(float, copy=False))
        return np.concatenate(parts)  # a new vector also of one part

    def pack_point(self, tree: Tree) -> np.ndarray:
        """Return ``pack(tree)``; raise if the pytree has other keys, or its leaves that aren't variables other values."""
        vector = self.pack(tree)
        first_leaves, leaves = (named_leaves(each, self._name) for each in (self._build(self._leaves), tree))
        for (expected, first), (path, leaf) in zip(first_leaves, leaves):
            if path != expected or not is_variable(first) and not np.array_equal(leaf, first):
                raise TypeError(
                    f"{self._call}: {expected} is {first!r:.60}, but got {path}, {leaf!r:.60}. A point has the keys of the "
                    "first one, and the same values in leaves that aren't floating-point numbers."
                )
        return vector

    def pack_gradient(self, tree: Tree) -> np.ndarray:
        """Return a gradient as a new vector of derivatives with respect to the real variables."""
        return self.pack(tree, np.conj)  # autograd's gradient with respect to x + iy is ∂/∂x - i ∂/∂y

    def _array(self, leaf: Array, position: int, shape: Shape) -> Array:
        array = np.asarray(leaf)
        if array.shape != shape:
            raise TypeError(f"{self._call}: expected shape {shape}, as of {self._path(position)}, but got {array.shape}.")
        return array

    def _path(self, position: int) -> str:
        numbered = self._build(list(range(len(self._leaves))))
        return next(path for path, number in named_leaves(numbered, self._name) if number == position)

    def unpack_gradient(self, vector: np.ndarray) -> Tree:
        """Return the pytree of a result of `pack_gradient`."""
        return self.unpack(vector, np.conj)

    def unpack(self, vector: np.ndarray, convert: Callable[[Array], Array] = lambda z: z) -> Tree:
        """Return the pytree of a vector, in new memory."""
        found = []
        for (shape, dtype), part in zip(self.specs, split(vector, self._lengths)):
            # Copied, because complex numbers on a device must be aligned to their size.
            part = convert(part.copy().view(complex)) if dtype.kind == "c" else part
            found.append(part.astype(dtype).reshape(shape))
        leaves = list(self._leaves)
        for position, array in zip(self._positions, put(found, self.namespaces) if self._on_device else found):
            leaves[position] = array if array.ndim else array[()]
        return self._build(leaves)


class DevicePacking(Packing):
    """Like `Packing`, for variables on a device, with a vector on the device."""

    def __init__(self, template: Tree):
        super().__init__(template)
        self.xp: ArrayModule = self.namespaces[0]  # type: ignore[assignment]
        self._on_device = False  # no copies between devices are needed

    def _array(self, leaf: Array, position: int, shape: Shape) -> Array:
        if arrays_of(leaf) != self.xp or leaf.shape != shape:
            raise TypeError(
                f"minimize: expected an array of shape {shape} on the device of {self._path(position)}, but got "
                f"{type(leaf).__name__} of shape {np.shape(leaf)}."
            )
        return leaf


def local_packing(start: Tree) -> Packing:
    """Return the packing of a rank's own variables, on the host or a device; raise a TypeError if they are on both."""
    if leaf_on_device(start) is None:
        return Packing(start)
    packing = DevicePacking(start)
    if len(set(packing.namespaces)) > 1:
        raise TypeError(
            "minimize: with sharded methods all variables of a rank must be on the host or on one device, but the "
            "arrays of x0 are on several. Apply mpiad.device.to_device or mpiad.device.to_host."
        )
    return packing
