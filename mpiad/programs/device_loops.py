"""The loops of a program for device arrays: kernels in CUDA C++, in which a thread computes one entry.

The statements of a loop's body are those of the loop on the host (see `loops`), translated to C++. A kernel reads the
addresses of its buffers from memory on the device, `words`, so that neither its arguments nor a graph of launches change
when arrays are at other addresses.

A reduction has several kernels. In the first one, each thread combines the entries of a chunk; each further kernel combines
results of the one before, until one is left for each entry of the result. So the order of the operations is fixed for a
shape, and no kernel needs a barrier or atomic operations.

In large loops over few arrays in single precision, a thread computes two entries, half a row apart: with one, too few bytes
would be on their way from memory at the same time to use its whole bandwidth.

A loop after an exchange of halos has two kernels: one for its interior, which runs while messages are in flight, and one
for the other entries (see `overlap`).

If a kernel needs more registers than a thread can have, the statements of the loop are divided among two or more kernels
for all entries, one after the other. Values that a later kernel reads are stored in scratch memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.compiling.arguments import address_of
from mpiad.compiling.c_translation import PRELUDE, c_lines
from mpiad.compiling.program import OPERATIONS
from mpiad.compiling.source import indented, number, operands_of, targets_of, with_few_live
from mpiad.compiling.strided_updates import StridedUpdate
from mpiad.programs.array_program import parts_of
from mpiad.programs.fusion import Box, Schedule, root_of
from mpiad.programs.loops import FIRST, Known, LoopBody, LoopText, cut
from mpiad.programs.memory_plan import Allocation
from mpiad.transport.devices.device_arrays import DeviceKernel, Launcher

_log = logging.getLogger("mpiad")

# Products and sums are rounded one by one, as on the host.
OPTIONS = ("--std=c++14", "--fmad=false")
THREADS = 256  # per block
# Functions for indices that are moved into the bounds of an array; a limit of the number of registers: that at which so
# many blocks run at the same time on a multiprocessor; and the entry of a thread. There is a thread for each entry, since
# the compiler would unroll a loop over entries, which takes more registers.
_DEFINITIONS = f"""
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define BOUNDED(blocks) __launch_bounds__({THREADS}, blocks)
#define ONE(i, n) const long long i = blockIdx.x * {THREADS}LL + threadIdx.x; if (i < n)
#else
#define BOUNDED(blocks)
#define ONE(i, n) EACH(i, n)
#endif
INLINE long long larger(long long a, long long b) {{ return a > b ? a : b; }}
INLINE long long smaller(long long a, long long b) {{ return a < b ? a : b; }}
"""
_ELEMENTS = {
    "?": "bool", "b": "signed char", "h": "short", "i": "int", "l": "long long", "q": "long long", "B": "unsigned char",
    "H": "unsigned short", "I": "unsigned int", "L": "unsigned long long", "Q": "unsigned long long", "f": "float",
    "d": "double", "F": "float", "D": "double",
}  # fmt: skip
# Of a reduction: the number of partial results of the first kernel, the number of them that a thread combines in later
# ones, and the number of entries up to which one thread combines all.
_PARTIAL, _COMBINED, _FEW = 1 << 16, 64, 64
_MOST_INT = 2**31
# A thread computes two entries in loops with at least so many entries, in rows of at least this length, and at most so many
# loads of an entry. With half of the threads, a device is still full, and neighboring threads read neighboring entries.
_MANY, _LONG, _LOADS = 1 << 20, 64, 12
_USUAL = 64  # registers of a thread with which enough threads run at the same time
_ALL = 254  # registers of a thread of which a kernel that spills takes at least so many, of 255


class LoopKernel(NamedTuple):
    """A kernel of a loop; `body`: its statements, `traced`: in the order of the trace; `threads`: their number."""

    body: str
    threads: int
    traced: str

    @classmethod
    def of(cls, head: Sequence[str], threads: int, lines: Sequence[str]) -> LoopKernel:
        """Return a kernel with declarations, and the statements of a thread, whose number is `thread`."""
        each = [f"    ONE(thread, {threads}) {{", *indented([*lines], 2), "    }", "#undef real"]
        body = "\n".join([*head, *each])
        return cls(body, threads, body)


def text_of(body: str, name: str, blocks: int = 4) -> str:
    """Return the function of a kernel; `blocks`: how many blocks at a time its registers must allow, 0: any number."""
    return f"KERNEL {f'BOUNDED({blocks}) ' * bool(blocks)}{name}(const long long* words) {{\n{body}\n}}\n"


def compiled(kernels: Sequence[LoopKernel], launcher: Launcher) -> list[DeviceKernel]:
    """Compile the kernels of a program in one module, alike ones once; those that would spill registers once more."""
    left = {kernel.body: kernel for kernel in kernels}

    def module(blocks: int, is_traced: bool = False) -> dict[str, DeviceKernel]:
        names = {body: f"loop{k}" for k, body in enumerate(left)}
        texts = [text_of(left[body].traced if is_traced else body, name, blocks) for body, name in names.items()]
        text = "\n".join([PRELUDE + _DEFINITIONS, *texts])
        return {body: launcher.compiled(text, name, OPTIONS) for body, name in names.items()}

    made = module(4)
    left = {body: kernel for body, kernel in left.items() if made[body].local_bytes}
    least = module(0) if left else {}
    # Where more registers don't help, the memory is that of functions such as the complex exponential.
    left = {body: kernel for body, kernel in left.items() if least[body].local_bytes < made[body].local_bytes}
    for blocks, is_traced in ((4, True), (2, False)):
        for body, kernel in (module(blocks, is_traced) if left else {}).items():
            if kernel.local_bytes <= least[body].local_bytes:
                made[body] = kernel
                del left[body]
    made |= {body: least[body] for body in left}
    for body, kernel in least.items():
        if kernel.local_bytes:
            _log.debug("jit: a kernel needs %s bytes of local memory per thread:\n%s", kernel.local_bytes, body)
    return [made[kernel.body] for kernel in kernels]


class Chunks(NamedTuple):
    """How a reduction is divided: the axes of the result in the loop, the entries of the result, and the chunks of each."""

    kept: list[int]
    results: int
    counts: list[int]  # by kernel


class DeviceLoop(LoopText):
    """The loop at step `at` of a schedule, as kernels for a device."""

    def __init__(self, schedule: Schedule, at: int):
        self._renamed: dict[str, int] = {}  # the buffers of arrays that overwrite other ones, by name
        self.interior: Box | None = None  # the entries of a kernel that runs before the others
        self.parts = 1  # the number of kernels among which the statements of an entry are divided
        self._stored = 0  # the number of values of an entry that they store for each other
        super().__init__(schedule, at, True)

    def _write(self, inside: Box, rows: Array | None, edges: Array | None) -> None:
        self.boxes, self.lanes = (), 0
        shape, sums = self.loop.shape, [f"s{k}" for k in range(len(self.folds))]
        is_empty = not math.prod(shape) or any(hi <= lo for lo, hi in inside)
        around: Known = [None] * len(shape)
        boxes: list[Known] = [*[inside] * (not is_empty), *[around] * (rows is not None or edges is not None)]
        bodies = [LoopBody(self, box) for box in boxes]
        texts = [body.text() for body in bodies]
        # For each box, the statements, in the kernel language and in C++, and the body that they are from.
        self._bodies = [(lines, c_lines(lines, sums), body) for lines, body in zip(texts, bodies)]
        self._inside = inside
        # For each box, the statements for the second entry of a thread, whose last index is `next`.
        self._seconds, loads = list[list[str]](), max([len(body.loads) for body in bodies], default=0)
        arrays = [self.schedule.buffers[b] for b in self.buffers]
        widths = [found.dtype.itemsize for found in arrays if math.prod(found.shape) > 1]
        is_light = shape and not self.folds and loads <= _LOADS and max(widths, default=8) <= 4
        if is_light and math.prod(shape) >= _MANY and shape[-1] >= _LONG:
            names = {f"i{len(shape) - 1}": "next"}
            self._seconds = [c_lines(lines, (), names | {x: f"{x}_" for x in targets_of(lines)}) for lines in texts]
        targets = [self.entry(*fold.place, part) for fold, part in self.folds]
        self._targets = c_lines([f"{target} = {x}" for target, x in zip(targets, sums)])

    def revise(self, kernels: Sequence[DeviceKernel]) -> int | None:
        """Change the kernels if they take too many registers; return the spilled bytes, None if nothing changes."""
        if self._seconds and max(kernel.registers for kernel in kernels) > _USUAL:
            self._seconds = []
            return 0
        spilled = max([one.local_bytes for one in kernels if one.registers >= _ALL], default=0)
        if not spilled or 2 * self.parts > max(len(lines) for lines, *_ in self._bodies):
            return None
        self.parts, self.interior = 2 * self.parts, None
        return spilled

    def _entries(self, is_traced: bool, has_second: bool = False) -> list[list[str]]:
        """Return the statements of each kernel for an entry with known indices: as traced, or with few live variables.

        `has_second`: with those for a second entry; each follows the same one for the first.
        """
        combined = c_lines(self._combined(), [f"s{k}" for k in range(len(self.folds))])
        bodies = list[list[list[str]]]()
        for k, (lines, texts, body) in enumerate(self._bodies):
            pairs = [*zip(texts, *self._seconds[k : k + 1] * has_second)]
            *before, last = self._divided(lines, pairs, body, is_traced)
            bodies.append([*before, [*last, *combined]])
        if len(bodies) < 2:
            return bodies[0] if bodies else [[]]
        shape, parts = self.loop.shape, [[*map(indented, part)] for part in zip(*bodies)]
        tests = [f"i{k} >= {lo}" for k, (lo, _) in enumerate(self._inside) if lo]
        lasts = [*[f"i{k}" for k in range(len(shape) - 1)], "next" if has_second else f"i{len(shape) - 1}"]
        tests += [f"{i} < {hi}" for i, (_, hi), n in zip(lasts, self._inside, shape) if hi < n]
        return [[f"if ({' && '.join(tests)}) {{", *inside, "} else {", *outside, "}"] for inside, outside in parts]

    def _divided(
        self, lines: Sequence[str], texts: Sequence[tuple[str, ...]], body: LoopBody, is_traced: bool
    ) -> list[list[str]]:
        """Return the statements of a body for each kernel; `texts`: those of each line."""
        if self.parts == 1 and is_traced:
            return [[text for each in texts for text in each]]
        buffers = self.schedule.buffers
        roots = {root_of(buffers, b) for b in self.written}
        written = [f"{name}[" for b, name in self.buffers.items() if root_of(buffers, b) in roots]
        # What is overwritten is read before.
        first = {x for x, _, text in (line.partition(" = ") for line in lines) if any(a in text for a in written)}
        order = with_few_live(lines, first)
        if self.parts == 1:
            return [[text for k in order for text in texts[k]]]
        reads, targets, booleans = operands_of(lines), targets_of(lines), body.booleans
        # The last kernel reads the values that are combined. Other loads than those of what is overwritten are repeated.
        last = {k: len(order) for k in order if targets[k][0] == "f"}
        last = {i: at for at, k in enumerate(order) for i in reads[k]} | last
        repeated = {k for k in order if not reads[k] and targets[k] not in first}
        live = np.zeros(len(order) + 1, int)
        for at, k in enumerate(order):
            if k not in repeated:
                live[at + 1 : last.get(k, at) + 1] += 1
        ends, width = [0], len(order) // (4 * self.parts)
        for part in range(1, self.parts):
            middle = len(order) * part // self.parts
            ends.append(min(range(middle - width, middle + width + 1), key=lambda at: (live[at], abs(at - middle))))
        ends.append(len(order))
        made, places, indices = list[list[str]](), dict[int, int](), [f"i{k}" for k in range(len(self.loop.shape))]
        for start, end in pairwise(ends):
            own = order[start:end]
            needed = {i for k in own for i in reads[k]} | {k for k in last if last[k] == end == len(order)}
            statements = []
            for k in sorted(needed - {*own}):
                if k in repeated:
                    statements += texts[k]
                else:
                    place = f"between({', '.join([str(places[k]), *indices])})"
                    statements.append(f"auto {targets[k]} = {place}{' != 0' * (targets[k] in booleans)};")
            for k in sorted(own) if is_traced else own:
                statements += texts[k]
                if k not in repeated and last.get(k, 0) >= end and end < len(order):
                    places[k] = len(places)
                    statements.append(f"between({', '.join([str(places[k]), *indices])}) = {targets[k]};")
            made.append(statements)
        self._stored = max(self._stored, len(places))
        return made

    def _combined(self) -> list[str]:
        """Return the lines that combine the values f0, f1, ... with the results s0, s1, ..."""
        names = [OPERATIONS[fold.reduction].text for fold, _ in self.folds]
        return [f"s{k} = {text.format(f's{k}', f'f{k}')}" for k, text in enumerate(names)]

    def overwrite(self, c: int, b: int) -> None:
        """Store array b in buffer c, whose entries the loop reads at the indices at which it writes b."""
        self._renamed[self.buffers.pop(b)] = c
        self.written = self.written - {b} | {c}

    @property
    def text(self) -> str:
        """The kernels, as they are without padded rows."""
        return "\n".join(text_of(kernel.body, f"loop{k}") for k, kernel in enumerate(self.kernels({})))

    @property
    def partial(self) -> int:
        """The number of partial results for which the kernels need memory."""
        chunks = self._chunks()
        return len(self.folds) * chunks.results * sum(chunks.counts[:-1])

    @property
    def between(self) -> int:
        """The bytes of scratch memory for the values that kernels of an entry store for each other."""
        return self._stored * math.prod(self.loop.shape) * np.dtype(self.real).itemsize

    def kernels(self, allocations: Mapping[int, Allocation]) -> list[LoopKernel]:
        """Return the kernels; `allocations`: the places of the temporary buffers."""
        if not math.prod(self.loop.shape):
            return []
        entries = [self._entries(is_traced) for is_traced in (False, True)]
        head = self._declarations(allocations)
        made, traced = (self._kernels(head, *each) for each in entries)
        if self._seconds and self.parts == 1:
            box = [(0, n) for n in self.loop.shape] if self.interior is None else self.interior
            made[0], traced[0] = (self._of_two(head, box, *self._entries(each, True)) for each in (False, True))
        return [kernel._replace(traced=other.body) for kernel, other in zip(made, traced)]

    def _kernels(self, head: list[str], *parts: list[str]) -> list[LoopKernel]:
        """Return the kernels, given the declarations, and the statements of each for an entry."""
        *before, entry = parts
        if before:
            whole = [self._of_entries(head, each) for each in before]
            return [*whole, *self._kernels(head, entry)]
        shape = self.loop.shape
        if self.interior is not None:
            inside, outside = list[Box](), list[Box]()
            cut([(0, n) for n in shape], self.interior, inside, outside)
            return [self._kernel_of(head, boxes, entry) for boxes in (inside, outside) if boxes]
        if not self.folds:
            return [self._of_entries(head, entry)]
        chunks = self._chunks()
        made, place = [LoopKernel.of(head, chunks.results * chunks.counts[0], self._first(chunks, entry))], 0
        for before, after in zip(chunks.counts, chunks.counts[1:]):
            lines = self._next(chunks, before, after, place)
            made.append(LoopKernel.of(head, chunks.results * after, lines))
            place += len(self.folds) * chunks.results * before
        return made

    def _of_entries(self, head: list[str], entry: list[str]) -> LoopKernel:
        """Return the kernel of all entries."""
        shape = self.loop.shape
        return LoopKernel.of(head, math.prod(shape), [*_decomposed("thread", dict(enumerate(shape))), *entry])

    def _of_two(self, head: list[str], box: Box, entry: list[str]) -> LoopKernel:
        """Return the kernel of the entries in a box, in which a thread computes two entries of a row.

        If the length of a row is odd, the threads in its middle compute one entry twice.
        """
        lengths, last = {k: last - first for k, (first, last) in enumerate(box)}, len(box) - 1
        half = -(-lengths[last] // 2)
        kind, texts = _kind_of(lengths), _indices("thread", lengths | {last: half})
        lines = [f"const {kind} i{k} = {box[k][0]} + {text};" for k, text in texts.items()]
        lines.append(f"const {kind} next = i{last} + (i{last} < {box[last][1] - half} ? {half} : 0);")
        return LoopKernel.of(head, math.prod(lengths.values()) // lengths[last] * half, [*lines, *entry])

    def _kernel_of(self, head: list[str], boxes: Sequence[Box], entry: list[str]) -> LoopKernel:
        """Return the kernel of the entries in some boxes."""
        axes = dict(enumerate(self.loop.shape))
        lines, entries = [f"{_kind_of(axes)} {', '.join([f'i{k}' for k in axes])};"], 0
        for box in boxes:
            indices = _indices(f"(thread - {entries})", {k: last - first for k, (first, last) in enumerate(box)})
            entries += math.prod([last - first for first, last in box])
            found = [f"i{k} = {box[k][0]} + {text};" for k, text in indices.items()]
            lines += [f"{'' if box is boxes[0] else 'else '}if (thread < {entries}) {{", *indented(found), "}"]
        return LoopKernel.of(head, entries, [*lines, *entry])

    def _chunks(self) -> Chunks:
        shape, sources = self.loop.shape, {axis.source for fold, _ in self.folds for axis in fold.place.map}
        kept = [k for k in range(len(shape)) if k in sources]
        results = math.prod([shape[k] for k in kept])
        combined, counts = math.prod(shape) // max(results, 1), [1]
        if combined > _FEW and results < _PARTIAL:
            counts = [max(min(-(-combined // 8), _PARTIAL // results), 1)]
            while counts[-1] > 1:
                counts.append(-(-counts[-1] // _COMBINED))
        return Chunks(kept, results, counts)

    def _first(self, chunks: Chunks, entry: list[str]) -> list[str]:
        """Return the statements of a thread that combines the entries of a chunk."""
        shape, (kept, results, (count, *_)) = self.loop.shape, chunks
        others = {k: n for k, n in enumerate(shape) if k not in kept}
        # Neighboring threads read neighboring entries.
        by_chunks = bool(shape) and len(shape) - 1 in others
        places = f"result = thread {f'/ {count}' if by_chunks else f'% {results}'}"
        places += f", chunk = thread {f'% {count}' if by_chunks else f'/ {results}'}"
        entries = f"for (long long q = chunk; q < {math.prod(others.values())}; q += {count}) {{"
        lines = [*_decomposed("q", others), *entry]
        return [*self._begun(places, chunks), entries, *indented(lines), "}", *self._ended(chunks, count, 0)]

    def _next(self, chunks: Chunks, before: int, after: int, start: int) -> list[str]:
        """Return the statements of a thread that combines `before` partial results, from place `start`, into `after`."""
        results, folds = chunks.results, range(len(self.folds))
        lines = self._begun(f"result = thread % {results}, chunk = thread / {results}", chunks)
        lines.append(f"for (long long q = chunk; q < {before}; q += {after}) {{")
        lines += [f"    const double f{k} = w[{start + k * results * before} + q * {results} + result];" for k in folds]
        lines += [*indented(c_lines(self._combined(), [f"s{k}" for k in folds])), "}"]
        return lines + self._ended(chunks, after, start + len(folds) * results * before)

    def _begun(self, places: str, chunks: Chunks) -> list[str]:
        """Return the declarations of a thread that combines entries of a result."""
        lines = [f"const long long {places};", *_decomposed("result", {k: self.loop.shape[k] for k in chunks.kept})]
        firsts = [f"s{k} = {number(FIRST[fold.reduction])}" for k, (fold, _) in enumerate(self.folds)]
        return lines + [f"double {line}" for line in c_lines(firsts, [f"s{k}" for k in range(len(firsts))])]

    def _ended(self, chunks: Chunks, count: int, place: int) -> list[str]:
        """Return the statements that store what a thread has combined: the result if it is the only chunk."""
        if count == 1:
            return self._targets
        places = [f"{place + k * chunks.results * count} + chunk * {chunks.results}" for k in range(len(self.folds))]
        return [f"w[{place} + result] = s{k};" for k, place in enumerate(places)]

    def _declarations(self, allocations: Mapping[int, Allocation]) -> list[str]:
        """Return the lines that declare the arrays of a kernel."""
        buffers, places = self.schedule.buffers, {b: k for k, b in enumerate(self.buffers)}
        lines = [f"#define real {_ELEMENTS[np.dtype(self.real).char]}"]
        for name, b in (*((name, b) for b, name in self.buffers.items()), *self._renamed.items()):
            found, root = buffers[b], root_of(buffers, b)
            kind, shape = _ELEMENTS[found.dtype.char], found.shape
            lines.append(f"    {kind}* {name} = ({kind}*)words[{places[b]}];")
            if len(shape) > 1:
                is_padded = root in allocations and buffers[root].shape == shape
                pitch = (allocations[root].pitch if is_padded else shape[-1]) * parts_of(found.dtype)
                lines += [f"#undef {name}", _macro(name, shape, pitch)]
        lines += [f"    double* w = (double*)words[{len(places)}];"] * bool(self.folds)
        if self._stored:
            shape = self._stored, *self.loop.shape
            lines.append(f"    real* between = (real*)words[{len(places) + bool(self.folds)}];")
            lines += ["#undef between", _macro("between", shape, shape[-1])]
        return lines


def _decomposed(flat: str, lengths: Mapping[int, int]) -> list[str]:
    """Return the declarations of indices along axes of these lengths, from the number of an entry."""
    return [f"const {_kind_of(lengths)} i{k} = {text};" for k, text in _indices(flat, lengths).items()]


def _indices(flat: str, lengths: Mapping[int, int]) -> dict[int, str]:
    """Return the expressions of the indices along axes of these lengths, from the number of an entry."""
    kind, texts, inner, axes = _kind_of(lengths), dict[int, str](), 1, list(lengths)
    for k in reversed(axes):
        text = f"({kind}){flat}" if inner == 1 else f"({kind}){flat} / {inner}"
        texts[k] = f"{text}{'' if k == axes[0] else f' % {lengths[k]}'}"
        inner *= lengths[k]
    return texts


def _kind_of(lengths: Mapping[int, int]) -> str:
    return "int" if math.prod(lengths.values()) < _MOST_INT else "long long"


def _macro(name: str, shape: Shape, pitch: int) -> str:
    """Return the macro of the entries of an array whose rows are `pitch` numbers apart."""
    *rows, last = [f"i{k}" for k in range(len(shape))]
    wide = "(long long)" if math.prod(shape[:-1]) * pitch >= _MOST_INT else ""
    terms = [f"{wide}({i}) * {math.prod(shape[k + 1 : -1]) * pitch}" for k, i in enumerate(rows)]
    return f"#define {name}({', '.join([*rows, last])}) {name}[{' + '.join([*terms, f'({last})'])}]"


def kernels_of_updates(steps: Sequence[StridedUpdate], memory: Array) -> list[LoopKernel]:
    """Return kernels that do what updates of parts of an array do, given the memory of an array like it on the host."""
    made = []
    for update in steps:
        out, x, numbers, factors = update.arrays
        real, (lengths, *strides) = out.real.dtype, numbers.reshape(3, -1).tolist()
        firsts = [(address_of(each) - address_of(memory)) // real.itemsize for each in (out, x)]
        target, source = [
            " + ".join([str(first), *(f"i{k} * {n}LL" for k, n in enumerate(by) if n)])
            for first, by in zip(firsts, strides)
        ]
        kind, (factor, value) = _ELEMENTS[real.char], [number(float(each), real == np.float32) for each in factors]
        # Values from outside of the array are one number.
        is_part = 0 <= firsts[1] < memory.nbytes // real.itemsize
        read = "x" if is_part else number(float(x.real.flat[0]), real == np.float32)
        lines = [*_decomposed("thread", dict(enumerate(lengths))), *[f"const {kind} x = a[{source}];"] * is_part]
        lines += c_lines([f"y = {factor} * {read}" + f" + {value}" * (not update.adds)])
        lines.append(f"a[{target}] {'+' * update.adds}= y;")
        head = [f"#define real {kind}", f"    {kind}* a = ({kind}*)words[0];"]
        made.append(LoopKernel.of(head, math.prod(lengths), lines))
    return made
