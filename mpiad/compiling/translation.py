"""Translation of kernels from the kernel language, a small typed subset of Python, to LLVM's intermediate representation.

A kernel is a function of numbers and contiguous arrays. It consists of assignments, loops over ranges, `while`, `if`,
indexing, slices of one-dimensional arrays, and arithmetic. It may call the functions of `called_function` and of
`elementary`, and functions of numbers and arrays in the same text, which are inlined if they are short. It allocates no
memory and raises no exceptions. Indices aren't checked, and negative indices don't count from the end. A range counts down
if its step is a negative constant, otherwise it counts up. Arithmetic follows IEEE 754 in the order of the text, unless
`fast` allows reassociation or contraction.

The type ("kind") of a variable is the widest type of the values assigned to it. If an assignment widens a variable that
was used before, the function is translated again.

In a loop ``for l in lanes(n)``, which has no branches, variables and entries of arrays whose index contains l are
vectors: the loop computes `VECTOR` successive lanes at a time, by vector instructions, as if it were a loop over l without
dependences. LLVM would vectorize the loop, too, but in a time that grows with the square of its length. If l is an argument
of a function, the function is computed for the same lanes. Array arguments of a function mustn't overlap.

A loop ``for i in rolled(n)``, with the arguments of `range`, is vectorized, but not unrolled, and one over ``few(n)`` is
neither: such loops are compiled in less time.

An array ``on_stack(n, np.float64)`` has n entries, which are vectors in a loop over lanes, and in a function if any of its
arguments is a vector, or an array of vectors. ``constants(2, 3, 5)`` is an array that isn't written.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from typing import NoReturn

from mpiad.compiling.arguments import Argument
from mpiad.compiling.block_builder import (
    BOOLEAN,
    DOUBLE,
    ELEMENTS,
    INTEGER,
    SINGLE,
    ArrayValue,
    Block,
    BlockBuilder,
    Value,
    Variables,
    common_kind,
    float_literal,
    kind_of,
    literal_value,
    type_of,
)
from mpiad.compiling.elementary import definitions
from mpiad.compiling.machine_code import INDEXED

# The functions that a kernel may call: some of Python's, of `math` and of NumPy, and some machine instructions.

# Elementary functions of `math` and NumPy with the same name in C, other than those of `elementary`. LLVM turns its
# intrinsic functions into instructions or into calls of the C library, which don't prevent the vectorization of a loop.
_INTRINSIC = frozenset("sqrt sin cos tan asin acos atan atan2 pow copysign floor ceil trunc rint fabs".split())
_LIBRARY = frozenset("cbrt erf erfc hypot".split())
_CONVERSIONS = {
    "np.float64": DOUBLE, "float": DOUBLE, "np.float32": SINGLE, "np.int64": INTEGER, "np.int32": INTEGER, "int": INTEGER,
    "bool": BOOLEAN,
}  # fmt: skip


def called_function(build: BlockBuilder, name: str, arguments: list[Value]) -> Value:
    """Return the value of a function of numbers; raise a KeyError if the name is unknown."""
    if name in _CONVERSIONS:
        return build.converted(arguments[0], _CONVERSIONS[name])
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](build, *arguments)
    module, _, function = name.partition(".")
    if module not in ("math", "np") or function not in _INTRINSIC | _LIBRARY:
        raise KeyError(name)
    kind = _float_kind(arguments)
    operands = [build.converted(x, kind) for x in arguments]
    if function in _INTRINSIC:
        return build.call(f"llvm.{function}.{'f32' if kind == SINGLE else 'f64'}", kind, *operands)
    return build.call(function + ("f" if kind == SINGLE else ""), kind, *operands)


def _float_kind(operands: Sequence[Value]) -> str:
    return SINGLE if all(x.kind == SINGLE for x in operands) else DOUBLE


def _promoted(build: BlockBuilder, *operands: Value) -> list[Value]:
    kind = reduce(common_kind, (x.kind for x in operands))
    return build.together(*(build.converted(x, kind) for x in operands))


def compare(build: BlockBuilder, sign: str, a: Value, b: Value) -> Value:
    """Return the comparison of a and b by the operator `sign`; NaN is unequal to everything."""
    a, b = _promoted(build, a, b)
    if a.kind in (SINGLE, DOUBLE):
        condition = {"<": "olt", "<=": "ole", ">": "ogt", ">=": "oge", "==": "oeq", "!=": "une"}[sign]
        return build.value(BOOLEAN, f"fcmp {condition} {a.type} {a.text}, {b.text}", a.width)
    prefix = "u" if a.kind == BOOLEAN else "s"
    condition = {"==": "eq", "!=": "ne"}.get(sign) or prefix + {"<": "lt", "<=": "le", ">": "gt", ">=": "ge"}[sign]
    return build.value(BOOLEAN, f"icmp {condition} {a.type} {a.text}, {b.text}", a.width)


def _extreme(sign: str) -> Callable[..., Value]:
    def extreme(build: BlockBuilder, *operands: Value) -> Value:
        # As in Python, the first of several equal values is returned.
        first, *others = _promoted(build, *operands)
        for x in others:
            first = build.selected(compare(build, sign, x, first), x, first)
        return first

    return extreme


def _absolute(build: BlockBuilder, x: Value) -> Value:
    if x.kind == INTEGER:
        negative = compare(build, "<", x, Value(INTEGER, "0"))
        return build.selected(negative, build.operation("sub", Value(INTEGER, "0"), x), x)
    return build.call(f"llvm.fabs.{'f32' if x.kind == SINGLE else 'f64'}", x.kind, x)


def _is_finite(build: BlockBuilder, x: Value) -> Value:
    return compare(build, "<", _absolute(build, x), Value(x.kind, "0x7FF0000000000000"))


def _fma(build: BlockBuilder, a: Value, b: Value, c: Value) -> Value:
    """Return a b + c, rounded once if the processor has an instruction for this, otherwise twice."""
    kind = _float_kind([a, b, c])
    operands = [build.converted(x, kind) for x in (a, b, c)]
    if not has_fma_instruction():
        return build.floating("fadd", build.floating("fmul", *operands[:2]), operands[2])
    return build.call(f"llvm.fma.{'f32' if kind == SINGLE else 'f64'}", kind, *operands, fast=False)


def _bits(build: BlockBuilder, x: Value) -> Value:
    kind = "i32" if x.kind == SINGLE else INTEGER
    x = build.value(kind, f"bitcast {x.type} {x.text} to {type_of(kind, x.width)}", x.width)
    return x if kind == INTEGER else build.value(INTEGER, f"zext {x.type} {x.text} to {type_of(INTEGER, x.width)}", x.width)


def _float_of_bits(kind: str, build: BlockBuilder, i: Value) -> Value:
    if kind == SINGLE:
        i = build.value("i32", f"trunc {i.type} {i.text} to {type_of('i32', i.width)}", i.width)
    return build.value(kind, f"bitcast {i.type} {i.text} to {type_of(kind, i.width)}", i.width)


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "max": _extreme(">"), "min": _extreme("<"), "abs": _absolute, "np.isfinite": _is_finite, "fma": _fma,
    "np.fmod": lambda build, *xs: build.floating("frem", *(build.converted(x, _float_kind(xs)) for x in xs)),
    # Both values are computed, so loops can be vectorized.
    "where": lambda build, condition, *values: build.selected(condition, *_promoted(build, *values)),
    # Conversions between a float and the integer with the same bits.
    "bits_of": _bits, "number_of": partial(_float_of_bits, DOUBLE), "single_of": partial(_float_of_bits, SINGLE),
    # Atomically adds n to the first entry of a row, and returns the previous value.
    "claimed": lambda build, row, n: build.value(INTEGER, f"atomicrmw add ptr {row.data}, i64 {n.text} monotonic"),
}  # fmt: skip


# Expressions of the kernel language.

_FLOATING = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_INTEGRAL = {
    ast.Add: "add nsw", ast.Sub: "sub nsw", ast.Mult: "mul nsw", ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor",
    ast.LShift: "shl", ast.RShift: "ashr",
}  # fmt: skip
_SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_CONSTANTS = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e}


def refuse(node: ast.AST) -> NoReturn:
    """Raise an error that names a line of a kernel that isn't in the language."""
    raise NotImplementedError(f"line {getattr(node, 'lineno', '?')} of a kernel: {ast.unparse(node)}")


