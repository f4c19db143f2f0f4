"""`diagnose`: find the operations of a program whose adjoints are wrong.

Every operation a = φ(b) of a program must satisfy ⟨ā, ȧ⟩ = ⟨b̄, ḃ⟩, where ȧ and ḃ are tangents, ā is any cotangent, and
b̄ is what the adjoint of φ makes of it. The tangents come from differences of runs at x ± h v, so nothing but the values of
the program enters; both sides change by the error of this one adjoint, whatever happens before and after it.

1. A run on a tape, whose nodes keep values, names and lines, and one reverse pass, which keeps the cotangents: the
   *weights* of a value are its own cotangent, and what each operation that reads it contributes.
2. Runs at x ± h v and x ± h v / 2 for two directions v. They compute the inner products of each value with its weights, and
   keep no value. The balance of an operation is the difference of the two sides; errors of order h² are extrapolated away.
   For a communication the sides are summed over the ranks. A message and a request have a balance that both ends share.
3. Only operations out of balance are executed again, alone, with their arguments moved: this separates wrong adjoints from
   kinks, noise and steep functions, and tells the argument, for an operator that communicates also the rank.

At a kink, a derivative is right if it is between the derivatives in the neighborhood. So a maximum must divide a cotangent
among equal arguments or choose one of them, and the derivative of max(x, 0) at zero may be any number from 0 to 1.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from autograd.core import sparse_add, sparse_object_types
from autograd.extend import vspace
from autograd.tracer import notrace_primitives

from mpiad._typing import Argnum, Array, Comm, Function, Rng, Shared, Tree
from mpiad.device import to_host
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.in_place import is_unusual, note_sharing, noted
from mpiad.differentiation.objective import PendingError, problem_with, raise_everywhere
from mpiad.differentiation.rules import VJP_RULES
from mpiad.differentiation.rules.protocol import inherited_vjp
from mpiad.differentiation.rules.scatter_add import Scatter
from mpiad.differentiation.tape import OrderedNode, OrderedTape, trace_list
from mpiad.differentiation.trace import Variables, arguments_with, unfinished, variables_of
from mpiad.errors import CommunicationMismatchError
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.custom_operator import CustomOperator
from mpiad.primitives.operation import Operation, Recorded
from mpiad.primitives.request import Request
from mpiad.pytrees import flatten, is_variable
from mpiad.testing.derivative_checks import noise_like
from mpiad.transport import Channel, Envelope, channel
from mpiad.transport.core import calls
from mpiad.transport.core.agreement import agreed
from mpiad.transport.core.random_keys import generator_of, shared_key

_CALL = "diagnose"
Key = Hashable
"""The name of an operation: an index on this rank's tape, or a tuple with the same value on all ranks that take part."""


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


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of `diagnose`, the same on all ranks.

    Attributes
    ----------
    findings : tuple of WrongAdjoint
        The wrong adjoints, by rank and in the order of the program; one for each rank, line and operation.
    branches : tuple of str
        Lines from which a rank made other operations at a point next to x than at x. The operations after such a line are
        checked only along the directions in which the program didn't change.
    unrepeatable : tuple of str
        Lines from which a rank computed other values in a second run with the same arguments.
    checked, unchecked : int
        The number of operations on all ranks that were checked, and of those that couldn't be: nothing depends on their
        results, or differences aren't finite.

    Examples
    --------
    >>> print(mpiad.testing.diagnose(lambda x: mpiad.mpi_allreduce(np.sum(np.sin(x))), np.ones(2)).findings)
    ()
    """

    findings: tuple[WrongAdjoint, ...]
    branches: tuple[str, ...]
    unrepeatable: tuple[str, ...]
    checked: int
    unchecked: int

    def __repr__(self) -> str:
        lines = [f"{each.text}" for each in self.findings] or ["no wrong adjoint"]
        lines += [f"not repeatable: {text}" for text in self.unrepeatable]
        lines += [f"branch: {text}" for text in self.branches]
        return "\n".join([*lines, f"{self.checked} operations checked, {self.unchecked} not"])


# The tape.


class _Call(NamedTuple):
    """A call of an operation: of NumPy with keywords as `params`, or a communication with its parameters."""

    fun: Any
    args: tuple = ()
    params: Any = None
    argnums: Sequence[int] = ()
    key: Key | None = None  # None: that of the node

    @property
    def name(self) -> str:
        return getattr(self.fun, "__name__", "") or str(self.fun)

    @property
    def is_separable(self) -> bool:
        """Whether the operation can be executed alone, without the other operations of the program."""
        if isinstance(self.fun, Operation):
            return not (self.fun.of_request or self.fun.point_to_point)
        return callable(self.fun)

    def run(self, args: Sequence[Array]) -> Array:
        if isinstance(self.fun, Recorded):
            return self.fun.run(tuple(args), self.params)
        return self.fun(*args, **self.params)

    def pull(self, ans: Array) -> Function:
        if isinstance(self.fun, Recorded):
            return self.fun.vjp(ans, self.args, self.params, tuple(self.argnums), -1)
        rule = VJP_RULES.get(self.fun)
        if rule is not None:
            return rule(tuple(self.argnums), ans, self.args, self.params)
        return inherited_vjp(self.fun, tuple(self.argnums), ans, self.args, self.params)


class _WatchedNode(OrderedNode):
    """A node of a `_WatchedTape`."""

    __slots__ = ()

    def __init__(
        self, value: Array, fun: Function, args: tuple, kwargs: dict, parent_argnums: tuple, parents: Sequence[Any]
    ):
        tape = parents[0].tape
        if tape.keeps_adjoints:
            super().__init__(value, fun, args, kwargs, parent_argnums, parents)
        else:
            if kwargs or len(args) > 2 or is_unusual(value, args):
                noted(self, value, fun, args, kwargs, parent_argnums, parents)
            self.tape, self.index, self.inputs, self.pull, self.like = tape, len(tape.record), (), None, None
            tape.record.append(self)
        argnums = [k for k, parent in zip(parent_argnums, parents) if parent.tape is tape]
        tape.visit(self.index, value, _Call(fun, args, kwargs, argnums))


notrace_primitives[_WatchedNode] = notrace_primitives[OrderedNode]


class _WatchedTape(OrderedTape):
    """A tape that calls ``visit(index, value, call)`` for each node; `keeps_adjoints`: for a reverse pass."""

    unfolds = True

    def __init__(self, visit: Callable[[int, Array, _Call], None], keeps_adjoints: bool) -> None:
        super().__init__()
        self.visit, self.keeps_adjoints = visit, keeps_adjoints

    def variables(self, values: Sequence[Array]) -> None:
        """Visit the nodes of the variables."""
        for node, value in zip(self.record, values):
            node.__class__ = _WatchedNode
            self.visit(node.index, value, _Call("argument"))

    def communicated(
        self, operator: Recorded, ans: Array, args: tuple, params: object, argnums: Sequence[int], parents: Sequence[Any]
    ) -> Any:
        """Record a communication."""
        is_array = hasattr(ans, "dtype")
        if self.keeps_adjoints:
            super().communicated(operator, ans, args, params, argnums, parents)
        else:
            OrderedNode.on_tape(self)
        node = self.record[-1]
        node.__class__ = _WatchedNode
        if args and not self.keeps_adjoints and is_unusual(ans, args):
            note_sharing(node, ans, args, argnums, parents)
        traced = [k for k, parent in zip(argnums, parents) if parent.tape is self]
        self.visit(node.index, ans, _Call(operator, args, params, traced))
        return node if is_array else None

    def record_call(
        self, channels: set, values: Sequence[Array], is_traced: Sequence[bool], inputs: Sequence[int], pull: Any,
        communicates: bool, pull_all: Callable | None = None,
    ) -> list[Array]:  # fmt: skip
        """Record a call of a compiled function, and its results, which share the key of the call."""
        first = len(self.record)
        made = super().record_call(channels, values, is_traced, inputs, pull, communicates, pull_all)
        results = [value for value, traced in zip(values, is_traced) if traced and is_variable(value)]
        for node, value in zip(self.record[first:], [None, *results]):
            node.__class__ = _WatchedNode
            self.visit(node.index, value, _Call("compiled call", params=communicates, key=first))
        return made


class _Program(NamedTuple):
    """The function, its arguments and its variables."""

    fun: Function
    args: tuple
    argnum: Argnum
    variables: Variables

    def run(
        self, values: Sequence[Array], visit: Callable[[int, Array, _Call], None], keeps_adjoints: bool = False
    ) -> tuple[list[Array], list[int], Any, Any, PendingError | None]:
        """Run the function on a tape; return results, their positions, the builder of their structure, record, problem."""
        tape, builds = _WatchedTape(visit, keeps_adjoints), list[Any]()

        def called(boxes: list[Any]) -> list[Any]:
            tape.variables(values)
            leaves, build = flatten(self.fun(*arguments_with(self.args, self.argnum, self.variables.filled(boxes))))
            builds.append(build)
            return leaves

        with np.errstate(all="ignore"):
            results, places, recording = trace_list(called, values, tape)
        return results, places, builds[0], recording, unfinished(tape)


# Inner products of values and cotangents, in autograd's convention: Re Σ a b, without conjugation.


def _dense(g: Any) -> Any:
    """Return a cotangent without autograd's sparse form."""
    return sparse_add(vspace(g), None, g) if type(g) in sparse_object_types else g


