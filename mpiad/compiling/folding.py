"""Folding: the partial evaluation of Python functions to statements of the kernel language.

A kernel is a Python function. Some of its values are known before it is compiled: they are *static*. `folded` runs the
function with symbolic numbers (`Expression`) as its other arguments, and returns the statements that remain:

- An operation on static values is computed; with a symbolic operand it becomes an expression.
- `if`, `and`, `or` and `... if ... else ...` with static conditions are decided. A `for` loop over a range is a loop,
  unless it is written ``static(range(n))``: a loop over a static sequence is unrolled.
- A name to which a function assigns static values is static, unless it is a number that the function assigns to again: then
  it is a variable of the kernel, as is a name with a symbolic value. Tuples, closures and memory are static.
- Functions with the decorator `inlined` are folded at each call, with their own variables. All other functions are called,
  and may compute with expressions by operators; functions of NumPy, `math` and `kernel_language` become calls.

Memory, such as a `Vector`, has entries that are variables, or entries of arrays; an assignment to an entry is a statement.
Without folding, the functions run as plain Python.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import itertools
import linecache
import math
import operator
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def _binary(operation: ast.operator, swapped: bool = False) -> Callable[[Expression, Any], Expression]:
    def method(self: Expression, other: Any) -> Expression:
        left, right = (node_of(other), self.node) if swapped else (self.node, node_of(other))
        return Expression(ast.BinOp(left, operation, right))

    return method


def _comparison(sign: ast.cmpop) -> Callable[[Any, Any], Expression]:
    return lambda self, other: Expression(ast.Compare(self.node, [sign], [node_of(other)]))


class Expression:
    """A symbolic number or array: a node of the syntax tree of a kernel."""

    __slots__ = ("node",)
    __array_ufunc__ = None  # NumPy's numbers leave operations with expressions to these methods

    def __init__(self, node: ast.expr):
        self.node = node

    __add__, __radd__ = _binary(ast.Add()), _binary(ast.Add(), True)
    __sub__, __rsub__ = _binary(ast.Sub()), _binary(ast.Sub(), True)
    __mul__, __rmul__ = _binary(ast.Mult()), _binary(ast.Mult(), True)
    __truediv__, __rtruediv__ = _binary(ast.Div()), _binary(ast.Div(), True)
    __pow__, __rshift__, __lshift__ = _binary(ast.Pow()), _binary(ast.RShift()), _binary(ast.LShift())
    __and__, __or__ = _binary(ast.BitAnd()), _binary(ast.BitOr())
    __lt__, __le__, __gt__, __ge__ = map(_comparison, (ast.Lt(), ast.LtE(), ast.Gt(), ast.GtE()))
    __eq__, __ne__ = _comparison(ast.Eq()), _comparison(ast.NotEq())  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Expression:
        return Expression(ast.UnaryOp(ast.USub(), self.node))

    def __abs__(self) -> Expression:
        return expression("abs", self)

    def __getattr__(self, name: str) -> Expression:
        if name not in ("shape", "size"):
            raise AttributeError(name)
        return Expression(ast.Attribute(self.node, name))

    def __getitem__(self, index: Any) -> Expression:
        return Expression(ast.Subscript(self.node, node_of(index)))

    def __setitem__(self, index: Any, value: Any) -> None:
        assign(self[index], value)

    def __bool__(self) -> bool:
        raise TypeError(f"a kernel's static condition depends on {ast.unparse(self.node)}")


@functools.cache
def variable_named(name: str) -> Expression:
    """Return a variable, or an argument of the kernel."""
    return Expression(ast.Name(name))


def node_of(value: Any) -> ast.expr:
    """Return an expression, a static number, or a tuple of them, as a node of a syntax tree."""
    if isinstance(value, Expression):
        return value.node
    if isinstance(value, tuple):
        return ast.Tuple([node_of(x) for x in value])
    if isinstance(value, slice):
        return ast.Slice(node_of(value.start), node_of(value.stop))
    if isinstance(value, bool | int):
        return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))
    if type(value) is np.float32:
        return ast.Call(ast.Attribute(ast.Name("np"), "float32"), [node_of(float(value))], [])
    if not isinstance(value, float):
        raise TypeError(f"a kernel can't compute with {value!r}")
    value = float(value)
    if math.isnan(value):
        return ast.Attribute(ast.Name("math"), "nan")
    # C's INFINITY is a float.
    literal = ast.Constant(abs(value)) if math.isfinite(value) else expression("np.float64", _INFINITY).node
    return ast.UnaryOp(ast.USub(), literal) if math.copysign(1.0, value) < 0.0 else literal


_INFINITY = Expression(ast.Attribute(ast.Name("math"), "inf"))


def expression(name: str, *arguments: Any) -> Expression:
    """Return the call of a function of the kernel language."""
    module, _, function = name.rpartition(".")
    node = ast.Attribute(ast.Name(module), function) if module else ast.Name(function)
    return Expression(ast.Call(node, [node_of(x) for x in arguments], []))


class Memory:
    """Entries that kernels read and write: variables, or entries of arrays."""

    def place(self, *indices: Any) -> Expression:
        """Return an entry, which can be assigned to."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        return self.place(*(index if isinstance(index, tuple) else (index,)))

    def __setitem__(self, index: Any, value: Any) -> None:
        assign(self[index], value)


