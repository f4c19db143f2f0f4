"""Loop rerolling: the statements of a long program with loops over values that are computed by the same operations.

A program of a neural network, or of many reactions, repeats a few operations on different arguments. Its values are
expression trees: a value that is used once is part of the tree of the operation that uses it. Trees that consist of the
same operations, and don't depend on each other, form a group, whose loop stores their values in consecutive entries of an
array on the stack. A long sum, such as an entry of a matrix product, is an inner loop over terms of the same operations.

The leaves of trees are entries of this array, of the array of shared parameters, and constants. Indices that are affine
functions of the loops' counters are computed; other indices, and constants that differ, are read from tables.

All operations, and the order of the terms of sums, are those of the program, so the results are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, groupby
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.program import OPERATIONS, Program

# Programs of up to SHORT operations have no loops; in others loops must reduce the number of lines by the factor _GAIN.
SHORT, _GAIN = 60, 2
_CONSTANTS = ("constant", "True", "False")  # the kinds of leaves that aren't in arrays
_LEAST_TERMS = 3  # of a sum that isn't part of a tree
_LEAST_LOOP = 4  # shorter loops over terms are unrolled
_LEAST_GROUP, _LONG = 4, 16  # a sum is irregular if its group is smaller, and it has no loop over as many terms
# Instead of value numbers, the numbers of the constants 1 and -1, the signs of the terms of an irregular sum.
_PLUS, _MINUS = -1, -2
_LARGEST_TREE = 60  # number of operations
_MOST_ENTRIES = 4096  # of the array on the stack


class Stored(NamedTuple):
    """An output that isn't returned: its statement, with {0} for its place in an array, and {1} for its value."""

    statement: str
    place: int