def _weight(g: Any) -> Any:
    """Return a cotangent in the form that `_product` takes: on the host and conjugate."""
    if type(g) is np.ndarray:
        return np.conj(g) if g.dtype.kind == "c" else g
    if isinstance(g, Scatter):
        return Scatter(g.shape, g.dtype, g.idx, np.conj(to_host(g.values)), g.repeats)
    if isinstance(g, (tuple, list, dict)):
        leaves, build = flatten(g)
        return build([_weight(leaf) for leaf in leaves])
    g = to_host(g)
    return np.conj(g) if np.iscomplexobj(g) else g


def _product(weight: Any, x: Any) -> float:
    if type(weight) is np.ndarray and type(x) is np.ndarray:
        return np.vdot(weight, x).real
    if isinstance(weight, Scatter):
        return float(np.vdot(weight.values, to_host(x)[weight.idx]).real)
    if isinstance(weight, (tuple, list, dict)):
        return sum(_product(*pair) for pair in zip(flatten(weight)[0], flatten(x)[0]) if pair[0] is not None)
    return float(np.vdot(weight, to_host(x)).real)


def _norm(x: Any) -> float:
    if type(x) is np.ndarray:
        return math.sqrt(np.vdot(x, x).real)
    if isinstance(x, Scatter):
        return _norm(x.values)
    if isinstance(x, (tuple, list, dict)):
        return math.hypot(*map(_norm, flatten(x)[0]))
    x = to_host(x)
    return math.sqrt(np.vdot(x, x).real)