class Variables(Memory):
    """Entries with static indices, each of which is a variable."""

    def __init__(self, name: str):
        self.name = name

    def place(self, *indices: int) -> Expression:
        """Return the variable of an entry."""
        return variable_named("_".join([self.name, *map(str, indices)]))


class Folding:
    """The statements of one kernel, and the names of its variables."""

    def __init__(self, reserved: Iterable[str] = ()):
        self.statements: list[ast.stmt] = []
        self.functions: dict[str, ast.FunctionDef] = {}  # that the kernel calls, instead of inlining them
        self.target = "value"  # the name to which the value of the current expression is assigned
        self._names = dict.fromkeys(reserved, 1)
        self.count = 0  # the number of statements, with those of inner blocks

    def fresh(self, name: str = "") -> str:
        """Return a new name of a variable; by default that of the target of the current assignment."""
        name = name or self.target
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}__{count}"

    def emit(self, statement: ast.stmt) -> None:
        """Append a statement."""
        self.count += 1
        self.statements.append(statement)

    def block(self, run: Callable[[], object]) -> list[ast.stmt]:
        """Return the statements that a function appends."""
        around, self.statements = self.statements, []
        try:
            run()
            return self.statements
        finally:
            self.statements = around

    def function(self, name: str, body: Callable[[], object], arguments: Sequence[str]) -> None:
        """Add a function that the kernel calls."""
        if name not in self.functions:
            given = ast.arguments([], [ast.arg(x) for x in arguments], None, [], [], None, [])
            self.functions[name] = ast.FunctionDef(name, given, self.block(body), [], lineno=0)


_active = threading.local()


def current() -> Folding:
    """Return the kernel that this thread folds."""
    return _active.folding


def is_folding() -> bool:
    """Return whether this thread folds a kernel."""
    return getattr(_active, "folding", None) is not None


def assign(target: Expression, value: Any) -> None:
    """Append an assignment to a variable or to an entry of an array."""
    current().emit(ast.Assign([target.node], node_of(value), lineno=0))


def variable(value: Any, name: str = "") -> Expression:
    """Return a new variable with a value."""
    target = variable_named(current().fresh(name))
    assign(target, value)
    return target


def called(name: str, outputs: Sequence[Expression], arguments: Sequence[Any]) -> None:
    """Append a call of a function with several results, or with none."""
    call = expression(name, *arguments).node
    if outputs:
        current().emit(ast.Assign([ast.Tuple([x.node for x in outputs])], call, lineno=0))
    else:
        current().emit(ast.Expr(call))


def static(values: Iterable[T]) -> Iterable[T]:
    """Return the values of a loop that is unrolled."""
    return tuple(values) if isinstance(values, range) else values  # type: ignore[return-value]


def inlined(function: Function) -> Function:
    """Mark a function that is folded at each call."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not is_folding():
            return function(*arguments, **named)
        return _Call(function).run(arguments, named)  # type: ignore[arg-type]

    return call  # type: ignore[return-value]


def folded(function: Callable[..., object], *arguments: Any, reserved: Iterable[str] = ()) -> Folding:
    """Return the statements of an `inlined` function for these arguments; `reserved`: names that aren't variables."""
    around, _active.folding = getattr(_active, "folding", None), Folding(reserved)
    try:
        function(*arguments)
        return _active.folding
    finally:
        _active.folding = around


