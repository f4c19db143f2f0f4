"""Nests of parameters: their leaves, and functions of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Tree
from mpiad.differentiation.trace import Variables
from mpiad.differentiation.trees import flatten, is_variable, named_leaves, refuse_objects
from mpiad.primitives.cotangents import spec_like
from mpiad.transport import Spec


def variables_of(tree: Tree, call: str, required: bool = True) -> Variables:
    """Return the leaves of a nest; its variables are those that are trained: real or complex floats and arrays of them.

    A TypeError if one of them is traced or an object of an unknown kind, and if one is `required` and none is trained.
    """
    leaves, build = flatten(tree)
    places, others = [], []
    for k, leaf in enumerate(leaves):
        # An array itself can't be traced; only the rest is looked at, since this runs in each step.
        if type(leaf) is not np.ndarray:
            others.append(leaf)
        if leaf.dtype.kind in "fc" if type(leaf) is np.ndarray else is_variable(leaf):
            places.append(k)
    if any(map(isbox, others)):
        raise TypeError(
            f"{call}: got traced values, but a step of a training carries no derivative. Call it outside of the function "
            "that is differentiated, or give it mpiad.stop(x)."
        )
    if len(places) < len(leaves):
        refuse_objects(tree, "params" if required else "tree", call)
    if required and not places:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TypeError(f"{call}: there is nothing to train: expected floats and arrays of floats, but got {kinds}.")
    return Variables(leaves, places, build)


def each(fun: Callable[[Array], Array], tree: Tree) -> Tree:
    """Return the nest with the trained leaves replaced by a function of them."""
    leaves, build = flatten(tree)
    return build([fun(leaf) if is_variable(leaf) else leaf for leaf in leaves])


def described(spec: Spec) -> str:
    """Return shape, dtype and place in words, alike on all ranks whatever their devices' numbers."""
    return f"shape {spec.shape} and dtype {spec.dtype}{'' if spec.arrays is None else ' on a device'}"


def zeros_like(tree: Tree) -> Tree:
    """Return the nest with zeros in the place of the trained leaves."""
    return each(np.zeros_like, tree)


def matching(gradient: Tree, params: Tree, wanted: list[Any], call: str) -> list[Any]:
    """Return the leaves of a gradient; `wanted` are those of the parameters, whose form, shapes and dtypes it must have."""
    found = flatten(gradient)[0]
    if len(found) == len(wanted) and all(map(_fits, found, wanted)):
        return found
    named, paths = named_leaves(gradient, "gradient"), named_leaves(params, "params")
    if len(named) != len(paths):
        raise TypeError(
            f"{call}: the gradient must have the form of the parameters, which have {len(paths)} leaves, but has "
            f"{len(named)}."
        )
    for (name, g), (path, leaf) in zip(named, paths):
        if not _fits(g, leaf):
            raise ValueError(
                f"{call}: {name} must have the {described(spec_like(leaf))} of {path}, but has {described(spec_like(g))}."
            )
    return found


def _fits(g: Array, leaf: Array) -> bool:
    if type(g) is np.ndarray and type(leaf) is np.ndarray:
        # What isn't trained may have any gradient: it isn't looked at.
        return (g.dtype == leaf.dtype and g.shape == leaf.shape) or leaf.dtype.kind not in "fc"
    return not is_variable(leaf) or spec_like(g) == spec_like(leaf)