def _eps(x: Any) -> float:
    """Return the largest machine epsilon of some arrays, 0.0 if none has floating-point numbers."""
    if type(x) is np.ndarray:
        return _eps_of(x.dtype)
    return max((_eps_of(spec_like(leaf).dtype) for leaf in flatten(x)[0] if is_variable(leaf)), default=0.0)


@functools.lru_cache
def _eps_of(dtype: np.dtype) -> float:
    return float(np.finfo(dtype).eps) if dtype.kind in "fc" else 0.0


def _scale(x: Array) -> Array:
    """Return the size of a step for each entry of an array: that of the entry, or of the array if the entry is tiny."""
    rms = np.sqrt(np.mean(np.abs(x) ** 2)) if np.size(x) else 0.0
    return np.maximum(np.abs(x), 0.01 * rms) if 0 < rms < np.inf else np.ones(np.shape(x))


def _direction(x: Array, rng: np.random.Generator, is_uniform: bool) -> Array:
    """Return a random direction with the size of x; if `is_uniform`, all its entries are nearly the same, if x is real."""
    x = to_host(x)
    noise = noise_like(x, rng)
    return np.asarray(_scale(x) * (1 + 0.1 * noise if is_uniform else noise), spec_like(x).dtype)


def _moved(x: Array, step: float, direction: Array) -> Array:
    spec = spec_like(x)
    moved = np.asarray(to_host(x) + step * direction, spec.dtype)
    return moved[()] if spec.arrays is None else spec.arrays.to_device(moved)


# The record of the program at x.


class _Keys:
    """The keys of the calls in one run, and the number of a key's calls on this rank."""

    def __init__(self) -> None:
        self.counts: Counter[Hashable] = Counter()
        self.ends: Counter[tuple] = Counter()
        self._requests: dict[int, Key] = {}

    def of(self, index: int, ans: Any, call: _Call) -> tuple[Key, Key]:
        """Return the key of the balance to which the call's result belongs, and that of its arguments' cotangents."""
        key: Key = index if call.key is None else call.key
        if call.key is not None and call.params:  # a compiled call that communicates
            key = self._numbered(("compiled call",), call.key == index)
        elif isinstance(call.fun, CustomOperator):
            code = getattr(call.fun.fun, "__code__", None)
            place = () if code is None else (code.co_filename, code.co_firstlineno)
            key = self._numbered(("operator", call.name, *place))
        elif isinstance(call.fun, Operation):
            return self._of_operation(index, ans, call.params)
        return key, key

    def _of_operation(self, index: int, ans: Any, params: Any) -> tuple[Key, Key]:
        if isinstance(params, Request):  # its end
            key = self._requests.pop(id(params), index)
            return key, key
        sent = params if isinstance(params, Envelope) or params is None else getattr(params, "dest", None)
        received = getattr(params, "source", None)
        group = params if isinstance(params, Channel) else getattr(params, "channel", None)
        outgoing: Key = index
        incoming: Key | None = None  # the same
        if sent is not None or received is not None:
            messages = [self._of_message(address) for address in (received, sent) if address is not None]
            self.ends.update(messages)
            outgoing, incoming = messages[0], messages[-1]
        elif isinstance(group, Channel):
            outgoing = self._numbered(("collective", group.members, group.number))
            self.ends[outgoing] += 1
        elif params is not None and not hasattr(params, "source"):  # one half of a halo exchange
            outgoing = "exchange", getattr(getattr(params, "exchange", params), "number", None)
        if isinstance(ans, Request):
            self._requests[id(ans)] = outgoing
        return outgoing, outgoing if incoming is None else incoming

    @staticmethod
    def _of_message(address: Envelope) -> tuple:
        group = address.channel
        ends = (group.rank, address.peer) if address.outgoing else (address.peer, group.rank)
        return "message", group.members, group.number, *ends, address.tag, address.number, address.reverse

    def _numbered(self, name: tuple, is_new: bool = True) -> tuple:
        self.counts[name] += is_new
        return *name, self.counts[name]


class _Step(NamedTuple):
    """An operation of the program at x; `outgoing`, `incoming`: the keys of its result and of its arguments."""

    name: str
    call: str  # the name of what `name` has called
    site: calls.Site
    outgoing: Key
    incoming: Key
    argnums: Sequence[int]
    is_separable: bool
    norm: float  # of its value
    rounding: float  # in its value