@cache
def has_fma_instruction() -> bool:
    """Return whether the processor computes a b + c in one instruction; without it, fma would be a slow library call."""
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("fma", False)) or not llvm.get_process_triple().startswith("x86_64")


@cache
def prefers_512_bit_vectors() -> bool:
    """Return whether vectors of 64 bytes are faster than vectors of 32 bytes."""
    # By default LLVM uses vectors of 32 bytes on Intel's processors, since older processors reduce their clock frequency
    # for longer vectors. This hardly applies to processors with 16-bit floating-point arithmetic, from 2023 on.
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("avx512fp16", False))


# Functions with more statements aren't inlined, and return their results in memory: a step calls f two to ten times.
_MOST_INLINED = 300
_BYTES = {SINGLE: 4, DOUBLE: 8}
VECTOR = 8  # the length of vectors in loops over lanes; n must be a multiple of it
_ALIGNED = "alignstack(64) noinline"
_WIDE = '"prefer-vector-width"="512"'
# The metadata of a loop that is vectorized, but not unrolled; and of one that isn't vectorized either.
_ROLLED = """!0 = distinct !{!0, !1, !2}
!1 = !{!"llvm.loop.unroll.disable"}
!2 = !{!"llvm.loop.interleave.count", i32 1}
!3 = distinct !{!3, !1, !4}
!4 = !{!"llvm.loop.vectorize.enable", i1 false}"""


