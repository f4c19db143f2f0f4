"""The variables of a function: each has memory of its own, which LLVM turns into registers."""

from __future__ import annotations

from collections.abc import Mapping

from mpiad.compiling.block_builder import BlockBuilder
from mpiad.compiling.values import ArrayValue, Value, common_kind

__all__ = ["Variables"]


class Variables:
    """Writes and reads variables in the current block of a function.

    `given`: the function's arguments, by name; those that it assigns to become variables. `kinds`: by name the widest
    kind of number that is known to be assigned to a variable. Where a wider one comes, it is noted here, and the
    function must be translated again.
    """

    def __init__(self, build: BlockBuilder, given: Mapping[str, Value | ArrayValue], kinds: dict[str, str]):
        self._build, self._given, self.kinds = build, given, kinds
        self._numbers: dict[str, tuple[str, str]] = {}  # kind and memory
        self._arrays: dict[str, tuple[str, str, tuple[str, ...]]] = {}  # dtype, and memory of the address and the lengths

    def read(self, name: str) -> Value | ArrayValue | None:
        """Return the value of a variable or an argument; None where there is none of this name."""
        build = self._build
        if name in self._numbers:
            kind, slot = self._numbers[name]
            return build.value(kind, f"load {kind}, ptr {slot}")
        if name in self._arrays:
            dtype, data, lengths = self._arrays[name]
            shape = tuple(build.name(f"load i64, ptr {length}") for length in lengths)
            return ArrayValue(dtype, build.name(f"load ptr, ptr {data}"), shape)
        return self._given.get(name)

    def write(self, name: str, value: Value | ArrayValue) -> None:
        """Assign to a variable."""
        if isinstance(value, ArrayValue):
            self._write_array(name, value)
            return
        self.kinds[name] = common_kind(self.kinds.get(name, value.kind), value.kind)
        if name not in self._numbers:
            self._numbers[name] = self.kinds[name], self._build.slot(self.kinds[name])
        kind, slot = self._numbers[name]
        self._build.do(f"store {kind} {self._build.converted(value, kind).text}, ptr {slot}")

    def _write_array(self, name: str, value: ArrayValue) -> None:
        build = self._build
        if name not in self._arrays:
            self._arrays[name] = value.dtype, build.slot("ptr"), tuple(build.slot("i64") for _ in value.shape)
        _, data, lengths = self._arrays[name]
        build.do(f"store ptr {value.data}, ptr {data}")
        for length, slot in zip(value.shape, lengths, strict=True):
            build.do(f"store i64 {length}, ptr {slot}")