class _Balances(NamedTuple):
    """Balances: the derivatives of both sides by key, direction and step h, and bounds of rounding errors by key."""

    keys: list[Key]
    sides: Array
    noise: Array

    def defects(self) -> tuple[Array, Array]:
        """Return the defects by key and direction, extrapolated if there are two steps, and their uncertainty."""
        difference = self.sides[0] - self.sides[1]
        coarse, fine = difference[..., 0], difference[..., -1]
        factor = 1.0 if difference.shape[-1] == 1 else 4.0
        change = np.abs(fine - coarse)
        return np.abs(coarse + factor * (fine - coarse) / max(factor - 1.0, 1.0)), self.noise[:, None] + 0.05 * change

    def suspects(self) -> list[int]:
        """Return the places of the balances with a defect that rounding and the next order of h don't explain."""
        defects, uncertainty = self.defects()
        sizes = np.max(np.abs(self.sides), axis=(0, 3))
        return np.flatnonzero(np.any(defects > uncertainty + 0.1 * _RTOL * sizes, axis=1)).tolist()

    def known(self) -> Array:
        """Return whether a balance is known in some direction."""
        return np.any(np.isfinite(self.defects()[0]), axis=1)

    def error(self, place: int) -> float:
        """Return a defect, relative to the larger side, if it is clear in all directions that are known; otherwise 0.0.

        Noise and kinks near x don't cause defects that are the same for both steps.
        """
        defects, uncertainty = (x[place] for x in self.defects())
        defects, uncertainty = defects[np.isfinite(defects)], uncertainty[np.isfinite(defects)]
        error = float(np.max(defects, initial=0.0) / np.nanmax(np.abs(self.sides[:, place]), initial=1e-300))
        return error if np.all(defects > 5 * uncertainty) and error > _RTOL else 0.0


_RTOL = 1e-5  # of the error of an adjoint, relative to the larger side
_DIRECTIONS = 2


class _Term(NamedTuple):
    """The product of a step's value with one of its weights, on one side (0: results) of a balance."""

    step: int
    weight: int
    side: int
    key: Key
    rounding: float


class _Problem(NamedTuple):
    """What is wrong with a step's adjoint."""

    step: int
    argument: int | None
    error: float
    text: str


class _Record:
    """The steps of the program at x and the weights of their values."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.keys = _Keys()
        self.weights: list[list[Any]] = []  # of each step's value
        self.problems: list[_Problem] = []
        self._values: list[Any] = []
        self._terms: list[_Term] = []

    def visit(self, index: int, value: Array, call: _Call) -> None:
        """Record a step."""
        outgoing, incoming = self.keys.of(index, value, call)
        eps = _eps(value)
        value = value if eps else None
        site = calls.site_of(sys._getframe(1))
        norm = _norm(value) if eps else 0.0
        rounding = eps * norm
        name = site.named(call.name)
        self.steps.append(_Step(name, call.name, site, outgoing, incoming, call.argnums, call.is_separable, norm, rounding))
        self._values.append(value)
        self.weights.append([])

    def run_backward(self, recording: Any, seeds: list[tuple[int, Array]], variables: int) -> None:
        """Run the program backwards, and store the cotangents as weights."""
        for node in recording.nodes[variables:]:
            node.pull = self._watched(node.index, node.inputs, node.pull)
        with np.errstate(all="ignore"):
            run_backward(recording, seeds, variables)
        self._values.clear()

    def _watched(self, index: int, inputs: Sequence[int], pull: Function) -> Function:
        step = self.steps[index]

        def pulled(g: Any) -> tuple:
            value, self._values[index] = self._values[index], None
            size = math.nan
            if value is not None:
                size = _norm(g)
                self._add(index, g, size, 0, step.outgoing)
                if _norm(value) != step.norm == step.norm:
                    self.problems.append(_Problem(index, None, 1.0, "returns an array that was overwritten afterwards"))
            parts = tuple([_dense(part) for part in pull(g)])
            if size == size != _norm(g):
                self.problems.append(_Problem(index, None, 1.0, "has an adjoint that overwrites its argument"))
            for k, (parent, part) in enumerate(zip(inputs, parts)):
                if part is not None and self._values[parent] is not None:
                    argument = step.argnums[k] if k < len(step.argnums) else None
                    norm = _norm(part)
                    self._check(index, argument, part, self._values[parent], norm, math.isfinite(size))
                    self._add(parent, part, norm, 1, step.incoming)
            return parts

        return pulled

    def _check(self, index: int, argument: int | None, part: Any, value: Any, norm: float, was_finite: bool) -> None:
        shape = None if isinstance(value, (tuple, list, dict)) else np.shape(value)
        if shape is not None and shape != getattr(part, "shape", ()):
            text = f"has an adjoint that returns an array of shape {np.shape(part)} for one of shape {shape}"
            self.problems.append(_Problem(index, argument, 1.0, text))
        elif was_finite and not math.isfinite(norm):
            self.problems.append(_Problem(index, argument, math.inf, "has an adjoint that isn't finite"))

    def _add(self, index: int, g: Any, norm: float, side: int, key: Key) -> None:
        weights, weight = self.weights[index], _weight(g)
        # The cotangent of a value that is read once is that of its reader.
        if not (weights and weights[-1] is weight):
            weights.append(weight)
        self._terms.append(_Term(index, len(weights) - 1, side, key, norm * self.steps[index].rounding))

    def products(self) -> _Products:
        """Return the visitor of another run."""
        return _Products(self.steps, self.weights)

    def balances(self, tangents: Array, h: float) -> _Balances:
        """Return the balances; `tangents`: of the products, by direction and step."""
        groups = {key: k for k, key in enumerate(dict.fromkeys(term.key for term in self._terms))}
        starts = np.cumsum([0, *map(len, self.weights)])
        slots = [starts[term.step] + term.weight for term in self._terms]
        places = [groups[term.key] for term in self._terms]
        sides, noise = np.zeros((2, len(groups), *tangents.shape[1:])), np.zeros(len(groups))
        np.add.at(sides, ([term.side for term in self._terms], places), tangents[slots])
        np.add.at(noise, places, [16 / h * term.rounding for term in self._terms])
        return _Balances(list(groups), sides, noise)


class _Products:
    """The products of values with their weights in another run, NaN after the run has left the recorded steps."""

    def __init__(self, steps: list[_Step], weights: list[list[Any]]):
        self._steps, self._weights = steps, weights
        self._starts: list[int] = np.cumsum([0, *map(len, weights)]).tolist()
        self.values = np.full(self._starts[-1], np.nan)
        self.visited, self.branch = 0, ""

    def visit(self, index: int, value: Array, call: _Call) -> None:
        """Compute the products of a step's value, if it is the same step as in the record."""
        if self.branch:
            return
        self.visited = index + 1
        step = self._steps[index] if index < len(self._steps) else None
        try:
            if step is None or step.call != call.name:
                raise ValueError
            for start, weight in enumerate(self._weights[index], self._starts[index]):
                self.values[start] = _product(weight, value)
        except (ValueError, IndexError):  # another operation, or another shape
            site = calls.site_of(sys._getframe(1))
            expected = "nothing more" if step is None else f"{step.name} at {step.site}"
            self.branch = f"{call.name} at {site} in place of {expected}"

    def end(self) -> None:
        """Note a run that ended early."""
        if not self.branch and self.visited < len(self._steps):
            step = self._steps[self.visited]
            self.branch = f"the end of the function in place of {step.name} at {step.site}"


