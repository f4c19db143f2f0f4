"""Pytrees: nested dicts, lists, tuples and registered dataclasses, whose leaves have the same order on all ranks.

- Registration of dataclasses and named tuples: `register`.
- Traversal: `flatten`, `map_leaves`, and `children` and `named_leaves` with paths.
- Comparison of structures: `same_form`, and `difference` for errors.
- Checks of leaves: whether they are variables, unsupported, or on a device.
- Concatenation of small arrays and the inverse, for messages, copies to and from devices, and arithmetic.
- Descriptions for files: `described` and its inverse `rebuilt`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from numbers import Number
from typing import Any, TypeVar

import numpy as np
from autograd.builtins import DictBox, SequenceBox
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import Box, getval

from mpiad._typing import Array, Shape, Tree
from mpiad.compiling.closure import FIELDS
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of, is_array, is_device_array

__all__ = ["register"]  # the other names are internal
__dir__ = __all__.copy

T = TypeVar("T")

LEAF_TYPES = frozenset({np.ndarray, ArrayBox, float, np.float64, np.float32})
_FIRST = operator.itemgetter(0)
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_CLASSES: dict[str, type] = {}  # registered classes by their names in checkpoints


def register(cls: type[T]) -> type[T]:
    """Register a dataclass or named tuple as a container in pytrees, as a class decorator.

    The fields of a registered dataclass are parts of a pytree, in the order of their declaration: gradients, minimizers,
    training, variational inference and `jit` take objects of the class and return new ones. A named tuple is a container
    without registration, too. Checkpoints contain objects of registered classes under the name of the class.

    Parameters
    ----------
    cls : type
        A dataclass, which may be frozen or have slots, or a named tuple. Objects made by the library have the fields of
        the original; `__init__` and `__post_init__` aren't called, since fields may hold traced arrays, or None.

    Returns
    -------
    type
        `cls` itself.

    Raises
    ------
    TypeError
        If `cls` is neither a dataclass nor a named tuple.

    Ranks
    -----
    No communication. Each rank registers the class, usually by importing its module.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @mpiad.pytrees.register
    ... @dataclass
    ... class Line:
    ...     slope: float
    ...     offset: float
    >>> gradient = mpiad.grad(lambda line: 3 * line.slope + line.offset**2, objective="sum")(Line(1.0, 2.0))
    >>> print(type(gradient).__name__, gradient.slope, gradient.offset)
    Line 3.0 4.0
    """
    is_data = dataclasses.is_dataclass(cls)  # or an object of one
    fields = [field.name for field in dataclasses.fields(cls)] if is_data else getattr(cls, "_fields", None)
    if not isinstance(cls, type) or not fields:
        raise TypeError(
            f"pytrees.register: expected a dataclass or named tuple with fields, but got {cls!r:.80}. Write the decorator "
            "above @dataclass."
        )
    FIELDS[cls] = tuple(fields)
    _CLASSES[_class_name(cls)] = cls
    return cls


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _object_of(cls: type, parts: Iterable[Tree]) -> Tree:
    """Return an object of a registered class with these fields."""
    if make := getattr(cls, "_make", None):
        return make(parts)
    made = object.__new__(cls)
    for name, part in zip(FIELDS[cls], parts):
        object.__setattr__(made, name, part)  # a frozen class has no other way
    return made


def flatten(tree: Tree) -> tuple[list[Array], Callable[[list[Array]], Tree]]:
    """Return the leaves of a pytree, and the function that builds a pytree of the same structure from other leaves."""
    if type(tree) in LEAF_TYPES:  # the most common case
        return [tree], _FIRST
    leaves: list[Array] = []
    build = _in_levels(_walk, tree, leaves)
    return leaves, lambda new: _in_levels(build, iter(new))


def _in_levels(visit: Callable[..., T], *args: object) -> T:
    """Visit the levels of a pytree recursively; raise a ValueError if there are too many."""
    try:
        return visit(*args)
    except RecursionError:
        limit = sys.getrecursionlimit()
        raise ValueError(
            f"a pytree contains itself, or has too many levels of containers for Python's recursion limit of {limit}: "
            f"expected about {limit // 4} levels at most. Pass a list or dict of the arrays, with fewer levels."
        ) from None


def _walk(tree: Tree, leaves: list[Array]) -> Callable:
    kind = type(tree)
    if kind in LEAF_TYPES:
        leaves.append(tree)
        return next
    if isinstance(tree, (dict, DictBox)):
        return _walk_dict(tree, leaves)
    if isinstance(tree, (list, tuple, SequenceBox)):
        parts = [_walk(tree[i], leaves) for i in range(len(tree))]
        kind = type(getval(tree))
        make: Callable = getattr(kind, "_make", kind)  # of a named tuple
        return lambda new: make([part(new) for part in parts])
    if kind in FIELDS:
        parts = [_walk(getattr(tree, name), leaves) for name in FIELDS[kind]]
        return lambda new: _object_of(kind, [part(new) for part in parts])
    leaves.append(tree)
    return next


def _walk_dict(tree: Tree, leaves: list[Array]) -> Callable:
    keys = list(tree.keys())
    parts = [(key, _walk(tree[key], leaves)) for key in _in_order(tree)]
    kind: Any = type(tree)
    if kind is defaultdict:
        kind = partial(defaultdict, tree.default_factory)
    elif kind not in (OrderedDict, Counter) and not (isinstance(tree, dict) and kind.__init__ is dict.__init__):
        kind = dict  # a subclass with another constructor becomes a dict

    def build(new: object) -> dict:
        # The leaves are sorted by key, but the keys of the result have the order of the user's dict.
        values = {key: part(new) for key, part in parts}
        return kind({key: values[key] for key in keys})

    return build


def _in_order(tree: Tree) -> list[Hashable]:
    keys = list(tree.keys())
    try:
        return sorted(keys)  # since ranks may have inserted keys in different orders
    except TypeError:
        return keys


def map_leaves(function: Callable[[Array], Array], tree: Tree) -> Tree:
    """Apply a function to each leaf of a pytree."""
    leaves, build = flatten(tree)
    return build([function(leaf) for leaf in leaves])


def same_form(tree: Tree, other: Tree) -> bool:
    """Return whether two pytrees have the same keys, lengths, names of fields and registered classes."""
    if type(tree) in LEAF_TYPES and type(other) in LEAF_TYPES:  # the most common case
        return True
    tree, other = getval(tree), getval(other)
    if isinstance(other, dict):
        return isinstance(tree, dict) and tree.keys() == other.keys() and all(same_form(tree[k], other[k]) for k in other)
    if isinstance(other, (list, tuple)):
        # A list and a tuple are interchangeable, but the fields of one named tuple aren't those of another.
        names = getattr(tree, "_fields", None), getattr(other, "_fields", None)
        alike = isinstance(tree, (list, tuple)) and len(tree) == len(other) and (None in names or names[0] == names[1])
        return alike and all(map(same_form, tree, other))
    if type(other) in FIELDS:
        names = FIELDS[type(other)]
        return type(tree) is type(other) and all(same_form(getattr(tree, name), getattr(other, name)) for name in names)
    return not isinstance(tree, (dict, list, tuple)) and type(tree) not in FIELDS


def difference(tree: Tree, other: Tree, name: str) -> tuple[str, str, str]:
    """Return the path of the first parts in which the structures of two pytrees differ, and descriptions of both."""
    (text, form), (other_text, other_form) = _container(tree), _container(other)
    if form == other_form:
        parts = zip(children(tree, name) or [], children(other, name) or [])
        for (_, part), (path, other_part) in parts:
            if not same_form(part, other_part):
                return difference(part, other_part, path)
    return name, text, other_text


def _container(tree: Tree) -> tuple[str, object]:
    """Return a description of a container without its parts, and what it has in common with those of the same form."""
    tree = getval(tree)
    name = type(tree).__name__
    if isinstance(tree, dict):
        return f"a {name} with the keys {', '.join(map(repr, _in_order(tree))) or '(none)'}", tree.keys()
    if isinstance(tree, (list, tuple)):
        return f"a {name} of {getattr(tree, '_fields', len(tree))}", len(tree)
    return f"a single {name}", type(tree)


def children(tree: Tree, name: str) -> list[tuple[str, Tree]] | None:
    """Return the parts of a container with their paths, such as ``("x['w']", [1.0])``; None for a leaf."""
    if isinstance(tree, (dict, DictBox)):
        return [(f"{name}[{key!r}]", tree[key]) for key in _in_order(tree)]
    if isinstance(tree, (list, tuple, SequenceBox)):
        fields = getattr(tree, "_fields", None)
        return [(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", tree[i]) for i in range(len(tree))]
    fields = FIELDS.get(type(tree))
    return None if fields is None else [(f"{name}.{field}", getattr(tree, field)) for field in fields]


def named_leaves(tree: Tree, name: str) -> list[tuple[str, Array]]:
    """Return paths and plain values of the leaves, such as ``("x['w'][0]", 1.0)``; an empty container counts as a leaf."""
    return _in_levels(_named_leaves, tree, name)


def _named_leaves(tree: Tree, name: str) -> list[tuple[str, Array]]:
    parts = children(tree, name)
    if parts is None:
        return [(name, getval(tree))]
    if not parts:
        return [(name, "an empty container")]
    return [leaf for path, part in parts for leaf in _named_leaves(part, path)]


def leaf_paths(tree: Tree, name: str) -> list[str]:
    """Return the paths of the leaves, in the order of `flatten`."""
    parts = children(tree, name)
    return [name] if parts is None else [leaf for path, part in parts for leaf in leaf_paths(part, path)]


def refuse_objects(tree: Tree, name: str, call: str) -> None:
    """Raise a TypeError if a leaf is an object of an unsupported type, whose contents would be ignored."""
    for path, leaf in named_leaves(tree, name):
        plain = isinstance(leaf, (Number, str, bytes, np.generic, type(None))) or is_array(leaf)
        if not plain or getattr(leaf, "dtype", np.dtype(float)).hasobject:
            raise TypeError(
                f"{call}: {path} is {type(leaf).__name__} {leaf!r:.60}, but dicts, lists and tuples of arrays, numbers, "
                "strings and None are expected: the contents of other objects can't be varied. Register the dataclass with "
                "mpiad.pytrees.register, pass its numbers in a dict, for example by dataclasses.asdict, or pass the object "
                "as another argument."
            )


def is_variable(leaf: Array) -> bool:
    """Return whether a leaf is a real or complex floating-point number or an array of them, traced or not."""
    if isinstance(leaf, (float, complex, np.inexact)):
        return True
    if isinstance(leaf, np.ndarray) or type(leaf) in Box.types or is_device_array(leaf):
        return getattr(leaf, "dtype", np.dtype(object)).kind in "fc"
    return False


def leaf_on_device(tree: Tree) -> Array:
    """Return the first leaf that is on a device; None if all leaves are on the host."""
    return next(filter(is_device_array, flatten(tree)[0]), None)


def places_by_kind(leaves: Sequence[Array], indices: Iterable[int]) -> list[list[int]]:
    """Group the indices of leaves by dtype and device; the leaves of a group can be concatenated."""
    groups: dict[object, list[int]] = {}
    for k in indices:
        leaf = leaves[k]
        groups.setdefault(leaf.dtype if type(leaf) is np.ndarray else _kind(leaf), []).append(k)
    return list(groups.values())


def _kind(leaf: Array) -> object:
    arrays = arrays_of(leaf)
    return np.result_type(leaf) if arrays is None else (leaf.dtype, arrays)


def join(parts: Sequence[Array]) -> Array:
    """Concatenate numbers and arrays to a flat array; a single array isn't copied."""
    return np.ravel(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis=None)


