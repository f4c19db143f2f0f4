"""The text of a function in LLVM's intermediate representation: its basic blocks and its variables."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

# The types ("kinds") of the kernel language.
#
# Numbers are booleans, 64-bit integers, and floats in single and double precision: LLVM's i1, i64, float and double.
# Array entries with fewer bits are widened when loaded. As in NumPy, the common type of a 64-bit integer and a
# single-precision float is double. An array is contiguous, given by the address of its first entry and its lengths.


BOOLEAN, INTEGER, SINGLE, DOUBLE = KINDS = ("i1", "i64", "float", "double")

# The types of an array's entries in memory.
ELEMENTS = {
    "float64": "double",
    "float32": "float",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "bool": "i8",
}


class Value(NamedTuple):
    """A number, or a vector of numbers: one for each of several successive lanes."""

    kind: str  # {"i1", "i64", "float", "double"}
    text: str  # its name in LLVM's intermediate representation, or a constant
    width: int = 0  # the length of a vector; 0 for a number

    @property
    def type(self) -> str:
        """Its type in LLVM's intermediate representation."""
        return type_of(self.kind, self.width)


class ArrayValue(NamedTuple):
    """A contiguous array."""

    dtype: str  # NumPy's name
    data: str  # name of the address of its first entry
    shape: tuple[str, ...]  # names of its lengths
    width: int = 0  # the length of the vectors that are its entries; 0 for numbers


def type_of(kind: str, width: int) -> str:
    """Return the type of a number, or of a vector if `width` isn't 0, in LLVM's intermediate representation."""
    return f"<{width} x {kind}>" if width else kind


def kind_of(dtype: np.dtype) -> str:
    """Return the kind of a number of this dtype in a kernel."""
    return {"f": DOUBLE if dtype.itemsize == 8 else SINGLE, "i": INTEGER, "b": BOOLEAN}[dtype.kind]


@cache
def common_kind(a: str, b: str) -> str:
    """Return the common type of two numbers: the wider one, or double for an integer and a single-precision float."""
    if {a, b} == {INTEGER, SINGLE}:
        return DOUBLE
    return KINDS[max(KINDS.index(a), KINDS.index(b))]