# Operations out of balance, executed alone.


class _Execution:
    """A call of an operation, with copies of its arguments and of its result."""

    def __init__(self, call: _Call, ans: Array):
        copies, build = flatten(call.args)
        self.call = call._replace(args=tuple(build([np.copy(x)[()] if _is_on_host(x) else x for x in copies])))
        self.ans = np.copy(ans)[()] if _is_on_host(ans) else ans
        self.varies = False  # whether the result has depended on the arguments

    def interval(self, moving: Sequence[int], rng: np.random.Generator, is_uniform: bool) -> Array:
        """Return ⟨pull(g), d⟩ for a random g, the range of ⟨g, ∂φ d⟩ near the arguments, and a bound of rounding errors.

        The direction d is zero except for the arguments in `moving`.
        """
        leaves, build = flatten(self.ans)
        g = build([_positive(leaf, rng) if is_variable(leaf) else leaf for leaf in leaves])
        directions, nearby = [], []
        for k in self.call.argnums:
            parts, join = flatten(self.call.args[k])
            directions.append(join([_direction(x, rng, is_uniform) * (k in moving) for x in parts]))
            nearby.append([join([_direction(x, rng, False) for x in parts]) for _ in range(_NEARBY)])
        with np.errstate(all="ignore"):
            parts = [_dense(part) for part in self.call.pull(self.ans)(g)]
            adjoint = sum(_product(_weight(part), d) for part, d in zip(parts, directions) if part is not None)
            eps = max([_eps(self.ans), *[_eps(self.call.args[k]) for k in self.call.argnums]])
            step = eps**0.4
            here, before, after = (self._results(t, directions, 0.0, None) for t in (0.0, -step, step))
            slopes = [self._slopes(g, here, after, step), self._slopes(g, before, here, step)]
            for shift in zip(*nearby):
                ends = [self._results(t, directions, 4 * step, shift) for t in (-step, step)]
                slopes.append(self._slopes(g, ends[0], ends[1], 2 * step))
            low, high = np.fmin.reduce(slopes), np.fmax.reduce(slopes)
            self.varies |= bool(np.any(low) or np.any(high))
            # The derivatives at some points nearby are a sample of those that a kink has.
            width = np.sum(high - low)
            size = np.sum(np.abs(self._slopes(g, 0.0, here, 1.0))) + sum(
                _norm(part) * _norm(self.call.args[k]) for k, part in zip(self.call.argnums, parts) if part is not None
            )
            return np.array([adjoint, np.sum(low) - width, np.sum(high) + width, 16 * eps * size / step])

    def _results(self, t: float, directions: list[Any], distance: float, shift: Sequence[Any] | None) -> list[Array]:
        args = list(self.call.args)
        for place, k in enumerate(self.call.argnums):
            leaves, build = flatten(args[k])
            moves = flatten(directions[place])[0]
            if shift is not None:
                leaves = [_moved(x, distance, d) for x, d in zip(leaves, flatten(shift[place])[0])]
            args[k] = build([_moved(x, t, d) for x, d in zip(leaves, moves)])
        return [to_host(leaf) for leaf in flatten(self.call.run(args))[0]]

    @staticmethod
    def _slopes(g: Any, before: Any, after: list[Array], step: float) -> Array:
        """Return the derivatives of the entries of all results, times those of g."""
        weights = flatten(g)[0]
        before = before if isinstance(before, list) else [before] * len(after)
        slopes = [np.ravel(np.real(w * (b - a))) / step for w, a, b in zip(weights, before, after) if is_variable(w)]
        return np.concatenate([np.zeros(0), *slopes])