def definitions(
    name: str, parameters: Sequence[str], function: Callable[..., object], *arguments: Any
) -> list[ast.FunctionDef]:  # fmt: skip
    """Return a kernel with these parameters that does what an `inlined` function does, and the functions that it calls."""
    kernel = folded(function, *arguments, reserved=parameters)
    body = kernel.statements
    kernel.function(name, lambda: kernel.statements.extend(body), parameters)
    return [*kernel.functions.values()]


def _tree_of(function: FunctionType) -> ast.FunctionDef:
    # `inspect.getsource` would take ten times as long.
    code, lines = function.__code__, list[str]()
    last = max(_lines_of(code))
    for n in itertools.count(code.co_firstlineno):
        lines.append(linecache.getline(code.co_filename, n, function.__globals__))
        if not lines[-1]:
            raise OSError(f"the source of {function.__qualname__} isn't available")
        # The last lines of a statement, such as a closing bracket, have no code.
        if n >= last:
            with contextlib.suppress(SyntaxError):
                text = "".join(lines)
                (node,) = ast.parse(textwrap.dedent(text) if text[0] == " " else text).body
                return node  # type: ignore[return-value]
    raise AssertionError


def _lines_of(code: CodeType) -> Iterator[int]:
    """Return the numbers of the lines of a function, with those of its comprehensions and lambdas."""
    yield from (line for *_, line in code.co_lines() if line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _lines_of(constant)


class _Source:
    """The syntax tree of a function."""

    def __init__(self, function: FunctionType):
        self.node = _tree_of(function)
        given = self.node.args
        self.parameters = [x.arg for x in (*given.args, *given.kwonlyargs)]
        self.defaults = {x.arg: default for x, default in zip(given.args[::-1], (function.__defaults__ or ())[::-1])}
        self.defaults |= function.__kwdefaults__ or {}
        body = self.node.body
        self.body = body[1:] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body
        # The numbers of assignments to each name.
        self.assigned = Counter(_targets(self.body))
        self.copied = set(self.parameters)
        if len(self.body) == 1 and isinstance(self.body[0], ast.Return):
            # A parameter that is read once, in the only statement, stands for its argument.
            reads = Counter(x.id for x in ast.walk(self.body[0]) if isinstance(x, ast.Name))
            self.copied = {x for x in self.parameters if reads[x] > 1}


def _targets(nodes: Sequence[ast.stmt]) -> Iterator[str]:
    """Return the names to which statements assign."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if isinstance(part, ast.Name):
                    yield part.id
                elif isinstance(part, ast.Tuple):
                    yield from (x.id for x in ast.walk(part) if isinstance(x, ast.Name))
        yield from _targets(getattr(node, "body", ()))
        yield from _targets(getattr(node, "orelse", ()))


_source_of = functools.cache(_Source)


class FoldingError(Exception):
    """An error in a kernel's function, with its line."""


class _Returned(Exception):
    """Ends the body of a function."""


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda x, y: x in y, ast.NotIn: lambda x, y: x not in y, ast.USub: operator.neg, ast.Not: operator.not_,
}  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float) or type(value) is np.float32


_BUILTINS = (min, max, abs, float, int, bool, range)


