"""The record of a program at x: its operations, the cotangents of their values, and the keys of their balances.

A balance is the difference of two sums of inner products. The inner products are those of values with their *weights*: on
the side of an operation's result the cotangent of the result, and on the side of its arguments the cotangents that the
operation contributes to them. Operations on one rank have balances of their own. Communications share the balance of all
that take part: the two ends of a message, or the calls of a collective operation on all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from autograd.core import sparse_add, sparse_object_types
from autograd.extend import vspace

from mpiad._typing import Array, Function, Tree
from mpiad.device import to_host
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.rules.scatter_add import Scatter
from mpiad.differentiation.tape import Recording
from mpiad.errors import CommunicationMismatchError
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.custom_operator import CustomOperator
from mpiad.primitives.operation import Operation
from mpiad.primitives.request import Request
from mpiad.pytrees import flatten, is_variable
from mpiad.testing.diagnosis.runs import Call
from mpiad.transport import Channel, Envelope
from mpiad.transport.core import calls
from mpiad.transport.core.agreement import agreed

Key: TypeAlias = int | tuple[Hashable, ...]
"""The name of a balance: an index on this rank's tape, or a tuple with the same value on all ranks that take part."""


class Keys(NamedTuple):
    """The keys of the balances to which an operation's result and its arguments belong."""

    result: Key
    arguments: Key


class _KeyCounter:
    """The keys of the calls in one run, and the number of a key's calls on this rank."""

    def __init__(self) -> None:
        self.counts: Counter[Key] = Counter()
        self.ends: Counter[tuple[Any, ...]] = Counter()
        self._requests: dict[int, Key] = {}

    def keys_of(self, index: int, ans: object, call: Call) -> Keys:
        """Return the keys of a call."""
        params: Any = call.params if isinstance(call.fun, Operation) else None
        addresses = params, getattr(params, "dest", None), getattr(params, "source", None)
        messages = [_key_of_message(address) for address in addresses if isinstance(address, Envelope)]
        group = getattr(params, "channel", params)
        self.ends.update(messages)
        key: Key = index
        if messages:
            key = messages[-1]  # that is received, if there is one
        elif isinstance(call.fun, CustomOperator):
            code = getattr(call.fun.fun, "__code__", None)
            line = () if code is None else (code.co_filename, code.co_firstlineno)
            key = self._numbered("operator", call.name, *line)
        elif isinstance(params, Request):  # its end
            key = self._requests.pop(id(params), index)
        elif isinstance(group, Channel):
            key = self._numbered("collective", group.members, group.number)
            self.ends[key] += 1
        elif params is not None and not hasattr(params, "source"):
            # One half of a halo exchange; operations with other parameters share one balance.
            key = "exchange", getattr(params, "number", None)
        if isinstance(ans, Request):
            self._requests[id(ans)] = key
        return Keys(key, messages[0] if messages else key)

    def _numbered(self, *name: Hashable) -> tuple[Hashable, ...]:
        self.counts[name] += 1
        return *name, self.counts[name]


def _key_of_message(address: Envelope) -> tuple[Hashable, ...]:
    group = address.channel
    ends = (group.rank, address.peer) if address.outgoing else (address.peer, group.rank)
    return "message", group.members, group.number, *ends, address.tag, address.number, address.reverse


class Step(NamedTuple):
    """An operation of the program at x."""

    name: str
    call: str  # the name of what `name` has called
    site: calls.Site
    keys: Keys
    argnums: Sequence[int]
    is_separable: bool
    norm: float  # of its value
    rounding: float  # in its value

    def __str__(self) -> str:
        return f"{self.name} at {self.site}"


class Term(NamedTuple):
    """The product of a value with one of its weights, on one side of a balance; `side`: 0 for results, 1 for arguments."""

    weight: int
    side: int
    key: Key
    rounding: float


