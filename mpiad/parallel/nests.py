"""Nests as data: a description that JSON can hold, and arrays by name, from which the same nest is made again."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Tree
from mpiad.transport.device_arrays import ArrayModule, arrays_of

_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def described(value: Tree, path: str, arrays: dict[str, np.ndarray]) -> list[Any]:
    """Return the description of a nest, and put its arrays among the others.

    A TypeError where it holds something else than arrays, numbers, strings, None, generators of NumPy's, dicts, lists and
    tuples.
    """
    if value is None or isinstance(value, (bool, str)):  # bool before int, of which it is a kind
        return ["plain", value]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:  # objects would need pickle
        name = _unused(path, arrays)
        arrays[name] = np.asarray(value)
        return ["array" if isinstance(value, np.ndarray) else "number", name]
    home = arrays_of(value)
    if home is not None:
        name = _unused(path, arrays)
        arrays[name] = home.to_host(value)
        return ["device array", name]
    if isinstance(value, int):
        return ["int", str(value)]  # of any size
    if isinstance(value, float):
        return ["float", value.hex()]  # every bit
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    # Exactly: of a subclass (a Counter, a NamedTuple below) another type would come back.
    if type(value) is dict:
        parts = [[described(key, path, arrays), described(part, f"{path}/{key}", arrays)] for key, part in value.items()]
        return ["dict", parts]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return [type(value).__name__, [described(part, f"{path}/{k}", arrays) for k, part in enumerate(value)]]
    if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in _GENERATORS:
        return ["generator", described(value.bit_generator.state, path, arrays)]
    raise TypeError(
        f"parallel.save_checkpoint: {path} is {type(value).__name__} {value!r:.60}, but a checkpoint holds arrays, "
        "numbers, strings, None, NumPy's generators, and dicts, lists and tuples of them. Save what it is made of."
    )


def _unused(path: str, arrays: dict[str, np.ndarray]) -> str:
    # Paths that read alike may mean different places: the keys 1 and "1", or "a/b" and b within a.
    while path in arrays:
        path += "'"
    return path


def rebuilt(said: list[Any], arrays: dict[str, np.ndarray], home: ArrayModule | None = None) -> Tree:
    """Return the nest of a description; what was on a device goes where `home` makes arrays: a ValueError without one."""
    kind, rest = said[0], said[1:]
    if kind == "plain":
        return rest[0]
    if kind in ("array", "number"):
        return arrays[rest[0]] if kind == "array" else arrays[rest[0]][()]
    if kind == "device array":
        if home is None:
            raise ValueError(
                f"{rest[0]} was saved from a device. Pass like=, any nest with an array on the device that it is to go to, "
                "as the parameters that the training would begin with."
            )
        return home.to_device(arrays[rest[0]])
    if kind == "int":
        return int(rest[0])
    if kind == "float":
        return float.fromhex(rest[0])
    if kind == "complex":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if kind == "dict":
        return {rebuilt(key, arrays, home): rebuilt(part, arrays, home) for key, part in rest[0]}
    if kind in ("list", "tuple"):
        parts = [rebuilt(part, arrays, home) for part in rest[0]]
        return parts if kind == "list" else tuple(parts)
    state: dict[str, Any] = rebuilt(rest[0], arrays)
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)