def float_literal(x: float) -> str:
    """Return a double as an exact LLVM literal, which doesn't depend on the locale."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', x))[0]:016X}"


def literal_value(text: str) -> float:
    """Return the value of a literal made by `float_literal`."""
    return struct.unpack("<d", struct.pack("<Q", int(text, 16)))[0]


# An intrinsic function that returns its argument; LLVM removes the calls after all loop optimizations.
_HIDDEN = "llvm.strip.invariant.group.p0"


class Block:
    """A basic block: a sequence of instructions that ends with a jump."""

    def __init__(self, label: str):
        self.label, self.ended = label, False
        self.lines: list[str] = []
        # What has been computed in the block: results by instruction, and the variables' values by their first slot.
        self.results: dict[str, str] = {}
        self.variables: dict[str, Value | ArrayValue] = {}


class BlockBuilder:
    """Appends instructions to the current block of a function; `declared`: collects declarations of called functions."""

    def __init__(self, fast: str, declared: dict[str, str], hides_rows: bool):
        # `hides_rows`: whether LLVM's optimizer must not know the relative positions of rows.
        self._fast, self.declared, self._hides_rows = f"{fast} " if fast else "", declared, hides_rows
        self._numbers = 0
        self._slots: dict[str, str] = {}  # the types of slots by name
        self.unread: set[str] = set()  # the slots of variables that haven't been loaded
        self.blocks = [Block("start")]
        self.current = self.blocks[0]

    def text(self) -> str:
        """Return all blocks as LLVM text; slots of variables that are never loaded, and their stores, are omitted."""
        lines = ["start:", *(f"  {slot} = alloca {kind}" for slot, kind in self._slots.items() if slot not in self.unread)]
        for block in self.blocks:
            lines += [f"{block.label}:"] * (block is not self.blocks[0])
            lines += ["  " + line for line in block.lines if line.rpartition(" ")[2] not in self.unread]
        return "\n".join(lines)

    # ---- blocks

    def new_block(self) -> Block:
        """Return a new block, which becomes part of the function at `enter`."""
        self._numbers += 1
        return Block(f"block{self._numbers}")

    def enter(self, block: Block) -> None:
        """Append a block to the function, as the current block."""
        self.blocks.append(block)
        self.current = block

    def jump(self, block: Block, metadata: str = "") -> None:
        """End the current block, unless it has ended."""
        self._end(f"br label %{block.label}{metadata}")

    def branch(self, condition: Value, yes: Block, no: Block) -> None:
        """End the current block with a conditional branch."""
        self._end(f"br i1 {condition.text}, label %{yes.label}, label %{no.label}")

    def leave(self, text: str) -> None:
        """Return from the function."""
        self._end(f"ret {text}")

    def _end(self, line: str) -> None:
        self.do(line)
        self.current.ended = True

    # ---- instructions

    def do(self, line: str) -> None:
        """Append an instruction without a result; omit it if it can't be reached."""
        if not self.current.ended:
            self.current.lines.append(line)

    def name(self, line: str) -> str:
        """Append an instruction and return the name of its result."""
        self._numbers += 1
        name = f"%v{self._numbers}"
        self.do(f"{name} = {line}")
        return name

    def shared(self, line: str) -> str:
        """Return the name of the result of an instruction that depends on its operands only; a block has it once."""
        results = self.current.results
        if line not in results:
            results[line] = self.name(line)
        return results[line]

    def value(self, kind: str, line: str, width: int = 0) -> Value:
        """Append an instruction whose result is a number, or a vector."""
        return Value(kind, self.name(line), width)

    def together(self, *values: Value, width: int = 0) -> list[Value]:
        """Return values as vectors if any of them is one, or if a width is given; numbers are repeated."""
        width = max([width, *[x.width for x in values]])
        return [self._repeated(x, width) if width and not x.width else x for x in values]

    def _repeated(self, x: Value, width: int) -> Value:
        if not x.text.startswith("%"):
            return Value(x.kind, f"<{', '.join([f'{x.kind} {x.text}'] * width)}>", width)
        vector = type_of(x.kind, width)
        first = self.name(f"insertelement {vector} poison, {x.kind} {x.text}, i64 0")
        mask = f"<{width} x i32> zeroinitializer"
        return self.value(x.kind, f"shufflevector {vector} {first}, {vector} poison, {mask}", width)

    def floating(self, instruction: str, *operands: Value) -> Value:
        """Append an operation on floats of one kind."""
        return self.operation(f"{instruction} {self._fast}".rstrip(), *operands)

    def operation(self, instruction: str, *operands: Value) -> Value:
        """Append an operation whose operands and result have one type."""
        first, *others = self.together(*operands)
        text = ", ".join([f"{instruction} {first.type} {first.text}", *(x.text for x in others)])
        return self.value(first.kind, text, first.width)

    def slot(self, kind: str) -> str:
        """Return the memory of a new variable."""
        name = f"%slot{len(self._slots)}"
        self._slots[name] = kind
        return name

    def call(self, function: str, kind: str, *operands: Value, fast: bool = True) -> Value:
        """Append a call of an intrinsic or a function of the C library; for vectors, intrinsics or several calls."""
        operands, scalar = tuple(self.together(*operands)), kind
        width = operands[0].width
        if width and not function.startswith("llvm."):
            return self._by_lanes(function, kind, operands, width)
        if width:
            name, _, suffix = function.rpartition(".")
            function, kind = f"{name}.v{width}{suffix}", type_of(kind, width)
        self.declared[function] = f"declare {kind} @{function}({', '.join(x.type for x in operands)})"
        given = ", ".join(f"{x.type} {x.text}" for x in operands)
        return self.value(scalar, f"call {self._fast if fast else ''}{kind} @{function}({given})", width)

    def _by_lanes(self, function: str, kind: str, operands: Sequence[Value], width: int) -> Value:
        vector = "poison"
        for i in range(width):
            parts = [self.value(x.kind, f"extractelement {x.type} {x.text}, i64 {i}") for x in operands]
            part = self.call(function, kind, *parts)
            vector = self.name(f"insertelement {type_of(kind, width)} {vector}, {kind} {part.text}, i64 {i}")
        return Value(kind, vector, width)

    def row(self, element: str, data: str, place: str) -> str:
        """Return the address of the row of an array that begins at the entry `place`."""
        start = self.shared(f"getelementptr inbounds {element}, ptr {data}, i64 {place}")
        if not self._hides_rows:
            return start
        self.declared[_HIDDEN] = f"declare ptr @{_HIDDEN}(ptr)"
        return self.shared(f"call ptr @{_HIDDEN}(ptr {start})")

    # ---- conversions

    def converted(self, x: Value, kind: str) -> Value:
        """Return a number converted to another type; floats are rounded toward zero to integers."""
        if x.kind == kind:
            return x
        if kind == BOOLEAN:
            return self.truth(x)
        if x.kind == DOUBLE and kind == SINGLE and not x.text.startswith("%"):
            return Value(kind, float_literal(float(np.float32(literal_value(x.text)))))
        if kind == INTEGER:
            instruction = "zext" if x.kind == BOOLEAN else "fptosi"
        elif x.kind == BOOLEAN:
            instruction = "uitofp"
        elif x.kind == INTEGER:
            instruction = "sitofp"
        else:
            instruction = "fpext" if KINDS.index(kind) > KINDS.index(x.kind) else "fptrunc"
        return self.value(kind, f"{instruction} {x.type} {x.text} to {type_of(kind, x.width)}", x.width)

    def truth(self, x: Value) -> Value:
        """Return whether a number isn't zero."""
        if x.kind == BOOLEAN:
            return x
        zero, sign = ("0", "icmp ne") if x.kind == INTEGER else ("0.0", "fcmp une")
        return self.value(BOOLEAN, f"{sign} {x.type} {x.text}, {'zeroinitializer' if x.width else zero}", x.width)

    def selected(self, condition: Value, a: Value, b: Value) -> Value:
        """Return a if the condition is true, else b; both values are computed beforehand."""
        a, b = self.together(a, b, width=condition.width)
        choices = f"{a.type} {a.text}, {b.type} {b.text}"
        return self.value(a.kind, f"select {condition.type} {condition.text}, {choices}", a.width)


