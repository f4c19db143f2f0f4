"""Pytrees of parameters, and checks of gradients and states against them.

All leaves that are floats, complex numbers or arrays of them are trained; other leaves are constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Protocol

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Rank, Tree
from mpiad.differentiation.trace import Variables
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten, is_variable, leaf_paths, refuse_objects, same_form
from mpiad.transport import Channel, Spec
from mpiad.transport.core.agreement import raising_together


class Optimizer(Protocol):
    """The interface of optimizers; the optimizers of `mpiad.parallel` implement it."""

    def setup(self, params: Tree) -> Tree:
        """Return the state before the first update."""
        ...

    def update(self, state: Tree, params: Tree, gradient: Tree) -> tuple[Tree, Tree]:
        """Return the state and the parameters after an update."""
        ...


def variables_of(tree: Tree, call: str, required: bool = True) -> Variables:
    """Return a pytree's leaves, trained ones as variables; raise a TypeError if unsupported, or `required` and none is."""
    leaves, build = flatten(tree)
    places = [k for k, leaf in enumerate(leaves) if is_variable(leaf)]
    refuse_traced(leaves, call)
    if len(places) < len(leaves):
        refuse_objects(tree, "params" if required else "tree", call)
    if required and not places:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TypeError(f"{call}: expected floats or arrays of floats to train, but got {kinds}.")
    return Variables(leaves, places, build, range(len(places)))


def refuse_traced(leaves: Iterable[object], call: str) -> None:
    """Raise a TypeError if a leaf is traced."""
    if any(map(isbox, leaves)):
        raise TypeError(
            f"{call}: got traced values, but a training step isn't differentiable. Call it outside of the differentiated "
            "function, or pass mpiad.stop_gradient(x)."
        )


def described(spec: Spec) -> str:
    """Return a description of an array, without the number of its device, which may differ between ranks."""
    return f"shape {spec.shape} and dtype {spec.dtype}{'' if spec.arrays is None else ' on a device'}"


def matching_leaves(
    tree: Tree, params: Tree, expected: list[Array], call: str, name: str = "gradient", of: str = "params"
) -> list[Array]:
    """Return a tree's leaves; raise a TypeError or ValueError unless they match `expected`, those of the parameters."""
    found = flatten(tree)[0]
    if same_form(tree, params) and all(map(_matches, found, expected)):
        return found
    paths, expected_paths = leaf_paths(tree, name), leaf_paths(params, of)
    prefix = f"{call}: the {name} must have the structure of the parameters, "
    if len(paths) != len(expected_paths):
        raise TypeError(f"{prefix}which have {len(expected_paths)} leaves, but has {len(paths)}.")
    for path, param_path, g, leaf in zip(paths, expected_paths, found, expected):
        if path[len(name) :] != param_path[len(of) :]:
            raise TypeError(f"{prefix}but has {path} instead of {param_path}.")
        if not _matches(g, leaf):
            got = described(spec_like(g)) if is_variable(g) else f"{type(g).__name__} {g!r:.60}"
            raise ValueError(f"{call}: {path} must have the {described(spec_like(leaf))} of {param_path}, but has {got}.")
    return found


def _matches(g: Array, leaf: Array) -> bool:
    if type(g) is np.ndarray and type(leaf) is np.ndarray:
        # Any gradient is allowed for a leaf that isn't trained.
        return (g.dtype == leaf.dtype and g.shape == leaf.shape) or leaf.dtype.kind not in "fc"
    return not is_variable(leaf) or (is_variable(g) and spec_like(g) == spec_like(leaf))


def require_same_leaves(channel: Channel, local: list[str], call: str, root: Rank = 0) -> None:
    """Raise a ValueError on all ranks if descriptions of leaves differ from those on the root; collective."""
    expected = channel.data.bcast(local, root)
    with raising_together(channel):
        for mine, other in zip_longest(local, expected, fillvalue="there is no further leaf"):
            if mine != other:
                raise ValueError(
                    f"{call}: all pytrees must have the same structure, shapes and dtypes, but on rank "
                    f"{channel.rank} {mine}, and on the root, rank {root}, {other}."
                )


def require_optimizer(optimizer: object, name: str) -> None:
    """Raise a TypeError if an object isn't an optimizer."""
    if isinstance(optimizer, type) or not all(callable(getattr(optimizer, part, None)) for part in ("setup", "update")):
        is_class = isinstance(optimizer, type)
        got = f"the class {optimizer.__name__}" if is_class else f"{type(optimizer).__name__} {optimizer!r:.60}"
        advice = f" Pass an instance, {optimizer.__name__}(...)." if is_class else ""
        raise TypeError(f"{name} must have setup(params) and update(state, params, gradient), but got {got}.{advice}")


def require_state(state: object, names: Iterable[str], call: str) -> None:
    """Raise a TypeError if a state isn't a dict with these entries."""
    if not isinstance(state, dict) or state.keys() != set(names):
        got = f"a dict of {sorted(map(str, state))}" if isinstance(state, dict) else f"{type(state).__name__} {state!r:.60}"
        expected = f"a dict of {sorted(names)}, as returned by setup of the same optimizer"
        raise TypeError(f"{call}: the state must be {expected}, but got {got}.")
