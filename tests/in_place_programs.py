"""Random programs with in-place operators, views and `out=`: traced, they mean what NumPy means, or are refused.

    python tests/in_place_programs.py --programs 3000 --seed 1

A program is drawn line by line, and each line is run by NumPy at once. Its handles are the arrays that names refer to; a
change of one makes others that share its memory stale. So it is known whether a program uses a stale handle, or writes into
an array that it is given. The loss and its derivative along a direction are NumPy's, the latter by central differences.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np

import mpiad

LENGTH = 6
X, DIRECTION = np.random.default_rng(7).uniform(-0.9, 0.9, (2, LENGTH))
SINGLE_TYPE = np.float32
REFUSED = ("memory was changed in place", "when it gets an array to write into")

HEADER = """
def relax(f, g):
    f += 0.5 * (g - f)

def scaled(f):
    f *= 0.75
    return f

def program(x):
"""


def forms(text: str) -> list[str]:
    """Return the forms of lines in a text."""
    return text.strip().replace("\n", "|").split("|")


FRESH = forms("""
np.sin({a}) * 0.5 + {b}|{a} * {b} + 0.3|np.exp(-{a} * {a})|np.sum({a}) * {b} * 0.2
np.where({a} > {b}, {a}, 0.5 * {b})|np.maximum({a}, {b}) - 0.1|{a} / (1.5 + {b} * {b})|-{a}|{a} + 0.0
np.cumsum({a}, 0) * 0.3|np.stack([{a}, {b}])[1]|np.concatenate([{a}, {b}])[:{n}] * 0.9|{a} - np.mean({b})
np.tanh({a}) ** 2|2.0 - {a}|np.array({a})
""")
VIEWS = forms("""
{a}[1:]|{a}[::2]|{a}[::-1]|{a}[:2]|np.ravel({a})|{a}.T|np.reshape({a}, (-1,))|{a}.reshape((2, -1))
np.real({a})|np.transpose({a})|np.atleast_1d({a})|np.expand_dims({a}, 0)|np.squeeze({a})|np.split({a}, 2)[1]
{a}[0]|{a}[...]|np.atleast_2d({a})|np.swapaxes({a}, 0, -1)|np.moveaxis({a}, 0, -1)|np.flip({a}, 0)|{a}[None]
{a}[-1:]|np.rot90(np.atleast_2d({a}))
""")
CHANGES = forms("""
{a} += 0.5 * {b}|{a} -= np.sin({b})|{a} *= 0.9|{a} *= {b}|{a} /= 1.5 + {b} * {b}|{a} //= 0.7|{a} %= 1.3
{a} **= 2|{a} += 1.0|{a} -= {b}|{a} /= 3|{a} += {a}|relax({a}, {b})|{a} @= np.eye({n}) * 0.5 + 0.1
{a} -= np.mean({b})|{a} **= 3|{a} = scaled({a})
""")
SCALARS = "s += np.sum({a})|s *= 0.5|s -= np.max({a}) * s|s /= 2.0 + np.sum({a} * {a})|s = np.mean({a}); s += 1.0".split(
    "|"
)
SINGLE = "{c} = {a}.astype(np.float32)|{c} = np.float32(0.5) * {a}.astype(np.float32); {c} += {a}".split("|")
WRITES = forms("""
np.add({a}, 1.0, out=k)|np.multiply({a}, {a}, k)|np.sum({a}[None], 0, out=k)|np.sum({a}[None], 0, None, k)
{a}.clip(-0.5, 0.5, out=k)|np.cumsum({a}, 0, None, k)|np.floor({a}, out=k)|np.round({a}, 1, k)
np.copyto(k, {a})
""")


class Program(NamedTuple):
    """A drawn program; `stale`: whether it uses a stale array; `writes`: has `out=`; `error`: NumPy's, if it raises."""

    text: str
    stale: bool
    views: bool
    writes: bool
    single: bool
    error: type[Exception] | None

    def on(self, np: Any, single: Any = SINGLE_TYPE) -> Callable[[Any], Any]:
        """Return the function of x with this NumPy, whose `float32` may be another type."""
        names = {"np": np if single is SINGLE_TYPE else _Double(np)}
        exec(self.text, names)
        return names["program"]  # type: ignore[return-value]


class _Double:
    """NumPy, whose single precision is double: differences need the digits."""

    def __init__(self, np: Any):
        self._np, self.float32 = np, np.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._np, name)