_NEARBY = 3


def _is_on_host(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic))


def _positive(leaf: Array, rng: np.random.Generator) -> Array:
    noise = noise_like(leaf, rng)
    return noise if np.iscomplexobj(noise) else abs(noise) + spec_like(leaf).dtype.type(0.5)


def _error_of(intervals: Array) -> float:
    """Return the relative distance of an adjoint from the range of derivatives, summed over ranks; 0 if within rounding."""
    adjoint, low, high, rounding = np.sum(intervals, axis=0)
    outside = max(adjoint - high, low - adjoint)
    size = max(abs(adjoint), abs(low), abs(high))
    return float(outside / size) if outside > rounding + _RTOL * size else 0.0


class _Error(NamedTuple):
    """The error of an adjoint, on a rank and for an argument; None: for all that take part together."""

    rank: int | None
    argument: int | None
    error: float


def _errors(
    execution: _Execution | None, participants: list[tuple[int, int]], rank: int, gather: Callable[[Any], list], key: int
) -> list[_Error]:
    """Return the errors of the adjoint of an operation; nothing for a right adjoint.

    `participants`: the ranks that execute the operation, with the positions of their traced arguments.
    """

    def error(moving: Sequence[tuple[int, int]]) -> float:
        errors = []
        for trial, is_uniform in enumerate((True, False, False)):
            rng = generator_of(key, trial, rank)
            interval = np.zeros(4)
            if execution is not None:
                interval = execution.interval([k for r, k in moving if r == rank], rng, is_uniform)
            errors.append(_error_of(np.array(gather(interval))))
        return max(errors)

    total = error(participants)
    if total == 0.0:
        return []
    single = [_Error(*participant, error([participant])) for participant in participants]
    return [each for each in single if each.error > 0.0] or [_Error(None, None, total)]


def diagnose(
    fun: Function,
    *args: object,
    cotangents: Tree = None,
    argnum: Argnum = 0,
    shared: Shared = False,
    comm: Comm = None,
    rng: Rng = 0,
) -> Diagnosis:
    """Find the operations of a function whose adjoints are wrong, by rank and line; not differentiable.

    The function runs nine times, at `args` and at points nearby, and is differentiated once. Each operation on traced
    values is checked by itself: operations of NumPy, communications, custom operators, functions of other libraries. The
    steps of `scan` and the operations in functions that are compiled by `jit` are checked one by one. Operations out of
    balance are executed again, alone. The reverse pass keeps all cotangents, so the memory for each value is that of three.

    Parameters
    ----------
    fun : callable
        The function, as for `value_and_grad`.
    *args : object
        This rank's arguments.
    cotangents : pytree, optional
        Cotangents of the results, in their structure, for a function that doesn't return one real number or None. By
        default 1.0 on each rank that returns a number. The check doesn't depend on the objective.
    argnum, shared, comm
        As for `value_and_grad`.
    rng : Generator, SeedSequence or int, optional
        The source of the directions, the same on all ranks; None: other ones in each call.

    Returns
    -------
    Diagnosis
        The wrong adjoints, branches and operations that aren't repeatable; the same on all ranks.

    Raises
    ------
    TypeError
        On all ranks, if a result isn't a real number or None, and there are no `cotangents`. Also if the argument has no
        real or complex floats.
    CommunicationMismatchError
        On all ranks, if a message isn't received, or a rank doesn't take part in a collective call.
    RequestError
        On all ranks, if a rank never waits for a request.

    Ranks
    -----
    All ranks of `comm` call it.

    Examples
    --------
    >>> from mpiad.extend import custom_operator, defvjp
    >>> wrong = custom_operator(lambda x: x**2)
    >>> defvjp(wrong, lambda ans, x: lambda g: 2.02 * x * g)  # it should be 2 x g
    >>> report = mpiad.testing.diagnose(lambda x: mpiad.mpi_allreduce(np.sum(wrong(x))), np.ones(3))
    >>> print(len(report.findings) == mpiad.mpi_size(), report.findings[0].rank)
    True 0
    """
    group = channel(comm, _CALL)
    key = shared_key(rng, group, _CALL)
    variables = variables_of(args, argnum, _CALL, shared)
    program, record = _Program(fun, args, argnum, variables), _Record()
    x = [variables.leaves[place] for place in variables.places]
    results, places, build, recording, problem = program.run(x, record.visit, keeps_adjoints=True)
    seeds, problem = _seeds(results, places, build, cotangents, problem)
    if any(group.data.allgather(problem is not None)):
        raise_everywhere(group, problem)
    _compare(record, group)
    record.run_backward(recording, seeds, len(x))
    del recording
    return _Search(program, record, group, key).diagnosis()