class WrongAdjoint(NamedTuple):
    """An operation whose adjoint is wrong.

    Attributes
    ----------
    rank : int
        The rank, in the communicator of `diagnose`, whose cotangent is wrong.
    line : str
        The line of the program that calls the operation, such as ``"model.py:12 in loss"``.
    operation : str
        The name of the operation, such as ``"multiply"``, ``"mpi_bcast"`` or the name of a custom operator.
    argument : int or None
        The position of the argument whose cotangent is wrong; None if only the cotangents of several arguments together
        are, or if the operation can't be executed alone, such as a message.
    error : float
        The size of the error, relative to the larger of the two sides of the balance.
    text : str
        A description.

    Examples
    --------
    >>> from mpiad.extend import custom_operator, defvjp
    >>> wrong = custom_operator(lambda x: x**2)
    >>> defvjp(wrong, lambda ans, x: lambda g: 2.02 * x * g)  # it should be 2 x g
    >>> finding = mpiad.testing.diagnose(wrong, 3.0).findings[0]
    >>> print(finding.argument, round(finding.error, 3))
    0 0.01
    """

    rank: int
    line: str
    operation: str
    argument: int | None
    error: float
    text: str


class Record:
    """The steps of the program at x and the weights of their values."""

    def __init__(self, rank: int) -> None:
        self.steps: list[Step] = []
        self._rank = rank
        self._errors: list[tuple[int, WrongAdjoint]] = []  # with the places of their steps
        self.weights: list[Tree] = []
        self.weights_of: list[list[int]] = []  # the places of each step's weights
        self._counter = _KeyCounter()
        self._values: list[Tree] = []  # None if a value has no derivatives
        self.terms: list[Term] = []

    def visit(self, index: int, value: Array, call: Call) -> None:
        """Record a step."""
        keys, eps = self._counter.keys_of(index, value, call), eps_of(value)
        site, size = call.site, norm(value) if eps else 0.0
        step = Step(site.named(call.name), call.name, site, keys, call.argnums, call.is_separable, size, eps * size)
        self.steps.append(step)
        self._values.append(value if eps else None)
        self.weights_of.append([])

    def note(self, index: int, argument: int | None, error: float, text: str) -> None:
        """Note what is wrong with a step's adjoint."""
        step, place = self.steps[index], "" if argument is None else f", argument {argument}"
        text = f"rank {self._rank}, {step.site}: {step.name} {text}{place}"
        self._errors.append((index, WrongAdjoint(self._rank, step.site.text, step.name, argument, error, text)))

    def largest_errors(self) -> list[WrongAdjoint]:
        """Return the largest error of each operation and line, in the order of the program."""
        largest: dict[tuple[str, str], WrongAdjoint] = {}
        for _, wrong in sorted(self._errors, key=itemgetter(0)):
            key = wrong.operation, wrong.line
            largest[key] = max(largest.get(key, wrong), wrong, key=attrgetter("error"))
        return list(largest.values())

    def step_of(self, index: int, call: Call) -> Step | None:
        """Return the step that a call in another run repeats, None if the call is of another operation."""
        step = self.steps[index] if index < len(self.steps) else None
        return step if step is not None and step.call == call.name else None

    def match(self, group: Channel, call: str) -> None:
        """Raise if communications don't match; use one key for all calls of an operator if their number differs by rank."""
        counts: list[Counter[Key]] = group.data.allgather(self._counter.counts)
        ends = sum(group.data.allgather(self._counter.ends), Counter[tuple[Any, ...]]())
        lines = {key: str(step) for step in self.steps for key in step.keys}
        # A message has two ends, and a collective operation one on each rank.
        single = [lines[key] for key in self._counter.ends if ends[key] % (2 if key[0] == "message" else len(key[1]))]
        everyones = [
            f"rank {rank}: {text}" for rank, texts in enumerate(group.data.allgather(single[:1])) for text in texts
        ]
        if everyones:
            text = f"{call}: other ranks don't make the communications that match {'; '.join(everyones)}."
            raise agreed(group, CommunicationMismatchError(text, "\n".join(everyones)))
        different = {name for each in counts for name in each if len({other[name] for other in counts} - {0}) > 1}
        for index, step in enumerate(self.steps):
            key = step.keys.arguments
            if isinstance(key, tuple) and key[:-1] in different:
                self.steps[index] = step._replace(keys=Keys(key[:-1], key[:-1]))

    def run_backward(self, recording: Recording, seeds: Iterable[tuple[int, Array]], variables: int) -> None:
        """Run the program backwards, and store the cotangents as weights."""
        for node in recording.nodes[variables:]:
            node.pull = self._watched(node.index, node.inputs, node.pull)
        with np.errstate(all="ignore"):
            run_backward(recording, seeds, variables)
        self._values.clear()

    def _watched(self, index: int, inputs: Sequence[int], pull: Function) -> Function:
        step = self.steps[index]

        def pulled(g: Tree) -> tuple:
            value, self._values[index] = self._values[index], None
            size = math.nan
            if value is not None:
                size = norm(g)
                self._add(index, g, size, step, 0)
                if norm(value) != step.norm == step.norm:
                    self.note(index, None, 1.0, "returns an array that was overwritten afterwards")
            parts = tuple([without_autograds_sparse_form(part) for part in pull(g)])
            if size == size != norm(g):
                self.note(index, None, 1.0, "has an adjoint that overwrites its argument")
            for k, (parent, part) in enumerate(zip(inputs, parts)):
                if part is not None and self._values[parent] is not None:
                    argument = step.argnums[k] if k < len(step.argnums) else None
                    part_size = norm(part)
                    self._add(parent, part, part_size, step, 1)
                    of = self._values[parent]
                    shape = None if isinstance(of, (tuple, list, dict)) else np.shape(of)
                    if shape is not None and shape != getattr(part, "shape", ()):
                        text = f"has an adjoint that returns an array of shape {np.shape(part)} for one of shape {shape}"
                        self.note(index, argument, 1.0, text)
                    elif math.isfinite(size) and not math.isfinite(part_size):
                        self.note(index, argument, math.inf, "has an adjoint that isn't finite")
            return parts

        return pulled

    def _add(self, index: int, g: Tree, size: float, reader: Step, side: int) -> None:
        places, weight = self.weights_of[index], to_host(g)
        # The cotangent of a value that is read once is that of its reader.
        if not (places and self.weights[places[-1]] is weight):
            places.append(len(self.weights))
            self.weights.append(weight)
        self.terms.append(Term(places[-1], side, reader.keys[side], size * self.steps[index].rounding))