class Drawing:
    """A program while it is drawn."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.names: dict[str, Any] = {"np": np}
        exec(HEADER + "    pass", self.names)
        self.names |= {"x": X.copy(), "s": np.float64(0.25)}
        self.lines = ["s = np.sum(x) * 0.1 + 0.25"]
        exec(self.lines[0], self.names)
        # Handles by name; aliases have the same one.
        self.handles = {"x": 0}
        self.arrays: dict[int, Any] = {0: self.names["x"]}
        self.outdated: set[int] = set()
        self.stale = self.views = self.writes = self.single = False
        self.error: type[Exception] | None = None

    def choice(self, things: Any) -> Any:
        """Return one of some things."""
        return things[self.rng.integers(len(things))]

    def name(self) -> str:
        """Return the name of an array, rarely of a stale one."""
        fresh = [name for name, handle in self.handles.items() if handle not in self.outdated]
        return self.choice(list(self.handles) if not fresh or self.rng.random() < 0.03 else fresh)

    def similar(self, a: str) -> str:
        """Return the name of an array that can be combined with another one in place."""
        shape = np.shape(self.names[a])
        found = [
            name for name in self.handles if np.shape(self.names[name]) == shape and self.handles[name] not in self.outdated
        ]
        return self.choice(found or [a])

    def line(self) -> None:
        """Draw one line."""
        a = self.name()
        b = self.similar(a) if self.rng.random() < 0.98 else self.name()
        kind = self.rng.choice(8, p=[0.22, 0.2, 0.36, 0.08, 0.03, 0.05, 0.03, 0.03])
        target = f"v{len(self.lines)}" if self.rng.random() < 0.8 else self.choice(list(self.handles))
        n = len(self.names[a]) if np.ndim(self.names[a]) else 1
        if np.ndim(self.names[a]) == 0:
            kind = min(kind, 2)
        last = np.shape(self.names[a])[-1:] or (1,)
        forms = {"a": a, "b": b, "c": target, "n": last[0] if kind == 2 else n}
        used = [a, b]
        if kind == 0:
            text = f"{target} = " + self.choice(FRESH).format(**forms)
        elif kind == 1:
            text, used = f"{target} = " + self.choice(VIEWS).format(**forms), [a]
        elif kind == 2:
            text = self.choice(CHANGES).format(**forms)
        elif kind == 3:
            text, used = self.choice(SCALARS).format(**forms), [a]
        elif kind == 4:
            text, used = self.choice(SINGLE).format(**forms), [a]
        elif kind == 5:
            text, used = f"{target} = {a}", []
        elif kind == 6:
            text = f"for _ in range(3): {a} += 0.1 * {b}"
        else:
            if self.rng.random() < 0.7:
                return
            text, used = f"k = np.zeros({np.shape(self.names[a])}); {self.choice(WRITES).format(**forms)}", [a]
        used = [name for name in dict.fromkeys(used) if name in text]
        if any(self.handles[name] in self.outdated for name in used) and self.rng.random() < 0.5:
            return
        self.run(text, kind, a, target, used)

    def run(self, text: str, kind: int, a: str, target: str, used: list[str]) -> None:
        """Run a line by NumPy, and keep it unless numbers grow or it raises."""
        before = {handle: array.copy() for handle, array in self.arrays.items()}
        names = dict(self.names)
        try:
            with np.errstate(all="ignore"):
                exec(text, self.names)
        except Exception as error:
            if self.rng.random() < 0.9:
                self.names = names
                return
            self.error = type(error)
        parts = [*self.arrays.values(), *[x for x in self.names.values() if isinstance(x, (np.ndarray, np.floating))]]
        if any(not np.all(np.isfinite(x)) or np.max(np.abs(x), initial=0) > 50 or np.size(x) > 40 for x in parts):
            for handle, array in before.items():
                self.arrays[handle][...] = array
            self.names, self.error = names, None
            return
        self.lines.append(text)
        self.stale |= any(self.handles[name] in self.outdated for name in used)
        if (
            kind == 6 and self.handles[used[-1]] != self.handles[a]
        ):  # the second pass of the loop reads a view of what it changed
            self.stale |= np.shares_memory(self.names[used[-1]], self.names[a])
        self.single |= kind == 4
        self.views |= kind == 1
        self.writes |= text.startswith("k =")
        if kind in (2, 6) and isinstance(self.names[a], np.ndarray):
            changed = self.handles[a]
            for handle, array in self.arrays.items():
                if handle != changed and np.shares_memory(array, self.arrays[changed]):
                    self.outdated.add(handle)
        elif kind in (2, 6):  # a scalar is bound again
            self.handles.pop(a)
        if kind in (0, 1, 4, 5):
            made = self.names.get(target)
            self.handles.pop(target, None)
            if kind == 5:
                self.handles[target] = self.handles[a] if a != target else self.handles.get(a, 0)
            elif isinstance(made, np.ndarray) and made.size:
                handle = max(self.arrays) + 1
                self.handles[target], self.arrays[handle] = handle, made

    def program(self) -> Program:
        """Return a program."""
        while len(self.lines) < 12 and self.error is None and self.handles:
            self.line()
        # An alias that lost its array has no handle.
        chosen = [name for name, handle in self.handles.items() if handle not in self.outdated]
        if self.rng.random() < 0.03:
            chosen = list(self.handles)
            self.stale |= any(handle in self.outdated for handle in self.handles.values())
        terms = " + ".join(f"np.sum(np.sin({name} * {1 + k / 8}))" for k, name in enumerate(chosen))
        result = f"return s + {terms}" if terms else "return s"
        text = HEADER + "".join(f"    {line}\n" for line in [*self.lines, result])
        return Program(text, self.stale, self.views, self.writes, self.single, self.error)


def differences(program: Program, compiled: bool, second: bool) -> list[str] | None:
    """Return how a program's results differ from NumPy's; None if it was refused, as it may be."""
    try:
        return _differences(program, compiled, second)
    except Exception as error:
        if program.error is not None and isinstance(error, program.error):
            return []
        text = str(error)
        # After a change, memory is contiguous, and NumPy may return views instead of copies: also refused.
        if REFUSED[0] in text and (program.stale or program.views) or REFUSED[1] in text and program.writes:
            return None
        return [f"{type(error).__name__}: {error}"]


def _differences(program: Program, compiled: bool, second: bool) -> list[str]:
    fun, found = program.on(anp), list[str]()
    x = X.copy()

    def compare(what: str, value: Any, expected: Any, rtol: float) -> None:
        if not np.allclose(value, expected, rtol, rtol, equal_nan=True):
            found.append(f"{what}: {value} instead of {expected}")

    if program.error is not None:
        mpiad.value_and_grad(fun)(x)
        return [f"no error, but NumPy raises {program.error.__name__}"]
    expected = program.on(np)(X.copy())
    double = program.on(np, np.float64)
    slopes = [(double(X + h * DIRECTION) - double(X - h * DIRECTION)) / (2 * h) for h in (1e-6, 3e-6)]
    single = program.single
    exact, loose = (1e-5, 5e-3) if single else (1e-12, 2e-6)
    # In single precision, `x > y` may choose another branch for y = float32(x).
    is_same = np.isclose(double(X.copy()), expected, 1e-4, 1e-4, equal_nan=True)
    is_smooth = is_same and abs(slopes[0] - slopes[1]) < 1e-5 * (1 + abs(slopes[0]))
    slope = slopes[0] if is_smooth else None
    J, g = mpiad.value_and_grad(fun)(x)
    compare("J", J, expected, exact)
    if not np.array_equal(x, X):
        found.append("x was changed")
    slope = g @ DIRECTION if slope is None else slope
    compare("gradient", g @ DIRECTION, slope, loose)
    for what, (value, tangent) in {"jvp": mpiad.jvp(fun, x, DIRECTION), "linearize": _linear(fun, x)}.items():
        compare(f"{what}, value", value, expected, exact)
        compare(what, tangent, g @ DIRECTION, max(exact, 1e-10))
    if second:
        product = mpiad.hvp(fun)(x, DIRECTION)
        twice = mpiad.grad(lambda x: anp.sum(mpiad.grad(fun)(x) * DIRECTION))(x)
        compare("grad of grad", twice, product, max(loose, 1e-9))
        if is_smooth and not single:
            gradients = [mpiad.grad(fun)(X + h * DIRECTION) for h in (1e-6, -1e-6)]
            compare("hvp", product, (gradients[0] - gradients[1]) / 2e-6, 1e-4)
    if compiled:
        jitted = mpiad.jit(fun)
        for way, call in {
            "jit": jitted,
            "jit again": jitted,
            "jit(fun) traced": lambda x: mpiad.value_and_grad(jitted)(x)[0],
        }.items():
            compare(way, call(X.copy()), expected, max(exact, 1e-9))
        for what, taken in {"of jit": mpiad.grad(mpiad.jit(fun)), "jit of": mpiad.jit(mpiad.grad(fun))}.items():
            compare(f"{what} gradient", taken(X.copy()), g, max(exact, 1e-9))
            compare(f"{what} gradient again", taken(X.copy()), g, max(exact, 1e-9))
    return found


def _linear(fun: Callable, x: Any) -> tuple[Any, Any]:
    linear = mpiad.linearize(fun)(x)
    return linear.value, linear.jvp(DIRECTION)


def check(count: int, seed: int, compiled: int = 5, report: Callable[[str], Any] = lambda text: None) -> Counter:
    """Check `count` programs, one in `compiled` of them jitted; raise an AssertionError for the first that is wrong."""
    counts: Counter = Counter()
    for number in range(count):
        program = Drawing(seed * 1_000_003 + number).program()
        found = differences(program, number % compiled == 0, number % 3 == 0)
        assert not found, f"program {number} of seed {seed}\n{program.text}\n" + "\n".join(found or [])
        kind = (
            "with errors of NumPy"
            if program.error
            else "stale"
            if program.stale
            else "writing"
            if program.writes
            else "plain"
        )
        counts[kind, "refused" if found is None else "equal"] += 1
        if number % 250 == 249:
            report(f"{number + 1} of {count} programs: {dict(counts)}")
    return counts


def main() -> None:
    """Run many programs."""
    logging.getLogger("mpiad").setLevel(logging.ERROR)  # programs that aren't compiled
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiled", type=int, default=5, help="one program in this many is also jitted")
    options = parser.parse_args()
    start = time.monotonic()
    counts = check(options.programs, options.seed, options.compiled, lambda text: print(text, flush=True))
    print(f"{dict(counts)} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    sys.exit(main())