def _seeds(
    results: list[Any], places: list[int], build: Any, cotangents: Tree, problem: PendingError | None
) -> tuple[list[tuple[int, Array]], PendingError | None]:
    """Return the cotangents of the results with their positions; or a problem of this rank."""
    if cotangents is None:
        value = build(results)
        wanted = "without cotangents= the function must return one real number or None on each rank"
        problem = problem or problem_with(value, 0.0, _CALL, wanted)
        return [] if problem else [(p, spec_like(y).zeros() + 1) for p, y in zip(places, results) if p >= 0], problem
    leaves = flatten(cotangents)[0]
    shapes = [np.shape(y) for y in results], [np.shape(g) for g in leaves]
    if shapes[0] != shapes[1]:
        text = f"{_CALL}: cotangents= must have the shapes of the results, {shapes[0]}, but got {shapes[1]}."
        problem = problem or PendingError(ValueError, text)
    return [(p, np.asarray(g)[()]) for p, g in zip(places, leaves) if p >= 0], problem


def _compare(record: _Record, group: Channel) -> None:
    """Raise if communications don't match; use one key for all calls of an operator if their number differs by rank."""
    ends = Counter[tuple]()
    for each in group.data.allgather(record.keys.ends):
        ends.update(each)
    lines = {key: f"{step.name} at {step.site}" for step in record.steps for key in (step.outgoing, step.incoming)}
    single = [lines[key] for key in record.keys.ends if ends[key] % (2 if key[0] == "message" else len(key[1]))]
    everyones = [f"rank {rank}: {text}" for rank, texts in enumerate(group.data.allgather(single[:1])) for text in texts]
    if everyones:
        text = f"{_CALL}: other ranks don't make the communications that match {'; '.join(everyones)}."
        raise agreed(group, CommunicationMismatchError(text, "\n".join(everyones)))
    counts = group.data.allgather(record.keys.counts)
    different = {name for each in counts for name in each if len({other[name] for other in counts} - {0}) > 1}
    for index, step in enumerate(record.steps):
        if isinstance(step.incoming, tuple) and step.incoming[:-1] in different:
            record.steps[index] = step._replace(outgoing=step.incoming[:-1], incoming=step.incoming[:-1])