class Products:
    """The products of values with their weights in another run, NaN after the run has left the recorded steps."""

    def __init__(self, record: Record):
        self._record = record
        self.values = np.full(len(record.weights), np.nan)
        self._visited, self.branch = 0, ""

    def visit(self, index: int, value: Array, call: Call) -> None:
        """Compute the products of a step's value, if it is the same step as in the record."""
        if self.branch:
            return
        record, self._visited = self._record, index + 1
        try:
            if record.step_of(index, call) is None:
                raise ValueError
            for weight in record.weights_of[index]:
                self.values[weight] = product(record.weights[weight], value)
        except (ValueError, IndexError):  # another operation, or another shape
            self._leave(f"{call.name} at {call.site}", index)

    def end(self) -> None:
        """Note a run that ended early."""
        if not self.branch and self._visited < len(self._record.steps):
            self._leave("the end of the function", self._visited)

    def _leave(self, text: str, index: int) -> None:
        steps = self._record.steps
        self.branch = f"{text} in place of {steps[index] if index < len(steps) else 'nothing more'}"


# Inner products and norms of values: arrays, numbers, pytrees of them, and sparse cotangents.
#
# Inner products are in autograd's convention: Re Σ a b, without conjugation.


def without_autograds_sparse_form(g: Tree) -> Tree:
    """Return a cotangent, dense if it is autograd's sparse object."""
    return sparse_add(vspace(g), None, g) if type(g) in sparse_object_types else g


def _flat(x: Array) -> np.ndarray:
    """Return an array or a number as a vector on the host."""
    return x.ravel() if type(x) is np.ndarray else np.ravel(to_host(x))


def product(g: Tree, x: Tree) -> float:
    """Return the inner product of a cotangent with a value; None in the cotangent is zero."""
    total = 0.0
    for part, value in zip(flatten(g)[0], flatten(x)[0]):
        if isinstance(part, Scatter):
            total += product(part.values, to_host(value)[part.idx])
        elif part is not None:
            total += float(np.dot(_flat(part), _flat(value)).real)
    return total


def norm(x: Tree) -> float:
    """Return the Euclidean norm of a value or a cotangent."""
    parts = [_flat(part.values if isinstance(part, Scatter) else part) for part in flatten(x)[0] if part is not None]
    return math.sqrt(sum([float(np.vdot(part, part).real) for part in parts]))


def eps_of(x: Tree) -> float:
    """Return the largest machine epsilon of some arrays, 0.0 if none has floating-point numbers."""
    return max([float(np.finfo(spec_like(leaf).dtype).eps) for leaf in flatten(x)[0] if is_variable(leaf)], default=0.0)
