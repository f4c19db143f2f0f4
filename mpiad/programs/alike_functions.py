"""Functions that are alike: they have the same code, and closures with the same objects, except for numbers.

Users define functions again where they need them: in a loss, ``jit(step)`` makes a new object in each call, and so do a
lambda, ``self.step``, ``partial(f, nu)`` and ``value_and_grad(f)``. `Parts` divides such a function into a key, which is
equal for functions that are alike, and numbers: the floats and arrays in closures, defaults and partial functions. A
`Template` is a compiled function for all functions with one key. The numbers that have differed are its first arguments.

A template has a copy of the first function with variables of its own, since those of the enclosing function may change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from autograd.tracer import Box

from mpiad._typing import Array, Function
from mpiad.compiling.closure import assigns_outside
from mpiad.compiling.watch import MISSING, content_of
from mpiad.pytrees import is_variable
from mpiad.transport.core.tracing import tracing

_boxes = Box.types
_CONSTANTS = frozenset({type(None), bool, int, str, bytes})
_DEPTH = 5  # of functions in closures of functions
# Packages whose functions are recognized by their identity, such as operators with rules; and exceptions in them.
_BY_IDENTITY, _FOLLOWED = frozenset({"autograd", "mpiad"}), ("mpiad.differentiation.", "mpiad.timestepping.")

# Returns an object like the original one, which contains the next numbers; None for the original object.
_Build: TypeAlias = "Callable[[Iterator[Array]], Any] | None"


class _Builder:
    """Builds a function that is alike, with other numbers. As an object, it isn't read by the watch of a function."""

    def __init__(self, fun: Any, build: _Build):
        self._fun, self._build = fun, build

    def __call__(self, numbers: Sequence[Array]) -> Any:
        return self._fun if self._build is None else self._build(iter(numbers))


class Parts:
    """The key and the numbers of a function; `kind`: the class of compiled functions."""

    def __init__(self, fun: Any, kind: Any):
        self.numbers: list[Array] = []
        self.codes: list[CodeType] = []
        self.assigns = False  # whether a function assigns variables of an enclosing function
        # The functions with their present code, defaults and variables; see `is_unchanged`.
        self.snapshot: list[tuple[FunctionType, CodeType, Any, Any, Sequence[tuple[CellType, Any]]]] = []
        self.copied: list[Any] = []  # those of them of which `build` makes copies, or compiled functions have copies
        self.compiled: list[Any] = []  # the compiled functions whose ids are parts of the key
        self._kind = kind
        self.key, build = self._read(fun, _DEPTH)
        self.build = _Builder(fun if build is None else None, build)

    @property
    def traced(self) -> list[int]:
        """The positions of numbers that are traced values of a derivative."""
        return [k for k, value in enumerate(self.numbers) if type(value) in _boxes]

    def _read(self, value: Any, depth: int) -> tuple[Hashable, _Build]:
        kind = type(value)
        if kind in _CONSTANTS or isinstance(value, (np.integer, np.bool_)):
            return (kind, value), None
        if is_variable(value):
            self.numbers.append(value)
            return "number", next
        if kind is tuple:
            return self._several(value, depth)
        if depth and kind is FunctionType and _is_followed(value):
            return self._function(value, depth - 1)
        if depth and kind is MethodType:
            return self._call_of(MethodType, (value.__func__, value.__self__), depth)
        if depth and kind is functools.partial:
            return self._partial(value, depth)
        if depth and kind is self._kind:
            form = None if value.is_read or tracing.recorder is not None else value.form()
            if form is not None and not form.variables:  # those that are alike have one compiled function
                self.compiled.append(form.jitted)
                self.snapshot += value.snapshot
                self.copied += value.snapshot
                return (kind, value.options, id(form.jitted)), None
            make, options = self._kind.shared, value.options
            return self._call_of(lambda fun: make(fun, *options), (value.fun,), depth, (kind, options))
        return id(value), None

    def _several(self, values: Sequence[Any], depth: int) -> tuple[Hashable, _Build]:
        read = [self._read(value, depth) for value in values]
        builds = [build for _, build in read]
        others = [value if build is None else None for value, build in zip(values, builds)]

        def build(numbers: Iterator[Array]) -> tuple[Any, ...]:
            return tuple([other if build is None else build(numbers) for other, build in zip(others, builds)])

        return tuple([key for key, _ in read]), build if any(builds) else None

    def _call_of(self, make: Function, parts: tuple, depth: int, name: Hashable = None) -> tuple[Hashable, _Build]:
        """Return the key and the builder of ``make(*parts)``."""
        key, build = self._several(parts, depth)
        return (name or make, key), build and (lambda numbers: make(*build(numbers)))

    def _partial(self, value: functools.partial, depth: int) -> tuple[Hashable, _Build]:
        names = tuple(value.keywords)

        def make(fun: Function, args: tuple, values: tuple) -> functools.partial:
            return functools.partial(fun, *args, **dict(zip(names, values)))

        parts = value.func, value.args, tuple(value.keywords.values())
        return self._call_of(make, parts, depth, (functools.partial, names))

    def _function(self, fun: FunctionType, depth: int) -> tuple[Hashable, _Build]:
        code, names, cells = fun.__code__, fun.__globals__, fun.__closure__ or ()
        title, attributes, keywords = (fun.__name__, fun.__qualname__), fun.__dict__, tuple(fun.__kwdefaults__ or ())
        contents = tuple(map(content_of, cells))
        self.codes.append(code)
        self.snapshot.append((fun, code, fun.__defaults__, fun.__kwdefaults__, tuple(zip(cells, contents))))
        place = len(self.snapshot) - 1
        self.assigns |= assigns_outside(code)
        parts = contents, fun.__defaults__, tuple((fun.__kwdefaults__ or {}).values())
        key, build = self._several(parts, depth)
        key = code, id(names), keywords, key
        if not cells and build is None:
            return key, None
        self.copied.append(self.snapshot[place])
        fixed = parts if build is None else None

        def build_function(numbers: Iterator[Array]) -> FunctionType:
            contents, defaults, values = fixed or build(numbers)  # type: ignore[misc]
            variables = tuple([CellType() if value is MISSING else CellType(value) for value in contents])
            made = FunctionType(code, names, title[0], defaults, variables)
            made.__kwdefaults__ = dict(zip(keywords, values)) or None
            made.__qualname__, made.__dict__ = title[1], attributes
            return made

        return key, build_function