class _Trees:
    """The expression trees of a program. A shape is the operations of a tree; a leaf is a tuple of value numbers."""

    def __init__(
        self,
        program: Program,
        arrays: Mapping[int, tuple[str, int]],
        returned: set[int],
        stored: list[int],
        irregular: set[int],
    ):
        # `arrays`: the names of the arrays that contain inputs, and the places in them. `irregular`: sums whose terms are
        # roots, or inputs.
        self.shapes: list[tuple] = []  # by number: an operation and the numbers of its arguments' shapes, a leaf, or a sum
        self.roots: dict[int, None] = {}  # the values that are stored in the array on the stack, in order
        self.depths: list[int] = []  # for each value: the largest number of roots on a path from the inputs to it
        self._instructions, self._arrays, self._irregular = program.instructions, arrays, irregular
        uses = Counter(x for one in program.instructions for x in one.arguments)
        uses.update(stored)
        # The argument of an addition that is a sum itself, whose value isn't used elsewhere, and the number of terms.
        self._numbers, self._sums = dict[tuple, int](), dict[int, int | None]()
        terms = [1] * len(program.instructions)
        for i, (operation, arguments, _) in enumerate(program.instructions):
            if operation in ("add", "subtract"):
                earlier = arguments if operation == "add" else arguments[:1]
                inner = [x for x in earlier if uses[x] == 1 and x in self._sums and x not in returned]
                self._sums[i] = max(inner, key=terms.__getitem__, default=None)
                terms[i] = 2 if not inner else 1 + terms[self._sums[i]]  # type: ignore[index]
        inside = set[int]()
        for i in reversed(list(self._sums)):
            if i not in inside and terms[i] < _LEAST_TERMS:
                del self._sums[i]
            elif self._sums[i] is not None:
                inside.add(self._sums[i])  # type: ignore[arg-type]
        terms_of_irregular = {x for i in self._sums if i in irregular for _, x in self._terms(i)}
        booleans, sizes = program.booleans, list[int]()
        for i, (_, arguments, _) in enumerate(program.instructions):
            size, depth = int(bool(arguments)), 0
            for x in arguments:
                size += 0 if x in self.roots else sizes[x]
                depth = max(depth, self.depths[x])
            sizes.append(size)
            self.depths.append(depth)
            separate = uses[i] != 1 or i in returned or i in self._sums or i in terms_of_irregular
            if arguments and (separate or size > _LARGEST_TREE) and i not in inside and not booleans[i]:
                self.roots[i] = None
                self.depths[i] += 1
        # Booleans aren't stored but computed in each tree that uses them, even those of a long chain of conditions.
        self.are_small = all(size <= 2 * _LARGEST_TREE for size, boolean in zip(sizes, booleans) if boolean)

    def tree(self, i: int) -> tuple[int, list[tuple[int, ...]]]:
        """Return the shape of a value's tree and its leaves, in order."""
        operation, arguments, _ = self._instructions[i]
        if i in self._sums:
            return self._sum(i)
        parts = [self.part(x) for x in arguments]
        if OPERATIONS[operation].commutes:
            parts.sort(key=lambda part: part[0])
        return self.number(operation, *(shape for shape, _ in parts)), [leaf for _, leaves in parts for leaf in leaves]

    def part(self, i: int) -> tuple[int, list[tuple[int, ...]]]:
        """Return an argument of an operation: a leaf or a tree."""
        operation, _, value = self._instructions[i]
        if i in self.roots or operation in ("constant", "input"):
            array = self._arrays[i][0] if i in self._arrays else "stack"
            constant = str(value) if isinstance(value, bool) else "constant"
            return self.number("leaf", constant if operation == "constant" else array), [(i,)]
        return self.tree(i)

    def _terms(self, i: int | None) -> list[tuple[str, int]]:
        """Return the terms of a sum, in order, with the operations that add them."""
        terms = list[tuple[str, int]]()
        while i is not None:
            operation, arguments, _ = self._instructions[i]
            inner = self._sums[i]
            terms.append((operation, next((x for x in arguments[::-1] if x != inner), arguments[1])))
            first, i = arguments[0], inner
        return [("", first), *reversed(terms)]

    def _sum(self, i: int) -> tuple[int, list[tuple[int, ...]]]:
        (_, first), *terms = self._terms(i)
        shape, leaves = self.part(first)
        found = [(operation, *self.part(term)) for operation, term in terms]
        if i in self._irregular:
            signed = self.number("multiply", self.number("leaf", "constant"), self.number("leaf", "stack"))
            signs = [_PLUS if operation == "add" else _MINUS for operation, _ in terms]
            found = [("add", signed, [(sign,), *leaf]) for sign, (_, _, leaf) in zip(signs, found)]
        key: list[int | str] = [shape]
        for (operation, shape), run in groupby(found, key=lambda term: term[:2]):
            each = [leaf for _, _, leaf in run]
            key += [operation, shape, len(each)]
            leaves = [*leaves, *(tuple(x for (x,) in leaf) for leaf in zip(*each, strict=True))]
        return self.number("sum", *key), leaves

    def irregular(self, members: Sequence[int], shape: int) -> list[int]:
        """Return the members of a group that are sums, if it is small, and their terms can be roots."""
        operation, *parts = self.shapes[shape]
        if operation != "sum" or len(members) >= _LEAST_GROUP or max(parts[3::3]) >= _LONG:
            return []
        leaves = {self.number("leaf", kind) for kind in (*_CONSTANTS, *(name for name, _ in self._arrays.values()))}
        return [i for i in members if not any(self.part(x)[0] in leaves for _, x in self._terms(i)[1:])]

    def number(self, *shape: str | int) -> int:
        """Return the number of a shape."""
        if shape not in self._numbers:
            self._numbers[shape] = len(self.shapes)
            self.shapes.append(shape)
        return self._numbers[shape]