def split(flat: Array, shapes: Iterable[Shape]) -> list[Array]:
    """Split a flat array into consecutive parts of these shapes: views, or numbers for the shape ()."""
    parts, stop = [], 0
    for shape in shapes:
        start, stop = stop, stop + math.prod(shape)
        part = flat[start:stop] if shape else flat[start]
        parts.append(part.reshape(shape) if len(shape) > 1 else part)
    return parts


def fetched(leaves: Sequence[Array]) -> list[Array]:
    """Copy the leaves that are on devices to the host, with one copy for each device and dtype."""
    return _moved(leaves, [arrays_of(leaf) for leaf in leaves], lambda arrays, flat: arrays.to_host(flat))


def put(leaves: Sequence[Array], devices: Sequence[ArrayModule | None]) -> list[Array]:
    """Copy host arrays to the given devices, None for the host, with one copy for each device and dtype."""
    return _moved(leaves, devices, lambda arrays, flat: arrays.to_device(flat))


def _moved(
    leaves: Sequence[Array], devices: Sequence[ArrayModule | None], move: Callable[[ArrayModule, Array], Array]
) -> list[Array]:
    moved, groups = list(leaves), dict[tuple[ArrayModule, np.dtype], list[int]]()
    for k, arrays in enumerate(devices):
        if arrays is not None:
            groups.setdefault((arrays, leaves[k].dtype), []).append(k)
    for (arrays, _), indices in groups.items():
        parts = [leaves[k] for k in indices]
        for k, part in zip(indices, split(move(arrays, join(parts)), [part.shape for part in parts])):
            moved[k] = part
    return moved