def _is_followed(fun: FunctionType) -> bool:
    """Return whether a function may be replaced by a copy."""
    module = fun.__globals__.get("__name__", "")
    is_library = module.partition(".")[0] in _BY_IDENTITY and not module.startswith(_FOLLOWED)
    return not is_library and fun.__dict__.keys() <= {"__wrapped__"}


def is_unchanged(snapshot: Sequence[Any]) -> bool:
    """Return whether functions still have the code, defaults and variables of a snapshot; False if one has no value."""
    try:
        for fun, code, defaults, keywords, variables in snapshot:
            if fun.__code__ is not code or fun.__defaults__ is not defaults or fun.__kwdefaults__ is not keywords:
                return False
            for cell, value in variables:
                if cell.cell_contents is not value:
                    return False
    except ValueError:
        return False
    return True


CHANGED: Any = ((is_unchanged, None, None, None, ()),)  # a snapshot that isn't up to date


def token(number: Array) -> Hashable:
    """Return a key that is the same for the same array, and for floats with the same type and bits."""
    return (type(number), repr(number)) if type(number) in (float, complex, np.float64) else id(number)


class Form(NamedTuple):
    """A compiled function, and the numbers that are the first arguments of its calls."""

    jitted: Any
    variables: tuple[Array, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.jitted(*self.variables, *args, **kwargs)


class _Compiled(NamedTuple):
    numbers: tuple  # the first function's, with None for arguments
    arguments: list[int]  # the positions of numbers that are arguments
    fun: Any  # a copy of the first function
    jitted: Any


class Template:
    """A compiled function for functions that are alike.

    ``compiled(fun, arguments)`` compiles a function whose first arguments are the numbers at the positions `arguments`.
    """

    def __init__(self, parts: Parts, compiled: Callable[[Function, Sequence[int]], Any]):
        self.codes, self.build, self._compiled, self._keyed = parts.codes, parts.build, compiled, parts.compiled
        self.is_refused = False  # whether functions like this one aren't compiled
        self.owner: Any = None  # a weak reference to the first of these functions
        self.attempts: Any = None  # those of compiled functions whose numbers are constants
        self.made = self._made(parts.numbers, parts.traced)

    def _made(self, numbers: Sequence[Any], arguments: list[int]) -> _Compiled:
        numbers = tuple([None if k in arguments else x for k, x in enumerate(numbers)])
        build, fun, count = self.build, self.build(numbers), len(arguments)

        @functools.wraps(fun, updated=())
        def called(*args: Any, **kwargs: Any) -> Any:
            values = dict(zip(arguments, args))
            # Without arguments `fun` is called itself; with some, it tells the watch of this function what is read.
            made = build([values.get(k, number) for k, number in enumerate(numbers)]) if count else fun
            return made(*args[count:], **kwargs)

        return _Compiled(numbers, arguments, fun, self._compiled(called if arguments else fun, arguments))

    def form(self, numbers: Sequence[Array]) -> Form:
        """Return the compiled function with the numbers of a function; from now on, those that differ are arguments."""
        made = self.made
        changed = [k for k, x in enumerate(numbers) if k in made.arguments or token(x) != token(made.numbers[k])]
        if changed != made.arguments:
            made = self.made = self._made(made.numbers, changed)
        return Form(made.jitted, tuple([numbers[k] for k in changed]))


class Templates:
    """The templates of the latest functions, by key; few for the same code, since each keeps its objects in memory."""

    MOST, MOST_OF_ONE_CODE = 64, 8

    def __init__(self) -> None:
        self.known: dict[Hashable, Template] = {}

    def get(self, key: Hashable) -> Template | None:
        """Return the template of a key, which becomes the latest one."""
        template = self.known.pop(key, None)
        if template is not None:
            self.known[key] = template
        return template

    def lapsed(self, codes: Sequence[CodeType]) -> int:
        """Return the number of templates with programs for some code, whose first function doesn't exist any more."""
        found = [each for each in self.known.values() if each.codes == codes and each.owner() is None]
        return sum(each.made.jitted.is_compiled for each in found)

    def add(self, key: Hashable, template: Template) -> None:
        """Store a new template, and remove the oldest ones."""
        self.known[key] = template
        same = [key for key, each in list(self.known.items()) if each.codes == template.codes]
        for old in same[: -self.MOST_OF_ONE_CODE] or list(self.known)[: -self.MOST]:
            self.known.pop(old, None)