def rerolled(
    program: Program, texts: Mapping[int, str], outputs: Sequence[str], stored: Mapping[int, Stored], single: bool
) -> list[str] | None:
    """Return a program's statements as loops; None if they aren't much shorter, or if the array would be too large.

    `texts`: those of inputs and constants, by value number. `outputs`: the names of the outputs that aren't `stored`.
    """
    if program.cost <= SHORT or any(x.operation == "table" for x in program.instructions):
        return None
    # The texts of entries of arrays are such as ``s[3]``.
    entries = {i: text.removesuffix("]").partition("[") for i, text in texts.items() if text.endswith("]")}
    arrays = {i: (name, int(place)) for i, (name, _, place) in entries.items() if name.isidentifier() and place.isdigit()}
    # Other inputs are copied to the array on the stack, so that they can be terms of the same sums as other values.
    copied = {i: arrays.pop(i) for i in list(arrays) if arrays[i][0] != "s"}
    returned = {name: i for n, (name, i) in enumerate(zip(outputs, program.outputs, strict=True)) if n not in stored}
    kept = [(program.outputs[n], one) for n, one in stored.items()]
    irregular = list[int]()
    for _ in range(2):
        trees = _Trees(program, arrays, set(returned.values()), [i for i, _ in kept], set(irregular))
        if not trees.are_small:
            return None
        groups: dict[tuple, list[tuple[int, list[tuple[int, ...]]]]] = {}
        for i, (statement, place) in [*((i, ("", i)) for i in trees.roots), *kept]:
            shape, leaves = trees.part(i) if statement else trees.tree(i)
            groups.setdefault((trees.depths[i], statement, shape), []).append((place, leaves))
        irregular = [i for key, members in groups.items() for i in trees.irregular([i for i, _ in members], key[2])]
        if not irregular:
            break
    real = "np.float32" if single else "np.float64"
    printer = _Printer(trees.shapes, {**texts, _PLUS: f"{real}(1.0)", _MINUS: f"{real}(-1.0)"}, real)
    places, size = printer.places, 0
    for i, text in texts.items():
        if i in arrays:
            places[i] = arrays[i][1]
        elif program.instructions[i].operation == "input" and i not in copied:
            places[i], size = size, size + 1
            printer.lines.append(f"stack[{places[i]}] = {text}")
    for name, group in groupby(copied, key=lambda i: copied[i][0]):
        members = list(group)
        places.update((i, copied[i][1]) for i in members)
        targets = [(size + n, [(i,)]) for n, i in enumerate(members)]
        printer.group(trees.number("leaf", name), "stack[{0}] = {1}", targets)
        places.update(zip(members, count(size)))
        size += len(members)
    for (_, statement, shape), members in sorted(groups.items(), key=lambda group: group[0]):
        if not statement:
            places.update((i, size + n) for n, (i, _) in enumerate(members))
            members = [(places[i], leaves) for i, leaves in members]
            size += len(members)
        printer.group(shape, statement or "stack[{0}] = {1}", members)
    results = [f"{name} = {texts[i] if i in texts else f'stack[{places[i]}]'}" for name, i in returned.items()]
    found = [f"stack = on_stack({size}, {real})", *printer.tables, *printer.lines, *results]
    return found if size <= _MOST_ENTRIES and _GAIN * len(found) <= program.cost + len(outputs) else None


# A text with {} for the index base + a i + b j + c k, where i and j are the counters of a group's loops, and k that of the
# terms of a sum; or the text of a constant.
_Operand = tuple[str, int, int, int, int] | str


