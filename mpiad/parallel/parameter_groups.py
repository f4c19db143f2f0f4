"""`ParameterGroups`: another optimizer for each group of parameters, or none for parameters that are constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpiad._typing import Array, Tree
from mpiad.parallel.adam import Apply, Rule, State, Updated
from mpiad.parallel.parameters import matching_leaves, require_optimizer, require_state
from mpiad.pytrees import flatten, is_variable, leaf_paths, refuse_objects

_CALL = "ParameterGroups"


class ParameterGroups:
    """Groups of parameters with different optimizers, learning rates or weight decays; frozen groups are constants.

    Parameters
    ----------
    groups : dict of str to optimizer or None
        The optimizer of each group: `Adam`, `AdamW`, `SGD`, or any object with `setup` and `update`, which are called with
        dicts of the group's leaves by path. None freezes a group: its leaves don't change, and `DistributedOptimizer`
        neither differentiates nor sums them.
    group_of : callable
        ``group_of(path)`` returns the name of the group of a leaf, given its path as in error messages, for example
        ``"params['layers'][0].weight"``. It isn't called for leaves that aren't floats.

    Raises
    ------
    TypeError
        If `groups` isn't a dict of optimizers and None, or `group_of` isn't callable.

    Examples
    --------
    >>> from mpiad.parallel import SGD, AdamW, ParameterGroups
    >>> rules = {"matrices": AdamW(0.1, weight_decay=0.5), "biases": SGD(0.1)}
    >>> optimizer = ParameterGroups(rules, lambda path: "biases" if path.endswith("['b']") else "matrices")
    >>> params = {"w": np.ones(2), "b": 1.0}
    >>> state, params = optimizer.update(optimizer.setup(params), params, {"w": np.zeros(2), "b": 1.0})
    >>> print(params["w"], params["b"])
    [0.95 0.95] 0.9
    """

    def __init__(self, groups: Mapping[str, Any], group_of: Callable[[str], str]):
        if not isinstance(groups, Mapping) or not groups:
            raise TypeError(f"{_CALL}: groups must be a dict of optimizers by name, but got {groups!r:.60}.")
        for name, rule in groups.items():
            if rule is not None:
                require_optimizer(rule, f"{_CALL}: groups[{name!r}]")
        if not callable(group_of):
            raise TypeError(f"{_CALL}: group_of must be a function of a leaf's path, but got {group_of!r:.60}.")
        self.groups, self.group_of = dict(groups), group_of

    def setup(self, params: Tree) -> State:
        """Return the state before the first update: the state of the optimizer of each group that isn't frozen.

        Parameters
        ----------
        params : pytree of arrays

        Raises
        ------
        ValueError
            If `group_of` returns an unknown group, or no leaf belongs to a group.
        """
        refuse_objects(params, "params", f"{_CALL}.setup")
        return {name: self.groups[name].setup(part) for name, part in self._parts(params).items()}

    def prepare(self, state: State, params: Tree) -> Apply:
        """Return the update as a function; raise a TypeError or ValueError for a state or schedule that can't be used."""
        parts, paths = self._parts(params), leaf_paths(params, "params")
        require_state(state, parts, _CALL)
        updates = {name: prepared(self.groups[name], state[name], part) for name, part in parts.items()}
        leaves, build = flatten(params)

        def apply(gradients: list[Array], scale: float = 1.0, compiled: bool = False) -> Updated:
            found, new, updated = dict(zip(paths, gradients)), {}, dict(zip(paths, leaves))
            for name, update in updates.items():
                new[name], changed = update([found[path] for path in sorted(parts[name])], scale, compiled)
                updated |= changed
            return new, build(list(updated.values()))

        return apply

    def update(self, state: State, params: Tree, gradient: Tree, compiled: bool = False) -> Updated:
        """Return the state and the parameters after one update of each group.

        Parameters
        ----------
        state : dict
            The result of `setup` or of the last update.
        params, gradient : pytree of arrays
            As in `Adam.update`; gradients with respect to frozen leaves are ignored.
        compiled : bool
            Whether updates of `Adam`, `AdamW` and `SGD` are compiled programs.

        Returns
        -------
        (dict, pytree of arrays)

        Raises
        ------
        TypeError, ValueError
            As in `setup` and `Adam.update`.
        """
        apply = self.prepare(state, params)
        named = zip(leaf_paths(params, "params"), flatten(params)[0])
        expected = [None if is_variable(leaf) and self.is_frozen(path) else leaf for path, leaf in named]
        return apply(matching_leaves(gradient, params, expected, _CALL), compiled=compiled)

    def group(self, path: str) -> str:
        """Return the name of a leaf's group; raise a ValueError if there is no such group."""
        name = self.group_of(path)
        if name not in self.groups:
            raise ValueError(f"{_CALL}: group_of({path!r}) must return one of {list(self.groups)}, but returned {name!r}.")
        return name

    def is_frozen(self, path: str) -> bool:
        """Return whether a leaf belongs to a frozen group."""
        return self.groups[self.group(path)] is None

    def _parts(self, params: Tree) -> dict[str, dict[str, Array]]:
        """Return the leaves of each group by path, without frozen groups."""
        parts: dict[str, dict[str, Array]] = {name: {} for name in self.groups}
        paths = leaf_paths(params, "params")
        for path, leaf in zip(paths, flatten(params)[0]):
            if is_variable(leaf):
                parts[self.group(path)][path] = leaf
        for name, part in parts.items():
            if not part:
                raise ValueError(f"{_CALL}: the group {name!r} contains no leaf of the parameters {', '.join(paths):.200}.")
        return {name: part for name, part in parts.items() if self.groups[name] is not None}


def is_of_library(optimizer: Any) -> bool:
    """Return whether an update consists of this library's functions only, also those of all groups."""
    update = getattr(type(optimizer), "update", None)
    if update is ParameterGroups.update:
        return all(rule is None or is_of_library(rule) for rule in optimizer.groups.values())
    return update is Rule.update


def prepared(optimizer: Any, state: Tree, params: Tree) -> Apply:
    """Return an optimizer's update as a function: that of `prepare` if its `update` is one of this library's."""
    # A subclass with an update of its own may have another state.
    if getattr(type(optimizer), "update", None) in (Rule.update, ParameterGroups.update):
        return optimizer.prepare(state, params)
    build = flatten(params)[1]

    def apply(gradients: list[Array], scale: float = 1.0, compiled: bool = False) -> tuple[Tree, Tree]:
        scaled = gradients if scale == 1.0 else [g if g is None else g * scale for g in gradients]
        return optimizer.update(state, params, build(scaled))

    return apply