def translated(
    text: str,
    name: str,
    arguments: Sequence[Argument],
    fast: str = "",
    linked: bool = False,
    definitions: Sequence[ast.FunctionDef] = (),
) -> str:
    """Return the kernel `name` as an LLVM module; raise a NotImplementedError outside the kernel language.

    The kernel and the functions that it calls are in a text, or among the definitions.
    """
    nodes = [*ast.parse(text).body, *definitions]
    defined = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    return _Module(defined, fast, linked).kernel(name, arguments)


class _Module:
    """The functions of a source text; each is translated once per combination of argument types, at the first call."""

    def __init__(self, defined: dict[str, ast.FunctionDef], fast: str, linked: bool):
        self.defined, self.fast, self.linked = defined, fast, linked
        self.is_long = cache(self._is_long)
        self.declared: dict[str, str] = {}
        self.has_rolled_loops = False  # whether loops of constant length aren't unrolled
        self.tables: dict[str, str] = {}  # the names of constant arrays, by type and entries
        self._translations: dict[tuple, tuple[str, list[Value]]] = {}
        self._texts: list[str] = []

    def kernel(self, name: str, arguments: Sequence[Argument]) -> str:
        """Return the module of a kernel."""
        node = self.defined[name]
        # In a linked kernel, the body is a separate function, since LLVM's `noalias` applies to arguments, not to addresses
        # loaded from memory.
        head = f"internal void @{name}.body" if self.linked else f"void @{name}"
        types = [
            Value(kind_of(dtype), "") if ndim is None else ArrayValue(dtype.name, "", ("",) * ndim)
            for dtype, ndim in arguments
        ]
        given = _named(node, types)
        function = self._translated(node, given)
        # A table, that is an array passed to a function, is only read, so other arrays don't alias it.
        alone = given if self.linked else function.passed
        kinds = [_parameter(x, "ptr noalias" if name in alone else "ptr") for name, x in given.items()]
        attributes = f"nounwind {'noinline' if self.linked else ''} {function.attributes}"
        made = f"define {head}({', '.join(kinds)}) {attributes} {{\n{function.text()}\n}}\n"
        link = [_link(name, arguments)] if self.linked else []
        tables = [f"{table} = internal constant {text}" for text, table in self.tables.items()]
        return "\n\n".join([*tables, *self._texts, made, *self.declared.values(), *link])

    def call(self, name: str, arguments: Sequence[Value | ArrayValue], lane: int | None) -> tuple[str, list[Value]]:
        """Return the symbol of a function for these types of arguments, and its results; `lane`: the index of the lane."""
        types = tuple(f"{x.dtype} {len(x.shape)} {x.width}" if isinstance(x, ArrayValue) else x.type for x in arguments)
        known = name, types, lane
        if known not in self._translations:
            node, symbol = self.defined[name], f"{name}.{len(self._translations)}"
            names = _named(node, arguments)
            function = self._translated(node, names, None if lane is None else node.args.args[lane].arg)
            self._texts.append(f"%{symbol} = type {{{', '.join(x.type for x in function.results)}}}")
            result, first, attribute = f"%{symbol}", [], "alwaysinline"
            separate = f"noinline {_WIDE if prefers_512_bit_vectors() else ''}"
            if self.is_long(name):
                result, first, attribute = "void", ["ptr noalias %results"], separate
            elif name == "pow_double" and types[0] != DOUBLE:  # a copy per power of vectors would take long to compile
                attribute = separate
            head = f"define internal {result} @{symbol}({', '.join([*first, *map(_parameter, names.values())])})"
            self._texts.append(f"{head} {attribute} nounwind {{\n{function.text(symbol)}\n}}")
            self._translations[known] = symbol, function.results
        return self._translations[known]

    def _is_long(self, name: str) -> bool:
        """Return whether a function isn't inlined: it is long, has an array on the stack, or calls a long function."""
        body = self.defined[name].body
        called = (
            ast.unparse(x.value.func)
            for x in body
            if isinstance(x, ast.Assign | ast.Expr) and isinstance(x.value, ast.Call)
        )
        return len(body) > _MOST_INLINED or any(f == "on_stack" or (f in self.defined and self.is_long(f)) for f in called)

    def _translated(
        self, node: ast.FunctionDef, arguments: Mapping[str, Value | ArrayValue], lane: str | None = None
    ) -> _Function:
        function = _Function(self, node, arguments, {}, lane)
        while not function.is_final:
            function = _Function(self, node, arguments, dict(function.kinds), lane)
        return function