def described(value: Tree, path: str, arrays: dict[str, np.ndarray], call: str) -> list[Any]:
    """Return a description of a pytree for JSON, and add its arrays to `arrays`; a TypeError for unsupported objects."""
    if value is None or isinstance(value, (bool, str)):  # bool before its base class int
        return ["plain", value]
    namespace = arrays_of(value)
    # Arrays of objects aren't supported, since they would need pickle.
    if namespace is not None or (isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject):
        while path in arrays:  # different leaves may have the same path, for example those of the keys 1 and "1"
            path += "'"
        arrays[path] = np.asarray(value) if namespace is None else namespace.to_host(value)
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return [kind if namespace is None else "device array", path]
    if isinstance(value, (int, float)):
        return ["plain", value]  # JSON represents integers of any size and all floats exactly
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    cls = type(value)
    if cls in FIELDS:
        parts = [[field, described(getattr(value, field), f"{path}.{field}", arrays, call)] for field in FIELDS[cls]]
        return ["registered", _class_name(cls), parts]
    # Other subclasses (Counter, NamedTuple) aren't supported, since their objects would lose the type.
    if type(value) is dict:
        parts = [
            [described(key, path, arrays, call), described(part, f"{path}/{key}", arrays, call)]
            for key, part in value.items()
        ]
        return ["dict", parts]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return [type(value).__name__, [described(part, f"{path}/{k}", arrays, call) for k, part in enumerate(value)]]
    if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in _GENERATORS:
        seed = value.bit_generator.seed_seq
        states = [value.bit_generator.state, *([seed.state] if type(seed) is np.random.SeedSequence else [])]
        return ["generator", *[described(state, path, arrays, call) for state in states]]
    raise TypeError(
        f"{call}: {path} is {type(value).__name__} {value!r:.60}, but a checkpoint may only hold arrays, "
        "numbers, strings, None, NumPy's generators, and dicts, lists, tuples and classes of mpiad.pytrees.register with "
        "such parts. Save the parts of the object."
    )


