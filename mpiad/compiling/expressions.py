"""Expressions of the kernel language: numbers, conditions, entries and parts of arrays."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import NoReturn

from mpiad.compiling.block_builder import Block, BlockBuilder, Variables
from mpiad.compiling.elementary_functions import called_function, compared
from mpiad.compiling.values import (
    BOOLEAN,
    DOUBLE,
    ELEMENTS,
    INTEGER,
    ArrayValue,
    Value,
    common_kind,
    float_literal,
    literal_value,
)  # fmt: skip

_FLOATING = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_INTEGRAL = {
    ast.Add: "add nsw", ast.Sub: "sub nsw", ast.Mult: "mul nsw", ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor",
    ast.LShift: "shl", ast.RShift: "ashr",
}  # fmt: skip
_SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_CONSTANTS = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e}


def refuse(node: ast.AST) -> NoReturn:
    """Raise an error that names a line of a kernel which isn't of the language."""
    raise NotImplementedError(f"line {getattr(node, 'lineno', '?')} of a kernel: {ast.unparse(node)}")


class Expressions:
    """Computes expressions in the current block of a function.

    `inlined`: ``inlined(node)`` returns the results of a call of a function of the same text, None where it is another
    one's.
    """

    def __init__(self, build: BlockBuilder, variables: Variables, inlined: Callable[[ast.Call], list[Value] | None]):
        self._build, self._variables, self._inlined = build, variables, inlined

    def several(self, node: ast.expr) -> list[Value | ArrayValue]:
        """Return the values of a tuple or of a call with several results; a list of one for any other expression."""
        if isinstance(node, ast.Tuple):
            return [self._any(one) for one in node.elts]
        results = self._inlined(node) if isinstance(node, ast.Call) else None
        return [self._any(node)] if results is None else list(results)

    # ---- conditions

    def condition(self, node: ast.expr, yes: Block, no: Block) -> None:
        """Go on in one of two blocks; what follows `and` and `or` is computed only where that decides."""
        build = self._build
        if isinstance(node, ast.BoolOp):
            for one in node.values[:-1]:
                following = build.new_block()
                self.condition(one, *((following, no) if isinstance(node.op, ast.And) else (yes, following)))
                build.enter(following)
            self.condition(node.values[-1], yes, no)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.condition(node.operand, no, yes)
        else:
            build.branch(build.truth(self.number(node)), yes, no)

    def _chosen(self, test: ast.expr, yes: ast.expr | Value, no: ast.expr | Value) -> Value:
        """Return one of two values, of which only that one is computed."""
        build = self._build
        blocks, after = (build.new_block(), build.new_block()), build.new_block()
        self.condition(test, *blocks)
        ends: list[tuple[Block, Value]] = []
        for block, node in zip(blocks, (yes, no)):
            build.enter(block)
            value = node if isinstance(node, Value) else self.number(node)
            ends.append((build.current, value))
        kind = common_kind(ends[0][1].kind, ends[1][1].kind)
        made = []
        for block, value in ends:
            build.current = block
            made.append(f"[{build.converted(value, kind).text}, %{block.label}]")
            build.jump(after)
        build.enter(after)
        return build.value(kind, f"phi {kind} {', '.join(made)}")

    # ---- expressions

    def _any(self, node: ast.expr) -> Value | ArrayValue:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return self._view(node)
        if isinstance(node, ast.Name):
            return self._variables.read(node.id) or refuse(node)
        return self.number(node)

    def number(self, node: ast.expr) -> Value:
        """Return the value of an expression that is a number."""
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if method is None:
            refuse(node)
        return method(node)

    def _of_constant(self, node: ast.Constant) -> Value:
        if isinstance(node.value, bool):
            return Value(BOOLEAN, str(node.value).lower())
        if isinstance(node.value, int):
            return Value(INTEGER, str(node.value))
        if isinstance(node.value, float):
            return Value(DOUBLE, float_literal(node.value))
        refuse(node)

    def _of_name(self, node: ast.Name) -> Value:
        value = self._variables.read(node.id)
        return value if isinstance(value, Value) else refuse(node)

    def _of_attribute(self, node: ast.Attribute) -> Value:
        if node.attr == "size":
            first, *others = self.array(node.value).shape
            for length in others:
                first = self._build.name(f"mul nsw i64 {first}, {length}")
            return Value(INTEGER, first)
        if node.attr in _CONSTANTS and ast.unparse(node.value) in ("math", "np"):
            return Value(DOUBLE, float_literal(_CONSTANTS[node.attr]))
        refuse(node)

    def _of_unaryop(self, node: ast.UnaryOp) -> Value:
        build, x = self._build, self.number(node.operand)
        if isinstance(node.op, ast.Not):
            return build.value(BOOLEAN, f"xor i1 {build.truth(x).text}, true")
        if not isinstance(node.op, ast.USub):
            refuse(node)
        if x.kind == INTEGER:
            return build.value(INTEGER, f"sub nsw i64 0, {x.text}") if x.text[0] == "%" else Value(INTEGER, f"-{x.text}")
        return build.floating("fneg", x) if x.text[0] == "%" else Value(x.kind, float_literal(-literal_value(x.text)))

    def _of_binop(self, node: ast.BinOp) -> Value:
        return self.arithmetic(node, node.op, self.number(node.left), self.number(node.right))

    def arithmetic(self, node: ast.AST, op: ast.operator, a: Value, b: Value) -> Value:
        """Return the value of a binary operation."""
        build = self._build
        if isinstance(op, ast.Pow):
            return called_function(build, "math.pow", [a, b])
        kind = common_kind(a.kind, b.kind)
        if kind == BOOLEAN and type(op) in (ast.BitAnd, ast.BitOr, ast.BitXor):
            return build.value(BOOLEAN, f"{_INTEGRAL[type(op)]} i1 {a.text}, {b.text}")
        if kind in (BOOLEAN, INTEGER):
            kind = DOUBLE if isinstance(op, ast.Div) else INTEGER
        a, b = build.converted(a, kind), build.converted(b, kind)
        known = _INTEGRAL if kind == INTEGER else _FLOATING
        if type(op) not in known:
            refuse(node)
        if kind == INTEGER:
            return build.value(INTEGER, f"{known[type(op)]} i64 {a.text}, {b.text}")
        return build.floating(known[type(op)], a, b)

    def _of_compare(self, node: ast.Compare) -> Value:
        if len(node.ops) != 1 or type(node.ops[0]) not in _SIGNS:
            refuse(node)
        return compared(self._build, _SIGNS[type(node.ops[0])], self.number(node.left), self.number(node.comparators[0]))

    def _of_boolop(self, node: ast.BoolOp) -> Value:
        return self._chosen(node, Value(BOOLEAN, "true"), Value(BOOLEAN, "false"))

    def _of_ifexp(self, node: ast.IfExp) -> Value:
        return self._chosen(node.test, node.body, node.orelse)

    def _of_call(self, node: ast.Call) -> Value:
        name = ast.unparse(node.func)
        results = self._inlined(node)
        if results is not None:
            return results[0] if len(results) == 1 else refuse(node)
        try:
            return called_function(self._build, name, [self._any(a) for a in node.args])  # type: ignore[misc]
        except KeyError:
            refuse(node)

    # ---- arrays

    def array(self, node: ast.expr) -> ArrayValue:
        """Return the array of a name."""
        value = self._variables.read(node.id) if isinstance(node, ast.Name) else None
        return value if isinstance(value, ArrayValue) else refuse(node)

    def index(self, node: ast.expr) -> str:
        """Return the name of an integer."""
        x = self.number(node)
        if x.kind not in (INTEGER, BOOLEAN):
            refuse(node)
        return self._build.converted(x, INTEGER).text

    def place(self, node: ast.Subscript) -> tuple[ArrayValue, str]:
        """Return an array and the address of one of its entries."""
        array = self.array(node.value)
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(indices) != len(array.shape):
            refuse(node)
        build, element, data = self._build, ELEMENTS[array.dtype], array.data
        *rows, last = [self.index(index) for index in indices]
        if rows:
            place = rows[0]
            for row, length in zip(rows[1:], array.shape[1:]):
                before = build.name(f"mul nsw i64 {place}, {length}")
                place = build.name(f"add nsw i64 {before}, {row}")
            data = build.row(element, data, build.name(f"mul nsw i64 {place}, {array.shape[-1]}"))
        return array, build.name(f"getelementptr inbounds {element}, ptr {data}, i64 {last}")

    def _of_subscript(self, node: ast.Subscript) -> Value:
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return Value(INTEGER, self.array(node.value.value).shape[ast.literal_eval(node.slice)])
        array, place = self.place(node)
        element = ELEMENTS[array.dtype]
        x = self._build.name(f"load {element}, ptr {place}")
        if array.dtype == "bool":
            return self._build.value(BOOLEAN, f"icmp ne i8 {x}, 0")
        if element in ("i8", "i16", "i32"):
            return self._build.value(INTEGER, f"sext {element} {x} to i64")
        return Value(element, x)

    def _view(self, node: ast.Subscript) -> ArrayValue:
        """Return a part of a row, which shares its memory; its bounds lie within."""
        array, part, build = self.array(node.value), node.slice, self._build
        if not isinstance(part, ast.Slice) or part.lower is None or part.upper is None or part.step is not None:
            refuse(node)
        if len(array.shape) != 1:
            refuse(node)
        start, stop = self.index(part.lower), self.index(part.upper)
        data = build.name(f"getelementptr inbounds {ELEMENTS[array.dtype]}, ptr {array.data}, i64 {start}")
        return ArrayValue(array.dtype, data, (build.name(f"sub nsw i64 {stop}, {start}"),))