def _named(node: ast.FunctionDef, types: Sequence[Value | ArrayValue]) -> dict[str, Value | ArrayValue]:
    """Return the arguments of a function in LLVM's intermediate representation."""
    named: dict[str, Value | ArrayValue] = {}
    for i, (argument, x) in enumerate(zip(node.args.args, types, strict=True)):
        if isinstance(x, ArrayValue):
            named[argument.arg] = x._replace(data=f"%a{i}", shape=tuple(f"%a{i}_{k}" for k in range(len(x.shape))))
        else:
            named[argument.arg] = x._replace(text=f"%a{i}")
    return named


def _parameter(x: Value | ArrayValue, pointer: str = "ptr noalias") -> str:
    if isinstance(x, Value):
        return f"{x.type} {x.text}"
    return ", ".join([f"{pointer} {x.data}", *(f"i64 {length}" for length in x.shape)])


_RESULTS = "%results.type"  # stands for the type of a function's results


class _Function:
    """One translation of a function; `kinds`: the kinds of its variables, as found by the previous translation."""

    def __init__(
        self,
        module: _Module,
        node: ast.FunctionDef,
        arguments: Mapping[str, Value | ArrayValue],
        kinds: dict[str, str],
        lane: str | None = None,
    ):
        # `lane`: the variable of the loop over lanes that is translated, None outside of such loops.
        self.kinds, self.attributes, self._lane = kinds, "", lane
        self.results: list[Value] = []
        self._module = module
        # In a loop over many arrays, LLVM's optimization of address arithmetic between their rows takes most of the compile
        # time, without a gain.
        self._build = BlockBuilder(module.fast, module.declared, hides_rows=module.linked)
        self._variables = Variables(self._build, arguments, kinds)
        self._vector = max((x.width for x in arguments.values()), default=0)
        self.passed: set[str] = set()  # the variables passed to functions of the text
        self._ends_of_loops: list[Block] = []  # the targets of `break`
        for name in sorted(kinds.keys() & arguments.keys()):  # the arguments that the function assigns to
            self._variables.write(name, arguments[name])
        self._variables.widened, self._is_long = False, module.is_long(node.name)
        self._statements(node.body)
        self._build.leave("void")
        self.is_final = not self._variables.widened

    def text(self, symbol: str = "") -> str:
        return self._build.text().replace(_RESULTS, f"%{symbol}")

    # ---- expressions

    def several(self, node: ast.expr) -> list[Value | ArrayValue]:
        """Return the values of a tuple or of a call with several results; for another expression a list with its value."""
        if isinstance(node, ast.Tuple):
            return [self._any(one) for one in node.elts]
        results = self._inlined(node) if isinstance(node, ast.Call) else None
        return [self._any(node)] if results is None else list(results)

    # ---- conditions

    def condition(self, node: ast.expr, yes: Block, no: Block) -> None:
        """Branch to one of two blocks; the right operands of `and` and `or` are evaluated only if needed."""
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
            value = build.truth(self.number(node))
            build.branch(refuse(node) if value.width else value, yes, no)

    def _conditional(self, test: ast.expr, yes: ast.expr | Value, no: ast.expr | Value) -> Value:
        """Return one of two values; the other one isn't computed."""
        build = self._build
        blocks, after = (build.new_block(), build.new_block()), build.new_block()
        self.condition(test, *blocks)
        ends: list[tuple[Block, Value]] = []
        for block, node in zip(blocks, (yes, no)):
            build.enter(block)
            value = node if isinstance(node, Value) else self.number(node)
            ends.append((build.current, value))
        kind, width = common_kind(ends[0][1].kind, ends[1][1].kind), max(value.width for _, value in ends)
        made = []
        for block, value in ends:
            build.current = block
            (value,) = build.together(build.converted(value, kind), width=width)
            made.append(f"[{value.text}, %{block.label}]")
            build.jump(after)
        build.enter(after)
        return build.value(kind, f"phi {type_of(kind, width)} {', '.join(made)}", width)

    # ---- values

    def _any(self, node: ast.expr) -> Value | ArrayValue:
        match node:
            case ast.Name(id=name):
                return self._variables.get(name) or refuse(node)
            case ast.Call(func=ast.Name(id="constants"), args=entries):
                return self._constants([self.number(entry) for entry in entries])
            case ast.Call(func=ast.Name(id="on_stack"), args=[ast.Constant(value=length), kind]):
                dtype = ast.unparse(kind).removeprefix("np.")
                width = VECTOR if self._lane is not None else self._vector
                memory = self._build.slot(f"[{length} x {type_of(ELEMENTS[dtype], width)}]")
                return ArrayValue(dtype, memory, (str(length),), width)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return self._view(node)
        return self.number(node)

    def number(self, node: ast.expr) -> Value:
        """Return the value of an expression that is a number."""
        match node:  # frequent ones first
            case ast.Name(id=name):
                value = self._variables.get(name)
                return value if isinstance(value, Value) else refuse(node)
            case ast.Subscript():
                return self._entry(node)
            case ast.BinOp():
                return self.arithmetic(node, node.op, self.number(node.left), self.number(node.right))
            case ast.Constant(value=bool() as x):
                return Value(BOOLEAN, str(x).lower())
            case ast.Constant(value=int() as x):
                return Value(INTEGER, str(x))
            case ast.Constant(value=float() as x):
                return Value(DOUBLE, float_literal(x))
            case ast.Attribute(value=array, attr="size"):
                first, *others = self.array(array).shape
                return Value(INTEGER, reduce(lambda x, n: self._build.name(f"mul nsw i64 {x}, {n}"), others, first))
            case ast.Attribute(value=ast.Name(id="math" | "np"), attr=name) if name in _CONSTANTS:
                return Value(DOUBLE, float_literal(_CONSTANTS[name]))
            case ast.UnaryOp():
                return self._unary(node, self.number(node.operand))
            case ast.Compare(ops=[op], comparators=[right]) if type(op) in _SIGNS:
                return compare(self._build, _SIGNS[type(op)], self.number(node.left), self.number(right))
            case ast.BoolOp():
                return self._conditional(node, Value(BOOLEAN, "true"), Value(BOOLEAN, "false"))
            case ast.IfExp():
                return self._conditional(node.test, node.body, node.orelse)
            case ast.Call():
                return self._called(node)
        refuse(node)

    def _unary(self, node: ast.UnaryOp, x: Value) -> Value:
        build = self._build
        if isinstance(node.op, ast.Not):
            return build.operation("xor", build.truth(x), Value(BOOLEAN, "true"))
        if not isinstance(node.op, ast.USub):
            refuse(node)
        if x.kind == INTEGER:
            return build.operation("sub nsw", Value(INTEGER, "0"), x) if x.text[0] == "%" else Value(INTEGER, f"-{x.text}")
        return build.floating("fneg", x) if x.text[0] == "%" else Value(x.kind, float_literal(-literal_value(x.text)))

    def arithmetic(self, node: ast.AST, op: ast.operator, a: Value, b: Value) -> Value:
        """Return the value of a binary operation."""
        build = self._build
        if isinstance(op, ast.Pow):
            return self._function("math.pow", [a, b])
        kind = common_kind(a.kind, b.kind)
        if kind == BOOLEAN and type(op) in (ast.BitAnd, ast.BitOr, ast.BitXor):
            return build.operation(_INTEGRAL[type(op)], a, b)
        if kind in (BOOLEAN, INTEGER):
            kind = DOUBLE if isinstance(op, ast.Div) else INTEGER
        a, b = build.converted(a, kind), build.converted(b, kind)
        known = _INTEGRAL if kind == INTEGER else _FLOATING
        if type(op) not in known:
            refuse(node)
        if kind == INTEGER:
            return build.operation(known[type(op)], a, b)
        return build.floating(known[type(op)], a, b)

    def _called(self, node: ast.Call) -> Value:
        name = ast.unparse(node.func)
        results = self._inlined(node)
        if results is not None:
            return results[0] if len(results) == 1 else refuse(node)
        given: list[Value] = [self._any(a) for a in node.args]  # type: ignore[misc]
        try:
            return self._function(name, given)
        except KeyError:
            refuse(node)

    def _function(self, name: str, given: Sequence[Value]) -> Value:
        """Return the value of a function of numbers; raise a KeyError if the name is unknown."""
        build, known, (module, _, function) = self._build, definitions(has_fma_instruction()), name.partition(".")
        # Most elementary functions compute in double precision only.
        for kind in (_float_kind(given), DOUBLE) if module in ("math", "np") else ():
            if (symbol := f"{function}_{kind}") in known:
                self._module.defined.update(known)
                result = self._results(symbol, [build.converted(x, kind) for x in given])[0]
                return build.converted(result, _float_kind(given))
        return called_function(build, name, list(given))

    # ---- arrays

    def _constants(self, entries: Sequence[Value]) -> ArrayValue:
        """Return an array of constants of one type."""
        kind, texts = entries[0].kind, ", ".join(f"{x.type} {x.text}" for x in entries)
        text = f"[{len(entries)} x {kind}] [{texts}]"
        name = self._module.tables.setdefault(text, f"@table{len(self._module.tables)}")
        return ArrayValue(next(dtype for dtype, element in ELEMENTS.items() if element == kind), name, (str(len(entries)),))

    def array(self, node: ast.expr) -> ArrayValue:
        """Return the array that a name refers to."""
        value = self._variables.get(node.id) if isinstance(node, ast.Name) else None
        return value if isinstance(value, ArrayValue) else refuse(node)

    def index(self, node: ast.expr) -> str:
        """Return an integer expression as LLVM text."""
        x = self.number(node)
        if x.kind not in (INTEGER, BOOLEAN):
            refuse(node)
        return self._build.converted(x, INTEGER).text

    def entry_address(self, node: ast.Subscript) -> tuple[ArrayValue, str]:
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
                before = build.shared(f"mul nsw i64 {place}, {length}")
                place = build.shared(f"add nsw i64 {before}, {row}")
            data = build.row(element, data, build.shared(f"mul nsw i64 {place}, {array.shape[-1]}"))
        return array, build.shared(f"getelementptr inbounds {type_of(element, array.width)}, ptr {data}, i64 {last}")

    def _entry(self, node: ast.Subscript) -> Value:
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return Value(INTEGER, self.array(node.value.value).shape[ast.literal_eval(node.slice)])
        array, place = self.entry_address(node)
        element, width = ELEMENTS[array.dtype], array.width or self._width(node)
        if width:
            # Vectors are aligned like numbers: the caller's views of arrays may start anywhere.
            vector = type_of(element, width)
            return self._build.value(element, f"load {vector}, ptr {place}, align {_BYTES[element]}", width)
        x = self._build.name(f"load {element}, ptr {place}")
        if array.dtype == "bool":
            return self._build.value(BOOLEAN, f"icmp ne i8 {x}, 0")
        if element in ("i8", "i16", "i32"):
            return self._build.value(INTEGER, f"sext {element} {x} to i64")
        return Value(element, x)

    def _width(self, node: ast.Subscript) -> int:
        """Return the length of a vector in an array; 0 for a number."""
        lane = self._lane is not None and any(isinstance(x, ast.Name) and x.id == self._lane for x in ast.walk(node.slice))
        return VECTOR if lane else 0

    def _view(self, node: ast.Subscript) -> ArrayValue:
        """Return a slice of a one-dimensional array as a view; the bounds aren't checked."""
        array, part, build = self.array(node.value), node.slice, self._build
        if not isinstance(part, ast.Slice) or part.lower is None or part.upper is None or part.step is not None:
            refuse(node)
        if len(array.shape) != 1:
            refuse(node)
        start, stop = self.index(part.lower), self.index(part.upper)
        data = build.name(f"getelementptr inbounds {ELEMENTS[array.dtype]}, ptr {array.data}, i64 {start}")
        return ArrayValue(array.dtype, data, (build.name(f"sub nsw i64 {stop}, {start}"),))

    # ---- statements

    def _statements(self, nodes: Sequence[ast.stmt]) -> None:
        for node in nodes:
            match node:
                case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                    pass
                case ast.Expr(value=ast.Call(func=ast.Name(id="aligned_stack"))):
                    self.attributes += f" {_ALIGNED}"
                case ast.Expr(value=ast.Call(func=ast.Name(id="wide_vectors"))):
                    self.attributes += f" {_WIDE}" if prefers_512_bit_vectors() else ""
                case ast.Expr(value=ast.Call(func=ast.Name(id="rolled_loops"))):
                    self._module.has_rolled_loops = True
                    self.attributes += f" {INDEXED}"
                    self._module.declared["!llvm.loop"] = _ROLLED
                case ast.Expr(value=ast.Call(func=ast.Name(id="fetched"), args=[table, index])):
                    self._prefetch(table, index)
                case ast.Expr(value=ast.Call() as call):
                    if self._inlined(call) is None:
                        refuse(node)
                case ast.Assign():
                    self._assign(node)
                case ast.AugAssign():
                    operands = self.number(node.target), self.number(node.value)
                    self._store(node.target, self.arithmetic(node, node.op, *operands))
                case ast.Return():
                    self._return(node)
                case ast.If():
                    self._if(node)
                case ast.While(orelse=[]):
                    self._while(node)
                case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="lanes"), args=[_])):
                    self._for_lanes(name, node)
                case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=bounds), orelse=[]):
                    self._for(name, bounds, node.body)
                case ast.For(
                    target=ast.Name(id=name),
                    iter=ast.Call(func=ast.Name(id="few" | "rolled" as kind), args=bounds),
                    orelse=[],
                ):
                    self._module.declared["!llvm.loop"] = _ROLLED
                    self._for(name, bounds, node.body, f", !llvm.loop !{3 if kind == 'few' else 0}")
                case ast.Break():
                    self._build.jump(self._ends_of_loops[-1])
                case _:
                    refuse(node)

    def _prefetch(self, table: ast.expr, index: ast.expr) -> None:
        array, row = self.array(table), self.index(index)
        for length in array.shape[1:]:
            row = self._build.name(f"mul i64 {row}, {length}")
        self._module.declared["llvm.prefetch"] = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
        # The arguments mean: for reading (0), in all cache levels (3), data (1). Rows outside of the array are allowed.
        place = self._build.name(f"getelementptr {ELEMENTS[array.dtype]}, ptr {array.data}, i64 {row}")
        self._build.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 3, i32 1)")

    def _assign(self, node: ast.Assign) -> None:
        values = self.several(node.value)
        for target in node.targets:
            variables = target.elts if isinstance(target, ast.Tuple) else [target]
            if len(variables) != len(values):
                refuse(node)
            for variable, value in zip(variables, values):
                self._store(variable, value)

    def _inlined(self, node: ast.Call) -> list[Value] | None:
        """Return the results of a call of a function in the same text, None for other calls."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._module.defined):
            return None
        self.passed |= {a.id for a in node.args if isinstance(a, ast.Name)}
        lanes = (i for i, a in enumerate(node.args) if isinstance(a, ast.Name) and a.id == self._lane)
        return self._results(node.func.id, [self._any(a) for a in node.args], next(lanes, None))  # type: ignore[attr-defined]

    def _results(self, name: str, arguments: Sequence[Value | ArrayValue], lane: int | None = None) -> list[Value]:
        """Return the results of a function of the text."""
        build, (symbol, results) = self._build, self._module.call(name, arguments, lane)
        passed = [_parameter(x, "ptr") for x in arguments]
        if not self._module.is_long(name):
            made = build.name(f"call %{symbol} @{symbol}({', '.join(passed)})")
            return [build.value(x.kind, f"extractvalue %{symbol} {made}, {i}", x.width) for i, x in enumerate(results)]
        memory = build.slot(f"%{symbol}")
        build.do(f"call void @{symbol}({', '.join([f'ptr {memory}', *passed])})")
        places = [build.name(f"getelementptr %{symbol}, ptr {memory}, i64 0, i32 {i}") for i in range(len(results))]
        return [build.value(x.kind, f"load {x.type}, ptr {place}", x.width) for x, place in zip(results, places)]

    def _store(self, target: ast.expr, value: Value | ArrayValue) -> None:
        if isinstance(target, ast.Name):
            self._variables.write(target.id, value)
        elif isinstance(target, ast.Subscript) and isinstance(value, Value):
            array, place = self.entry_address(target)
            self._store_entry(array, place, value, array.width or self._width(target))
        else:
            refuse(target)

    def _store_entry(self, array: ArrayValue, place: str, value: Value, width: int) -> None:
        element = ELEMENTS[array.dtype]
        if width:
            (value,) = self._build.together(self._build.converted(value, element), width=width)
            self._build.do(f"store {value.type} {value.text}, ptr {place}, align {_BYTES[element]}")
            return
        if array.dtype == "bool":
            value = Value("i8", self._build.name(f"zext i1 {self._build.truth(value).text} to i8"))
        elif element in (SINGLE, DOUBLE):
            value = self._build.converted(value, element)
        else:
            value = self._build.converted(value, INTEGER)
            if element != INTEGER:
                value = Value(element, self._build.name(f"trunc i64 {value.text} to {element}"))
        self._build.do(f"store {element} {value.text}, ptr {place}")

    def _return(self, node: ast.Return) -> None:
        if node.value is None:
            self._build.leave("void")
            return
        values = [value if isinstance(value, Value) else refuse(node) for value in self.several(node.value)]
        self.results, build, made = values, self._build, "poison"
        for i, x in enumerate(values):
            if self._is_long:
                place = build.name(f"getelementptr {_RESULTS}, ptr %results, i64 0, i32 {i}")
                build.do(f"store {x.type} {x.text}, ptr {place}")
            else:
                made = build.name(f"insertvalue {_RESULTS} {made}, {x.type} {x.text}, {i}")
        build.leave("void" if self._is_long else f"{_RESULTS} {made}")

    def _if(self, node: ast.If) -> None:
        build = self._build
        yes, no, after = build.new_block(), build.new_block(), build.new_block()
        self.condition(node.test, yes, no)
        build.enter(yes)
        self._statements(node.body)
        build.jump(after)
        build.enter(no)
        self._statements(node.orelse)
        build.jump(after)
        build.enter(after)

    def _while(self, node: ast.While) -> None:
        build = self._build
        again, body, after = build.new_block(), build.new_block(), build.new_block()
        build.jump(again)
        build.enter(again)
        self.condition(node.test, body, after)
        build.enter(body)
        self._loop_body(node.body, after)
        build.jump(again)
        build.enter(after)

    def _loop_body(self, nodes: Sequence[ast.stmt], after: Block) -> None:
        self._ends_of_loops.append(after)
        self._statements(nodes)
        self._ends_of_loops.pop()

    def _for_lanes(self, name: str, node: ast.For) -> None:
        around = self._variables
        self._lane, self._variables = name, Variables(self._build, around, self.kinds, f"{node.lineno} ")
        (count,) = node.iter.args  # type: ignore[attr-defined]
        self._for(name, [ast.Constant(0), count, ast.Constant(VECTOR)], node.body)
        around.widened |= self._variables.widened
        self._lane, self._variables = None, around

    def _for(self, name: str, bounds: Sequence[ast.expr], nodes: Sequence[ast.stmt], metadata: str = "") -> None:
        build = self._build
        step = self.index(bounds[2]) if len(bounds) == 3 else "1"
        first = Value(INTEGER, self.index(bounds[0])) if len(bounds) > 1 else Value(INTEGER, "0")
        stop = Value(INTEGER, self.index(bounds[min(1, len(bounds) - 1)]))
        # The loop has a separate counter, since the body may assign to the loop variable, as in Python.
        counter = build.slot(INTEGER)
        build.do(f"store i64 {first.text}, ptr {counter}")
        again, body, after = build.new_block(), build.new_block(), build.new_block()
        build.jump(again)
        build.enter(again)
        current = build.value(INTEGER, f"load i64, ptr {counter}")
        build.branch(compare(build, ">" if step.startswith("-") else "<", current, stop), body, after)
        build.enter(body)
        self._variables.write(name, current)
        self._loop_body(nodes, after)
        next = build.name(f"add nsw i64 {current.text}, {step}")
        build.do(f"store i64 {next}, ptr {counter}")
        is_rolled = self._module.has_rolled_loops and all(isinstance(x, ast.Constant) for x in bounds)
        # LLVM takes long to find out that vectors of entries at looked-up indices gain nothing.
        latch = "" if not is_rolled else f", !llvm.loop !{3 if any(map(_looks_up, nodes)) else 0}"
        build.jump(again, metadata or latch)
        build.enter(after)


def _looks_up(node: ast.stmt) -> bool:
    """Return whether a statement reads an index of an array in another array."""
    indices = [x.slice for x in ast.walk(node) if isinstance(x, ast.Subscript)]
    return any(isinstance(x, ast.Subscript) for index in indices for x in ast.walk(index))


def _link(name: str, arguments: Sequence[Argument]) -> str:
    """Return a function that loads a kernel's arguments from a block, calls the kernel, and jumps to the next kernel."""
    kinds = [kind for dtype, ndim in arguments for kind in ([kind_of(dtype)] if ndim is None else ["ptr", *["i64"] * ndim])]
    lines = []
    for k, kind in enumerate(["ptr", "ptr", *kinds]):
        lines += [f"%p{k} = getelementptr i64, ptr %block, i64 {k}", f"%v{k} = load {kind}, ptr %p{k}"]
    given = ", ".join(f"{kind} %v{k}" for k, kind in enumerate(kinds, 2))
    lines += [f"call void @{name}.body({given})", "%last = icmp eq ptr %v0, null", "br i1 %last, label %end, label %next"]
    text = "\n  ".join(lines)
    return (
        f"define void @{name}(ptr %block) nounwind {{\n  {text}\n"
        "next:\n  musttail call void %v0(ptr %v1)\n  ret void\nend:\n  ret void\n}\n"
    )
