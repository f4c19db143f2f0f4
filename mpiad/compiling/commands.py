"""Commands: copies, sums, comparisons and calls of linked kernels, which machine code runs in order.

A linked kernel runs a chain that is the same in each call (see `cache`). What differs between calls, such as the memory
from which a call reads its arguments, is in the commands. A call of `Commands.run` takes as long as one of a kernel, and a
command takes a hundredth of that.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import address_of, parts
from mpiad.compiling.cache import Kernel, kernel_of

_COPY, _ADD_SINGLE, _ADD_DOUBLE, _NUMBER, _COMPARE, _CALL = range(6)
_OPERANDS = 4
# The words of the block after the two of each linked kernel: the addresses of the first command and behind the last one,
# and of the one at which the commands have stopped.
_FIRST, _END, _AT = 2, 3, 4


class Commands:
    """A list of commands. Arrays are contiguous, and stay alive as long as the list."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._held: list[Any] = []
        self._compiled: Array | None = None
        self._block = (ctypes.c_int64 * (_AT + 1))()

    def __len__(self) -> int:
        return len(self._rows)

    def _append(self, kind: int, *operands: int) -> None:
        self._rows.append((kind, *operands, *[0] * (_OPERANDS - len(operands))))

    def _address(self, x: Array) -> int:
        self._held.append(x)
        return address_of(x)

    def copy(self, out: Array, x: Array) -> None:
        """Append out[...] = x, for arrays of one shape and dtype that are the same or don't overlap."""
        if out.nbytes and address_of(out) != address_of(x):
            self._append(_COPY, self._address(out), self._address(x), out.nbytes)

    def add(self, out: Array, x: Array) -> None:
        """Append out += x, for arrays of one shape and dtype that don't overlap."""
        numbers = parts(out.reshape(-1))
        if numbers.size:
            kind = _ADD_SINGLE if numbers.dtype == np.float32 else _ADD_DOUBLE
            self._append(kind, self._address(out), self._address(x), numbers.size)

    def number(self, address: int, base: Array, offset: int, limit: int) -> None:
        """Append the storing of (base[0] + offset) modulo `limit` at an address; `base`: an array of int64."""
        self._append(_NUMBER, address, self._address(base), offset, limit)

    def compare(self, x: Array, y: Array) -> None:
        """Append a comparison: the commands stop here if the bits of two arrays differ."""
        if x.nbytes:
            self._append(_COMPARE, self._address(x), self._address(y), x.nbytes)

    def call(self, function: int, block: int, error: int) -> None:
        """Append a call of a linked kernel: the commands stop here if it stores another number than 0 at `error`."""
        self._append(_CALL, function, block, error)

    def run(self, start: int, stop: int) -> int:
        """Run commands; return the index of the one at which they have stopped, `stop` if all have run."""
        if self._compiled is None:
            self._compiled = np.array(self._rows, np.int64).reshape(-1, 1 + _OPERANDS)
        rows, block = self._compiled, self._block
        first, size = address_of(rows), rows.strides[0]
        block[_FIRST], block[_END] = first + start * size, first + stop * size
        _kernel().function(ctypes.addressof(block))
        return (block[_AT] - first) // size


@cache
def _kernel() -> Kernel:
    return kernel_of(_TEXT, "commands", "linked()")


def _operands(name: str, kinds: str) -> str:
    """Return the instructions that load the operands of a command; kinds: p for an address, w for a word."""
    types = {"p": "ptr", "w": "i64"}
    return "\n  ".join(
        f"%{name}{k}.p = getelementptr i64, ptr %row, i64 {k + 1}\n  %{name}{k} = load {types[kind]}, ptr %{name}{k}.p"
        for k, kind in enumerate(kinds)
    )


def _sum(name: str, kind: str) -> str:
    """Return the blocks of instructions of a sum."""
    return f"""
{name}:
  {_operands(name, "ppw")}
  br label %{name}.loop
{name}.loop:
  %{name}.i = phi i64 [ 0, %{name} ], [ %{name}.next, %{name}.loop ]
  %{name}.to = getelementptr {kind}, ptr %{name}0, i64 %{name}.i
  %{name}.from = getelementptr {kind}, ptr %{name}1, i64 %{name}.i
  %{name}.y = load {kind}, ptr %{name}.to
  %{name}.x = load {kind}, ptr %{name}.from
  %{name}.sum = fadd {kind} %{name}.y, %{name}.x
  store {kind} %{name}.sum, ptr %{name}.to
  %{name}.next = add i64 %{name}.i, 1
  %{name}.more = icmp slt i64 %{name}.next, %{name}2
  br i1 %{name}.more, label %{name}.loop, label %next"""


_TEXT = f"""define void @commands(ptr %block) nounwind {{
entry:
  %first.p = getelementptr i64, ptr %block, i64 {_FIRST}
  %first = load ptr, ptr %first.p
  %end.p = getelementptr i64, ptr %block, i64 {_END}
  %end = load ptr, ptr %end.p
  %at = getelementptr i64, ptr %block, i64 {_AT}
  br label %loop
loop:
  %row = phi ptr [ %first, %entry ], [ %following, %next ]
  %done = icmp uge ptr %row, %end
  br i1 %done, label %stop, label %command
command:
  %kind = load i64, ptr %row
  switch i64 %kind, label %call [
    i64 {_COPY}, label %copy
    i64 {_ADD_SINGLE}, label %single
    i64 {_ADD_DOUBLE}, label %double
    i64 {_NUMBER}, label %number
    i64 {_COMPARE}, label %compare
  ]
copy:
  {_operands("copy", "ppw")}
  %copied = call ptr @memcpy(ptr %copy0, ptr %copy1, i64 %copy2)
  br label %next{_sum("single", "float")}{_sum("double", "double")}
number:
  {_operands("number", "ppww")}
  %base = load i64, ptr %number1
  %total = add i64 %base, %number2
  %rest = srem i64 %total, %number3
  store i64 %rest, ptr %number0
  br label %next
compare:
  {_operands("compare", "ppw")}
  %difference = call i32 @memcmp(ptr %compare0, ptr %compare1, i64 %compare2)
  %same = icmp eq i32 %difference, 0
  br i1 %same, label %next, label %stop
call:
  {_operands("call", "ppp")}
  call void %call0(ptr %call1)
  %error = load i64, ptr %call2
  %right = icmp eq i64 %error, 0
  br i1 %right, label %next, label %stop
next:
  %following = getelementptr i64, ptr %row, i64 {1 + _OPERANDS}
  br label %loop
stop:
  store ptr %row, ptr %at
  ret void
}}
declare ptr @memcpy(ptr, ptr, i64)
declare i32 @memcmp(ptr, ptr, i64)
"""