class _Printer:
    """Appends the loops of groups to `lines`, and tables of constants to `tables`."""

    def __init__(self, shapes: Sequence[tuple], texts: Mapping[int, str], real: str):
        self._shapes, self._texts, self._names, self._depth = shapes, texts, 0, 0
        self._numbers = {"zero": f"{real}(0.0)", "one": f"{real}(1.0)"}
        self.places: dict[int, int] = {}  # the indices of values in their arrays
        self.tables: list[str] = []
        self.lines: list[str] = []

    def group(self, shape: int, statement: str, members: Sequence[tuple[int, list[tuple[int, ...]]]]) -> None:
        """Append the loop of a group of trees, given the places of their values and their leaves."""
        kinds, count = [*self._kinds(shape), "place"], len(members)
        entries = list[Array]()
        for kind, leaf in zip(kinds, zip(*(leaves for _, leaves in members))):
            names: Mapping[int, int | str] = self._texts if kind in _CONSTANTS else self.places
            entries.append(np.array([[names[i] for i in one] for one in leaf]))
        entries.append(np.array([[place] for place, _ in members]))
        # The length of rows, if members are entries of a matrix: a row ends where an index doesn't grow as before.
        indices = [x for x in entries if x.dtype.kind == "i"]
        ends = {int(np.argmax(step != step[0])) + 1 for x in indices if (step := np.diff(x[:, 0])).size}
        lengths = [count, *(n for n in sorted(ends) if not count % n)]
        row = min(lengths, key=lambda n: sum(_affine(x, n) is None for x in indices))
        *operands, place = (self._operand(kind, x, row) for kind, x in zip(kinds, entries))
        # Several sums are computed at a time, which hides the latency of additions.
        tile = next(n for n in (4, 3, 2, 1) if not row % n) if self._shapes[shape][0] == "sum" else 1
        counters = [self._loop("i", count // row), self._loop("j", row, tile)]
        for r, value in enumerate(self._totals(shape, operands, counters, tile)):
            self._add(statement.format(_text(place, counters, r), value))
        self._depth = 0

    def _kinds(self, shape: int) -> list[str]:
        """Return the kinds of a tree's leaves."""
        operation, *parts = self._shapes[shape]
        if operation == "leaf":
            return parts
        return [kind for part in (parts[:1] + parts[2::3] if operation == "sum" else parts) for kind in self._kinds(part)]

    def _operand(self, kind: str, entries: Array, row: int) -> _Operand:
        text, numbers = "{}" if kind in (*_CONSTANTS, "place") else f"{kind}[{{}}]", entries.dtype.kind == "i"
        if not numbers and (entries == entries[0, 0]).all():
            return str(entries[0, 0])
        found = _affine(entries, row) if numbers else None
        if found is not None:
            return text, *found
        name, terms = f"table{len(self.tables)}", entries.shape[1]
        self.tables.append(f"{name} = constants({', '.join(map(str, entries.ravel()))})")
        return text.format(f"{name}[{{}}]"), 0, row * terms, terms, 1

    def _loop(self, counter: str, stop: int, step: int = 1) -> str:
        """Begin a loop, unless it has one iteration; return its counter."""
        if stop <= step:
            return "0"
        self._add(f"for {counter} in range(0, {stop}, {step}):")
        self._depth += 1
        return counter

    def _add(self, line: str) -> None:
        self.lines.append("    " * self._depth + line)

    def _totals(self, shape: int, operands: Sequence[_Operand], counters: Sequence[str], tile: int) -> list[str]:
        """Append the statements of `tile` successive trees; return their values."""
        operation, first, *runs = self._shapes[shape]
        if operation != "sum":
            return [self._value(shape, iter(operands), counters, 0)]
        used, totals = len(self._kinds(first)), [f"total{r}" for r in range(tile)]
        for r, total in enumerate(totals):
            self._add(f"{total} = {self._value(first, iter(operands), counters, r)}")
        for operation, term, length in zip(runs[::3], runs[1::3], runs[2::3]):
            given = operands[used : used + len(self._kinds(term))]
            used += len(given)
            depth, sign = self._depth, "+" if operation == "add" else "-"
            for k in [self._loop("k", length)] if length >= _LEAST_LOOP else map(str, range(length)):
                for r, total in enumerate(totals):
                    self._add(f"{total} = {total} {sign} {self._value(term, iter(given), [*counters, k], r)}")
            self._depth = depth
        return totals

    def _value(self, shape: int, operands: Iterator[_Operand], counters: Sequence[str], r: int) -> str:
        """Append the statements of the tree of the r-th member after that of the counters; return its value."""
        operation, *parts = self._shapes[shape]
        if operation == "leaf":
            return _text(next(operands), counters, r)
        given = [self._value(part, operands, counters, r) for part in parts]
        self._names += 1
        self._add(f"v{self._names} = {OPERATIONS[operation].text.format(*given, **self._numbers)}")
        return f"v{self._names}"


def _affine(indices: Array, row: int) -> tuple[int, int, int, int] | None:
    """Return base, a, b and c with indices[i row + j, k] = base + a i + b j + c k; None if there are none."""
    members, terms = indices.shape
    base = int(indices[0, 0])
    a = int(indices[row, 0]) - base if members > row else 0
    b = int(indices[1, 0]) - base if row > 1 else 0
    c = int(indices[0, 1]) - base if terms > 1 else 0
    n = np.arange(members)
    expected = (base + a * (n // row) + b * (n % row))[:, None] + c * np.arange(terms)
    return (base, a, b, c) if (expected == indices).all() else None


def _text(operand: _Operand, counters: Sequence[str], r: int) -> str:
    if isinstance(operand, str):
        return operand
    text, base, *steps = operand
    base, index = base + r * steps[1], ""
    for step, counter in zip(steps, counters):
        if counter.isdigit():
            base += step * int(counter)
        elif step:
            index += f" + {step} * {counter}"
    return text.format(f"{base}{index}")
