"""`ParameterGroups`: another optimizer for each group of parameters, or none for parameters that are constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from mpiad._typing import Array, Tree
from mpiad.parallel.adam import SGD, Adam, AdamW, State, Update, Updated
from mpiad.parallel.parameters import Optimizer, matching_leaves, require_optimizer, require_state
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

    def __init__(self, groups: Mapping[str, Optimizer | None], group_of: Callable[[str], str]):
        if not isinstance(groups, Mapping) or not groups:
            raise TypeError(f"{_CALL}: groups must be a dict of optimizers by name, but got {groups!r:.60}.")
        for name, rule in groups.items():
            if rule is not None:
                require_optimizer(rule, f"{_CALL}: groups[{name!r}]")
        if not callable(group_of):
            raise TypeError(f"{_CALL}: group_of must be a function of a leaf's path, but got {group_of!r:.60}.")
        self.groups, self.group_of = dict(groups), group_of
        self._trained = {name: rule for name, rule in groups.items() if rule is not None}

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
        return {name: self._trained[name].setup(part) for name, part in self._parts(params).items()}

    def prepare(self, state: State, params: Tree) -> Update:
        """Return the update; raise a TypeError or ValueError for a state or schedule that can't be used."""
        parts, (leaves, build) = self._parts(params), flatten(params)
        require_state(state, parts, _CALL)
        paths = leaf_paths(params, "params")
        place_of = {path: k for k, path in enumerate(paths)}
        updates = {name: prepared(self._trained[name], state[name], part) for name, part in parts.items()}
        places = {name: [place_of[path] for path in sorted(part)] for name, part in parts.items()}

        def finish(new: list[list[list[Array]]], gradients: Sequence[Array], scale: float) -> Updated:
            states, updated, columns = {}, dict(zip(paths, leaves)), iter(new)
            for name, update in updates.items():
                of_group = [gradients[k] for k in places[name]]
                states[name], changed = update.finish(list(islice(columns, len(update.parts))), of_group, scale)
                updated |= changed
            return states, build(list(updated.values()))

        found = [(places[name], part) for name, update in updates.items() for part in update.parts]
        return Update([part._replace(places=[own[k] for k in part.places]) for own, part in found], finish)

    def update(self, state: State, params: Tree, gradient: Tree) -> Updated:
        """Return the state and the parameters after one update of each group.

        Parameters
        ----------
        state : dict
            The result of `setup` or of the last update.
        params, gradient : pytree of arrays
            As in `Adam.update`; gradients with respect to frozen leaves are ignored.

        Returns
        -------
        (dict, pytree of arrays)

        Raises
        ------
        TypeError, ValueError
            As in `setup` and `Adam.update`.
        """
        update = self.prepare(state, params)
        named = zip(leaf_paths(params, "params"), flatten(params)[0])
        expected = [None if is_variable(leaf) and self.is_frozen(path) else leaf for path, leaf in named]
        return update.applied(matching_leaves(gradient, params, expected, _CALL))

    def group(self, path: str) -> str:
        """Return the name of a leaf's group; raise a ValueError if there is no such group."""
        name = self.group_of(path)
        if name not in self.groups:
            raise ValueError(f"{_CALL}: group_of({path!r}) must return one of {list(self.groups)}, but returned {name!r}.")
        return name

    def is_frozen(self, path: str) -> bool:
        """Return whether a leaf belongs to a frozen group."""
        return self.group(path) not in self._trained

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
        return {name: part for name, part in parts.items() if name in self._trained}


def prepared(optimizer: Any, state: Tree, params: Tree) -> Update:
    """Return an optimizer's update: that of `prepare` if its class is one of this library's."""
    if type(optimizer) in (SGD, Adam, AdamW, ParameterGroups):
        return optimizer.prepare(state, params)
    build = flatten(params)[1]

    def finish(_new: list[list[list[Array]]], gradients: Sequence[Array], scale: float) -> Updated:
        scaled = gradients if scale == 1.0 else [g if g is None else g * scale for g in gradients]
        return optimizer.update(state, params, build(list(scaled)))

    return Update([], finish)