class _Call:
    """One call of an inlined function; `names`: its static values and variables."""

    def __init__(self, function: FunctionType):
        self.folding, self.source, self.names = current(), _source_of(function), dict[str, Any]()
        self._globals, self._result = function.__globals__, None
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self.names[name] = cell.cell_contents

    def run(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Fold the body, and return the result."""
        source = self.source
        given = {**source.defaults, **dict(zip(source.parameters, arguments)), **named}
        for name in source.parameters:
            value = given[name]
            if name in source.assigned and (isinstance(value, Expression) or _is_number(value)):
                value = variable(value, name)
            elif isinstance(value, Expression) and name in source.copied and not isinstance(value.node, ast.Name):
                value = variable(value, name)
            self.names[name] = value
        try:
            self.block(source.body)
        except _Returned:
            pass
        return self._result

    # ---- statements

    def block(self, nodes: Sequence[ast.stmt]) -> None:
        """Fold statements."""
        for node in nodes:
            try:
                self._statements[type(node)](self, node)
            except (_Returned, FoldingError):
                raise
            except Exception as error:
                place = f"line {node.lineno} of {self.source.node.name}, {ast.unparse(node).splitlines()[0]}"
                raise FoldingError(f"{place}: {error}") from error

    def _assign(self, node: ast.Assign) -> None:
        (target,) = node.targets
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            values = [self._named(part, value) for part, value in zip(target.elts, node.value.elts, strict=True)]
            for part, value in zip(target.elts, values):
                self._store(part, value)
        else:
            self._store(target, self._named(target, node.value))

    def _named(self, target: ast.expr, node: ast.expr) -> Any:
        """Return a value that is assigned to a target."""
        self.folding.target = target.id if isinstance(target, ast.Name) else "value"
        return self.value(node)

    def _bind(self, target: ast.expr, value: Any) -> None:
        """Bind names to static values."""
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        else:
            for part, one in zip(target.elts, value, strict=True):  # type: ignore[attr-defined]
                self._bind(part, one)

    def _store(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            known = self.names.get(target.id)
            once = _is_number(value) and self.source.assigned[target.id] == 1
            if once or not (isinstance(value, Expression) or _is_number(value)):
                self.names[target.id] = value
            elif isinstance(known, Expression):
                assign(known, value)
            else:
                self.names[target.id] = variable(value, target.id)
        elif isinstance(target, ast.Tuple):
            for part, one in zip(target.elts, value, strict=True):
                self._store(part, one)
        elif isinstance(target, ast.Subscript):
            self.value(target.value)[self.value(target.slice)] = value
        elif isinstance(target, ast.Attribute):
            setattr(self.value(target.value), target.attr, value)
        else:
            raise NotImplementedError(ast.unparse(target))

    def _augment(self, node: ast.AugAssign) -> None:
        self._store(node.target, _OPERATORS[type(node.op)](self.value(node.target), self.value(node.value)))

    def _expression(self, node: ast.Expr) -> None:
        value = self.value(node.value)
        if isinstance(value, Expression) and isinstance(value.node, ast.Call):
            self.folding.emit(ast.Expr(value.node))

    def _if(self, node: ast.If) -> None:
        test = self.value(node.test)
        if not isinstance(test, Expression):
            self.block(node.body if test else node.orelse)
            return
        body, other = (self.folding.block(lambda nodes=nodes: self.block(nodes)) for nodes in (node.body, node.orelse))
        if body or other:
            self.folding.emit(ast.If(test.node, body or [ast.Pass()], other))

    def _while(self, node: ast.While) -> None:
        count = len(self.folding.statements)
        test = node_of(self.value(node.test))
        if len(self.folding.statements) > count:
            raise NotImplementedError(f"statements in a condition: {ast.unparse(node.test)}")
        self.folding.emit(ast.While(test, self.folding.block(lambda: self.block(node.body)), []))

    def _for(self, node: ast.For) -> None:
        values = self.value(node.iter)
        if not isinstance(values, Expression | range):
            for value in values:
                self._bind(node.target, value)
                self.block(node.body)
            return
        if isinstance(values, range):
            bounds = values.start, values.stop, values.step
            values = expression("range", *(bounds if values.step != 1 else bounds[:2] if values.start else bounds[1:2]))
        name = self.folding.fresh(node.target.id)  # type: ignore[attr-defined]
        self.names[node.target.id] = variable_named(name)  # type: ignore[attr-defined]
        body = self.folding.block(lambda: self.block(node.body))
        # The numbers of lines distinguish loops.
        self.folding.emit(ast.For(ast.Name(name), values.node, body, [], lineno=len(self.folding._names)))

    def _return(self, node: ast.Return) -> None:
        self._result = None if node.value is None else self.value(node.value)
        raise _Returned

    _statements: dict[type[ast.stmt], Callable[[Any, Any], None]] = {
        ast.Assign: _assign, ast.AugAssign: _augment, ast.Expr: _expression, ast.If: _if, ast.While: _while, ast.For: _for,
        ast.Return: _return, ast.Pass: lambda self, node: None,
        ast.Break: lambda self, node: self.folding.emit(ast.Break()),
    }  # fmt: skip

    # ---- expressions

    def value(self, node: ast.expr) -> Any:
        """Return the static value or the expression that a node becomes."""
        if type(node) is ast.Name and node.id in self.names:  # the most frequent case
            return self.names[node.id]
        return self._values[type(node)](self, node)

    def _name_of(self, node: ast.Name) -> Any:
        return self._globals[node.id] if node.id in self._globals else getattr(builtins, node.id)

    def _binary(self, node: ast.BinOp) -> Any:
        return _OPERATORS[type(node.op)](self.value(node.left), self.value(node.right))

    def _compare(self, node: ast.Compare) -> Any:
        values = [self.value(one) for one in (node.left, *node.comparators)]
        results = [_OPERATORS[type(op)](x, y) for op, x, y in zip(node.ops, values, values[1:])]
        return results[0] if len(results) == 1 else all(results)

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(value, Expression) and isinstance(node.op, ast.Not):
            return Expression(ast.UnaryOp(node.op, value.node))
        return _OPERATORS[type(node.op)](value)

    def _boolean(self, node: ast.BoolOp) -> Any:
        decisive, parts, value = isinstance(node.op, ast.Or), list[ast.expr](), None
        for one in node.values:
            value = self.value(one)
            if isinstance(value, Expression):
                parts.append(value.node)
            elif bool(value) is decisive:
                if not parts:
                    return value
                parts.append(node_of(decisive))
                break
        if not parts:
            return value  # of the last part
        return Expression(parts[0] if len(parts) == 1 else ast.BoolOp(node.op, parts))

    def _choice(self, node: ast.IfExp) -> Any:
        test = self.value(node.test)
        if not isinstance(test, Expression):
            return self.value(node.body if test else node.orelse)
        return Expression(ast.IfExp(test.node, node_of(self.value(node.body)), node_of(self.value(node.orelse))))

    def _call(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        arguments = self._sequence(node.args)
        named = {str(one.arg): self.value(one.value) for one in node.keywords}
        is_known = isinstance(function, np.ufunc) or function in _BUILTINS
        is_known = is_known or getattr(function, "__module__", "") in ("math", "numpy")
        if is_known and any(isinstance(x, Expression) for x in arguments):
            return Expression(ast.Call(node.func, [node_of(x) for x in arguments], []))
        return function(*arguments, **named)

    def _sequence(self, nodes: Sequence[ast.expr]) -> list[Any]:
        values = list[Any]()
        for node in nodes:
            values += self.value(node.value) if isinstance(node, ast.Starred) else [self.value(node)]
        return values

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> list[Any]:
        values, around = list[Any](), dict(self.names)

        def collect(generators: Sequence[ast.comprehension]) -> None:
            if not generators:
                values.append(self.value(node.elt))
                return
            for value in self.value(generators[0].iter):
                self._bind(generators[0].target, value)
                if all(self.value(test) for test in generators[0].ifs):
                    collect(generators[1:])

        collect(node.generators)
        self.names = around
        return values

    def _lambda(self, node: ast.Lambda) -> Callable[..., Any]:
        parameters = [x.arg for x in node.args.args]

        def call(*arguments: Any) -> Any:
            around = self.names
            self.names = around | dict(zip(parameters, arguments, strict=True))
            try:
                return self.value(node.body)
            finally:
                self.names = around

        return call

    def _slice(self, node: ast.Slice) -> slice:
        return slice(*(None if one is None else self.value(one) for one in (node.lower, node.upper, node.step)))

    _values: dict[type[ast.expr], Callable[[Any, Any], Any]] = {
        ast.Name: _name_of, ast.Constant: lambda self, node: node.value, ast.BinOp: _binary, ast.Compare: _compare,
        ast.Attribute: lambda self, node: getattr(self.value(node.value), node.attr),
        ast.Subscript: lambda self, node: self.value(node.value)[self.value(node.slice)], ast.Call: _call,
        ast.UnaryOp: _unary, ast.BoolOp: _boolean, ast.IfExp: _choice, ast.Slice: _slice, ast.Lambda: _lambda,
        ast.Tuple: lambda self, node: tuple(self._sequence(node.elts)),
        ast.List: lambda self, node: self._sequence(node.elts),
        ast.JoinedStr: lambda self, node: "".join(str(self.value(x)) for x in node.values),
        ast.FormattedValue: lambda self, node: self.value(node.value),
        ast.ListComp: _comprehension, ast.GeneratorExp: _comprehension,
    }  # fmt: skip