class Variables:
    """The variables of a function, each with a stack slot, which LLVM turns into a register."""

    def __init__(
        self,
        build: BlockBuilder,
        arguments: Variables | Mapping[str, Value | ArrayValue],
        kinds: dict[str, str],
        scope: str = "",
    ):
        # `kinds`: the widest kind of each variable, "ptr" for arrays. If it changes, the function is translated again.
        # In a loop over lanes, `arguments` are the function's variables; those of the loop are vectors and have a `scope`.
        self._build, self._arguments, self.kinds, self._scope = build, arguments, kinds, scope
        # The parts of each variable with their memory: those of a number, or of an array's address and lengths.
        self._slots: dict[str, list[tuple[Value, str]]] = {}
        self._arrays: dict[str, ArrayValue] = {}  # as assigned first
        self.widened = False  # whether an assignment has changed the type of a variable that was used before

    def get(self, name: str) -> Value | ArrayValue | None:
        """Return the value of a variable or an argument; None if the name is unknown."""
        if name not in self._slots:
            return self._arguments.get(name)
        build, slots = self._build, self._slots[name]
        known, key = build.current.variables, slots[0][1]
        if key not in known:
            build.unread.difference_update(slot for _, slot in slots)
            first, *lengths = [build.value(x.kind, f"load {x.type}, ptr {slot}", x.width) for x, slot in slots]
            array = self._arrays.get(name)
            known[key] = array._replace(data=first.text, shape=tuple(x.text for x in lengths)) if array else first
        return known[key]

    def write(self, name: str, value: Value | ArrayValue) -> None:
        """Assign to a variable."""
        # The kind is that of the variables with this name in the whole function; vectors have their own lengths.
        known = f"{self._scope}{name} length"
        before = self.kinds.get(name), self.kinds.get(known)
        if isinstance(value, ArrayValue):
            self.kinds[name], self._arrays[name] = "ptr", value
            types = parts = [Value("ptr", value.data), *(Value(INTEGER, length) for length in value.shape)]
        else:
            kind, width = common_kind(before[0] or value.kind, value.kind), max(value.width, int(before[1] or 0))
            self.kinds[name], self.kinds[known] = kind, str(width)
            types, parts = [Value(kind, "", width)], [value]
        self.widened |= any(x not in (None, self.kinds.get(key)) for x, key in zip(before, (name, known)))
        if name not in self._slots:
            self.widened |= not self._scope and self._arguments.get(name) is not None
            self._slots[name] = [(x, self._build.slot(x.type)) for x in types]
            self._build.unread.update(slot for _, slot in self._slots[name])
        build, slots, stored = self._build, self._slots[name], list[Value]()
        for part, (x, slot) in zip(parts, slots, strict=True):
            stored += build.together(build.converted(part, x.kind), width=x.width)
            build.do(f"store {stored[-1].type} {stored[-1].text}, ptr {slot}")
        build.current.variables[slots[0][1]] = value if isinstance(value, ArrayValue) else stored[0]
        # Constants are loaded: as the step of a range, or in `-x`, they would be translated in another way.
        if not all(x.text.startswith("%") for x in stored):
            del build.current.variables[slots[0][1]]
