"""Kernels, in a small typed part of Python, as LLVM's intermediate representation.

A kernel is a function of numbers and contiguous arrays: assignments, loops over ranges, `while`, `if`, entries of arrays,
views of parts of rows, arithmetic. It calls functions of numbers that the text defines, which are inlined, and those of
`elementary_functions`. It allocates nothing and raises nothing: indices aren't checked, and negative ones don't count from
the end. A range goes down where its step is a negative constant, else up. Arithmetic is IEEE's, in the order of the text:
nothing is reassociated or contracted unless that is allowed.

The kind of a variable is the widest of all that is assigned to it: a function is translated again where a later assignment
has widened one.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from mpiad.compiling import llvm
from mpiad.compiling.arguments import Argument
from mpiad.compiling.block_builder import Block, BlockBuilder, Variables
from mpiad.compiling.elementary_functions import compared
from mpiad.compiling.expressions import Expressions, refuse
from mpiad.compiling.values import DOUBLE, ELEMENTS, INTEGER, SINGLE, ArrayValue, Value, kind_of

_ALIGNED = "alignstack(64) noinline"
_WIDE = '"prefer-vector-width"="512"'


def translated(text: str, name: str, arguments: Sequence[Argument], fast: str = "", linked: bool = False) -> str:
    """Return a kernel, one of the functions of a text, as a module of LLVM's intermediate representation.

    Its symbol is called `name`. `fast` are the flags of floating-point operations that may be reordered, as LLVM writes
    them; `linked` says whether no two of its arrays share memory that it writes (see `machine_code`). A NotImplementedError
    where the text isn't of the language.
    """
    defined = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    module = _Module(defined, fast, linked)
    if not linked:
        return module.kernel(defined[name], arguments, name)
    # In a function of its own: what doesn't overlap is said of arguments, which addresses in memory aren't.
    body = module.kernel(defined[name], arguments, f"{name}.body", "ptr noalias", "internal ")
    return f"{body}\n\n{_link(name, arguments)}"


class _Module:
    """The functions of a text, each translated when it is called first, once for each list of types."""

    def __init__(self, defined: dict[str, ast.FunctionDef], fast: str, linked: bool):
        # A loop over many arrays has as many rows. To choose among sums of their addresses, steps and lengths takes LLVM
        # longer than all else, and is won back by nothing.
        self.defined, self.fast, self.hides_rows = defined, fast, linked
        self.declared: dict[str, str] = {}
        self._made: dict[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]] = {}
        self._texts: list[str] = []

    def kernel(
        self, node: ast.FunctionDef, arguments: Sequence[Argument], symbol: str, pointer: str = "ptr", linkage: str = ""
    ) -> str:
        names = [argument.arg for argument in node.args.args]
        given: dict[str, Value | ArrayValue] = {}
        kinds = []
        for i, (name, (dtype, ndim)) in enumerate(zip(names, arguments, strict=True)):
            if ndim is None:
                given[name] = Value(kind_of(dtype), f"%a{i}")
                kinds.append(f"{kind_of(dtype)} %a{i}")
            else:
                lengths = tuple(f"%a{i}_{axis}" for axis in range(ndim))
                given[name] = ArrayValue(dtype.name, f"%a{i}", lengths)
                kinds += [f"{pointer} %a{i}", *(f"i64 {length}" for length in lengths)]
        function = self._translated(node, given)
        own = " noinline" if linkage else ""
        attributes = f"nounwind{own} {function.attributes}".strip()
        made = f"define {linkage}void @{symbol}({', '.join(kinds)}) {attributes} {{\n{function.text()}\n}}\n"
        return "\n\n".join([*self._texts, made, *self.declared.values()])

    def call(self, name: str, kinds: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """Return the symbol of a function for arguments of these kinds, and the kinds of its results."""
        known = name, kinds
        if known not in self._made:
            node, symbol = self.defined[name], f"{name}.{len(self._made)}"
            given = {a.arg: Value(kind, f"%a{i}") for i, (a, kind) in enumerate(zip(node.args.args, kinds, strict=True))}
            function = self._translated(node, given)
            result = f"{{{', '.join(function.results)}}}"
            parameters = ", ".join(f"{x.kind} {x.text}" for x in given.values())
            head = f"define internal {result} @{symbol}({parameters}) alwaysinline nounwind"
            self._texts.append(f"{head} {{\n{function.text()}\n}}")
            self._made[known] = symbol, tuple(function.results)
        return self._made[known]

    def _translated(self, node: ast.FunctionDef, given: Mapping[str, Value | ArrayValue]) -> _Function:
        kinds: dict[str, str] = {}
        while True:
            function = _Function(self, node, given, dict(kinds))
            if function.kinds == kinds:
                return function
            kinds = function.kinds


class _Function:
    """One translation of a function, by what is known of its variables' kinds."""

    def __init__(
        self, module: _Module, node: ast.FunctionDef, given: Mapping[str, Value | ArrayValue], kinds: dict[str, str]
    ):
        self.kinds, self.attributes = kinds, ""
        self.results: list[str] = []
        self._module = module
        self._build = BlockBuilder(module.fast, module.declared, module.hides_rows)
        self._variables = Variables(self._build, given, kinds)
        self._values = Expressions(self._build, self._variables, self._inlined)
        self._loops: list[tuple[Block, Block]] = []  # where `continue` and `break` lead
        assigned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for name in sorted(assigned & given.keys()):
            self._variables.write(name, given[name])
        self._statements(node.body)
        self._build.leave("void")

    def text(self) -> str:
        """Return its blocks as LLVM reads them."""
        return self._build.text()

    # ---- statements

    def _statements(self, nodes: Sequence[ast.stmt]) -> None:
        for node in nodes:
            method = getattr(self, f"_{type(node).__name__.lower()}", None)
            if method is None:
                refuse(node)
            method(node)

    def _expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Constant) and isinstance(call.value, str):
            return
        name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        if name == "aligned_stack":
            self.attributes += f" {_ALIGNED}"
        elif name == "wide_vectors":
            self.attributes += f" {_WIDE}" if llvm.prefers_wide() else ""
        elif name == "fetched":
            self._prefetch(*call.args)  # type: ignore[union-attr]
        else:
            refuse(node)

    def _prefetch(self, table: ast.expr, index: ast.expr) -> None:
        array, row = self._values.array(table), self._values.index(index)
        for length in array.shape[1:]:
            row = self._build.name(f"mul i64 {row}, {length}")
        self._module.declared["llvm.prefetch"] = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
        # To be read, to stay in all caches, and data. Where there is no such row, nothing happens.
        place = self._build.name(f"getelementptr {ELEMENTS[array.dtype]}, ptr {array.data}, i64 {row}")
        self._build.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 3, i32 1)")

    def _assign(self, node: ast.Assign) -> None:
        values = self._values.several(node.value)
        for target in node.targets:
            if isinstance(target, ast.Tuple):
                if len(target.elts) != len(values):
                    refuse(node)
                for one, value in zip(target.elts, values):
                    self._store(one, value)
            else:
                if len(values) != 1:
                    refuse(node)
                self._store(target, values[0])

    def _inlined(self, node: ast.Call) -> list[Value] | None:
        """Return the results of a call of a function of this text."""
        if not isinstance(node.func, ast.Name) or node.func.id not in self._module.defined:
            return None
        given = [self._values.number(a) for a in node.args]
        symbol, kinds = self._module.call(node.func.id, tuple(x.kind for x in given))
        result = f"{{{', '.join(kinds)}}}"
        made = self._build.name(f"call {result} @{symbol}({', '.join(f'{x.kind} {x.text}' for x in given)})")
        return [self._build.value(kind, f"extractvalue {result} {made}, {i}") for i, kind in enumerate(kinds)]

    def _augassign(self, node: ast.AugAssign) -> None:
        operands = self._values.number(node.target), self._values.number(node.value)
        self._store(node.target, self._values.arithmetic(node, node.op, *operands))

    def _store(self, target: ast.expr, value: Value | ArrayValue) -> None:
        if isinstance(target, ast.Name):
            self._variables.write(target.id, value)
        elif isinstance(target, ast.Subscript) and isinstance(value, Value):
            array, place = self._values.place(target)
            self._store_entry(array, place, value)
        else:
            refuse(target)

    def _store_entry(self, array: ArrayValue, place: str, value: Value) -> None:
        element = ELEMENTS[array.dtype]
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
        values = [value if isinstance(value, Value) else refuse(node) for value in self._values.several(node.value)]
        self.results = [x.kind for x in values]
        kind, made = f"{{{', '.join(self.results)}}}", "poison"
        for i, x in enumerate(values):
            made = self._build.name(f"insertvalue {kind} {made}, {x.kind} {x.text}, {i}")
        self._build.leave(f"{kind} {made}")

    def _if(self, node: ast.If) -> None:
        build = self._build
        yes, no, after = build.new_block(), build.new_block(), build.new_block()
        self._values.condition(node.test, yes, no)
        build.enter(yes)
        self._statements(node.body)
        build.jump(after)
        build.enter(no)
        self._statements(node.orelse)
        build.jump(after)
        build.enter(after)

    def _while(self, node: ast.While) -> None:
        if node.orelse:
            refuse(node)
        build = self._build
        again, body, after = build.new_block(), build.new_block(), build.new_block()
        build.jump(again)
        build.enter(again)
        self._values.condition(node.test, body, after)
        self._loop_body(node.body, body, again, after)
        build.jump(again)
        build.enter(after)

    def _loop_body(self, nodes: Sequence[ast.stmt], body: Block, again: Block, after: Block) -> None:
        self._loops.append((again, after))
        self._build.enter(body)
        self._statements(nodes)
        self._loops.pop()

    def _for(self, node: ast.For) -> None:
        call = node.iter
        is_range = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"
        if not is_range or not isinstance(node.target, ast.Name) or node.orelse:
            refuse(node)
        build, bounds = self._build, list(call.args)  # type: ignore[union-attr]
        step = self._values.index(bounds[2]) if len(bounds) == 3 else "1"
        first = Value(INTEGER, self._values.index(bounds[0])) if len(bounds) > 1 else Value(INTEGER, "0")
        stop = Value(INTEGER, self._values.index(bounds[min(1, len(bounds) - 1)]))
        # A counter of its own: the body may change the variable, as in Python.
        counter = build.slot(INTEGER)
        build.do(f"store i64 {first.text}, ptr {counter}")
        again, body, more, after = (build.new_block() for _ in range(4))
        build.jump(again)
        build.enter(again)
        now = build.value(INTEGER, f"load i64, ptr {counter}")
        build.branch(compared(build, ">" if step.startswith("-") else "<", now, stop), body, after)
        build.enter(body)
        self._variables.write(node.target.id, now)
        inside = build.new_block()
        build.jump(inside)
        self._loop_body(node.body, inside, more, after)
        build.jump(more)
        build.enter(more)
        next = build.name(f"add nsw i64 {now.text}, {step}")
        build.do(f"store i64 {next}, ptr {counter}")
        build.jump(again)
        build.enter(after)

    def _break(self, node: ast.Break) -> None:
        self._build.jump(self._loops[-1][1])

    def _continue(self, node: ast.Continue) -> None:
        self._build.jump(self._loops[-1][0])

    def _pass(self, node: ast.Pass) -> None:
        pass


def _link(name: str, arguments: Sequence[Argument]) -> str:
    """Return the function that takes a kernel's arguments from a block of memory, and goes on with the next kernel."""
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