class _Search:
    """The search for wrong adjoints."""

    def __init__(self, program: _Program, record: _Record, group: Channel, key: int):
        self.program, self.record, self.group, self.key = program, record, group, key
        self.gather: Callable[[Any], list[Any]] = group.data.allgather
        self.problems, self.branches, self.unrepeatable = record.problems, dict[str, None](), ""
        self.inseparable = 0  # the number of suspects that can't be executed alone
        self.steps: dict[Key, list[int]] = {}  # the steps of a balance on this rank
        for index, step in enumerate(record.steps):
            for balance in {step.incoming, step.outgoing}:
                self.steps.setdefault(balance, []).append(index)
        variables = program.variables
        self.x = [variables.leaves[place] for place in variables.places]
        # A shared variable moves in the same direction on all ranks.
        rngs = [[generator_of(key, k, rank) for rank in (group.rank, 0)] for k in range(_DIRECTIONS)]
        self.directions = [
            [_direction(leaf, pair[k in variables.shared], trial == 1) for k, leaf in enumerate(self.x)]
            for trial, pair in enumerate(rngs)
        ]
        # Truncation errors of order h² and rounding errors of order ε / h have the same size.
        self.h = max(self.gather(max((each.rounding / each.norm for each in record.steps if each.norm > 0), default=0.0)))
        self.h = self.h ** (1 / 3)

    def diagnosis(self) -> Diagnosis:
        """Return the result, on all ranks."""
        local, common = self._balances([self.h])
        if any(self.gather(bool(local.suspects() or common.suspects()))):
            local, common = self._balances([self.h, self.h / 2])
            suspects = self._worst(local), set().union(*self.gather(self._worst(common)))
            if any(self.gather(any(map(bool, suspects)))):
                self._examine(local, common, *suspects)
        every = self.gather((self._findings(), list(self.branches), self.unrepeatable, self._counts(local)))
        branches = [f"rank {rank}: {text}" for rank, each in enumerate(every) for text in each[1]]
        unrepeatable = [f"rank {rank}: {each[2]}" for rank, each in enumerate(every) if each[2]]
        checked, steps = (sum(each[3][k] for each in every) for k in (0, 1))
        checked, steps = checked + int(np.sum(common.known())), steps + len(common.keys)
        findings = [finding for each in every for finding in each[0]]
        return Diagnosis(tuple(findings), tuple(branches), tuple(unrepeatable), checked, steps - checked)

    def _balances(self, steps: Sequence[float]) -> tuple[_Balances, _Balances]:
        """Return the balances of operations on this rank, and those that several ranks have in common."""
        tangents = np.stack([np.stack([self._tangents(v, h) for h in steps], axis=-1) for v in self.directions], axis=1)
        balances = self.record.balances(tangents, self.h)
        is_common = np.array([isinstance(key, tuple) for key in balances.keys], dtype=bool)
        local, shared = (
            _Balances([balances.keys[k] for k in np.flatnonzero(flags)], balances.sides[:, flags], balances.noise[flags])
            for flags in (~is_common, is_common)
        )
        total: dict[Key, list[Any]] = {}
        for each in self.gather(shared):
            for k, key in enumerate(each.keys):
                before = total.setdefault(key, [0.0, 0.0])
                total[key] = [before[0] + each.sides[:, k], before[1] + each.noise[k]]
        sides = [each[0] for each in total.values()]
        common = np.stack(sides, axis=1) if sides else np.zeros((2, 0, *tangents.shape[1:]))
        return local, _Balances(list(total), common, np.array([each[1] for each in total.values()]))

    def _tangents(self, v: list[Array], h: float) -> Array:
        """Return the derivatives of all products along v, by a difference."""
        ends = []
        for step in (h, -h):
            products = self.record.products()
            self.program.run([_moved(leaf, step, d) for leaf, d in zip(self.x, v)], products.visit)
            products.end()
            if products.branch:
                self.branches[products.branch] = None
            ends.append(products.values)
        return (ends[0] - ends[1]) / (2 * h)

    def _counts(self, local: _Balances) -> tuple[int, int]:
        """Return the number of operations that were checked on this rank, and the number of all."""
        variables = range(len(self.x))
        is_step = np.array([key not in variables for key in local.keys], dtype=bool)
        steps = [key for key in self.steps if not isinstance(key, tuple) and key not in variables]
        return int(np.sum(local.known() & is_step)) - self.inseparable, len(steps)

    def _worst(self, balances: _Balances) -> list[int]:
        """Return the places of at most three suspects for each operation and line of this rank, the largest defects."""
        lines: dict[tuple, list[int]] = {}
        defects = np.nanmax(balances.defects()[0], axis=1, initial=0.0)
        for place in sorted(balances.suspects(), key=lambda place: -defects[place]):
            for index in self.steps.get(balances.keys[place], ())[:1]:
                step = self.record.steps[index]
                lines.setdefault((step.name, step.site), []).append(place)
        return [place for same in lines.values() for place in same[:3]]

    def _examine(self, local: _Balances, common: _Balances, places: list[int], common_places: set[int]) -> None:
        """Execute the suspects again, and note their errors."""
        keys = [local.keys[place] for place in places] + [common.keys[place] for place in sorted(common_places)]
        executions = self._executions({index for key in keys for index in self.steps.get(key, ())})
        is_repeatable = not any(self.gather(self.unrepeatable))
        for place in places:
            index = self.steps[local.keys[place]][0]
            if index in executions:
                participants = [(0, k) for k in executions[index].call.argnums]
                errors = _errors(executions[index], participants, 0, lambda x: [x], self.key)
                # The solve of an ensemble is recorded after it has run: executed again, it returns the same result, and its
                # derivative is that for the steps it has taken.
                if executions[index].varies or not np.any(local.sides[0, place]):
                    self._note(index, errors)
                else:
                    self.inseparable += 1
            elif is_repeatable:
                self._note(index, [_Error(None, None, local.error(place))])
        # If a rank doesn't reach an operation again, other ranks would wait for it.
        for place in sorted(common_places) if is_repeatable else ():
            indices = self.steps.get(common.keys[place], [])
            execution = executions.get(indices[0]) if len(indices) == 1 else None
            if all(self.gather(not indices or execution is not None)):
                traced = self.gather(() if execution is None else execution.call.argnums)
                participants = [(rank, k) for rank, argnums in enumerate(traced) for k in argnums]
                errors = _errors(execution, participants, self.group.rank, self.gather, self.key)
            else:
                errors = [_Error(None, None, common.error(place))]
            if indices:
                self._note(indices[0], [each for each in errors if each.rank in (self.group.rank, None)])

    def _executions(self, wanted: set[int]) -> dict[int, _Execution]:
        """Run the function again at x, compare values with those of the first run, and return the calls of some steps."""
        executions, steps = dict[int, _Execution](), self.record.steps

        def visit(index: int, value: Array, call: _Call) -> None:
            step = steps[index] if index < len(steps) else None
            if self.unrepeatable:
                return
            if step is None or step.call != call.name:
                self.unrepeatable = f"{call.name} at {calls.site_of(sys._getframe(1))}"
            elif step.rounding and abs(_norm(value) - step.norm) > 1e4 * step.rounding:
                self.unrepeatable = f"{step.name} at {step.site}"
            elif index in wanted and step.is_separable:
                executions[index] = _Execution(call, value)

        self.program.run(self.x, visit)
        return executions

    def _note(self, index: int, errors: list[_Error]) -> None:
        for each in errors:
            if each.error > 0.0:
                text = f"has an adjoint with a relative error of {each.error:.1e}"
                self.problems.append(_Problem(index, each.argument, each.error, text))

    def _findings(self) -> list[WrongAdjoint]:
        findings: dict[tuple, WrongAdjoint] = {}
        for index, argument, error, text in sorted(self.problems, key=lambda problem: problem.step):
            step, rank = self.record.steps[index], self.group.rank
            place = "" if argument is None else f", argument {argument}"
            text = f"rank {rank}, {step.site}: {step.name} {text}{place}"
            finding = WrongAdjoint(rank, step.site.text, step.name, argument, error, text)
            key = step.site, step.name
            if key not in findings or findings[key].error < error:
                findings[key] = finding
        return list(findings.values())