def rebuilt(description: list[Any], arrays: dict[str, np.ndarray], namespace: ArrayModule | None = None) -> Tree:
    """Return the pytree of a description; raise a ValueError for a device array if no `namespace` is given."""
    kind, rest = description[0], description[1:]
    if kind == "plain":
        return rest[0]
    if kind in ("array", "number"):
        return arrays[rest[0]] if kind == "array" else arrays[rest[0]][()]
    if kind == "device array":
        if namespace is None:
            raise ValueError(
                f"{rest[0]} was saved from a device. Pass like=, a pytree with an array on the device to which it should "
                "be copied, such as the initial parameters of the training."
            )
        return namespace.to_device(arrays[rest[0]])
    if kind == "complex":
        return complex(*rest)
    if kind == "dict":
        return {rebuilt(key, arrays, namespace): rebuilt(part, arrays, namespace) for key, part in rest[0]}
    if kind in ("list", "tuple"):
        parts = [rebuilt(part, arrays, namespace) for part in rest[0]]
        return parts if kind == "list" else tuple(parts)
    if kind == "registered":
        name, fields = rest
        cls, names = _CLASSES.get(name), tuple([field for field, _ in fields])
        if cls is None or FIELDS[cls] != names:
            registered = "no class" if cls is None else f"a class with the fields {FIELDS[cls]}"
            raise ValueError(
                f"it holds {name} with the fields {names}, but {registered} is registered by this name. Define the class "
                "as in the program that wrote the file, under mpiad.pytrees.register."
            )
        return _object_of(cls, [rebuilt(part, arrays, namespace) for _, part in fields])
    state: dict[str, Any]
    state, *seeds = [rebuilt(part, arrays) for part in rest]
    # The generators that this one spawns depend on its seed sequence.
    bits = getattr(np.random, state["bit_generator"])(*[np.random.SeedSequence(**seed) for seed in seeds])
    bits.state = state
    return np.random.Generator(bits)
