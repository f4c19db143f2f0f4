"""Compiled forms of functions that aren't jitted themselves, but call jitted functions: steps of loops, for example.

The compiled form of a function is that of ``jit``, with three differences, since such functions are often lambdas that are
created again for each loop. First, functions have the same form if they have the same code, and the variables of enclosing
functions that they read have the same values. Arrays and floats among these values may differ: from the second value on,
they are arguments of the compiled function. Secondly, a function has no compiled form if its code changes objects that it
reads, or prints: a compiled function would do so only while it is traced. Thirdly, the number of its operations is limited,
since calls of jitted functions become parts of it.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Hashable
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from autograd.tracer import Box

from mpiad._typing import Array, Function
from mpiad.compiling.closure import (
    MISSING,
    HoldsTraced,
    content_of,
    may_communicate,
    survey,
    with_numbers,
    with_values_of_variables,
)
from mpiad.compiling.program import place_of
from mpiad.programs.function import Jitted
from mpiad.pytrees import is_variable
from mpiad.transport.world import level_of_repeats

_log = logging.getLogger("mpiad")
_boxes = Box.types
# The maximum numbers of forms that are kept, and of forms of the same code whose closures have other objects.
_MOST_FORMS, _MOST_OF_ONE_CODE = 64, 8
# The maximum number of operations of a function that isn't jitted: compiling one may take 10 to 40 ms.
_MOST_OPERATIONS = 1000


class Form(NamedTuple):
    """A compiled function, and the first arguments of its calls: () or a dictionary of variables of enclosing functions."""

    jitted: Jitted
    variables: tuple[dict[str, Array], ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.jitted(*self.variables, *args)


class _Template(NamedTuple):
    """A form for functions that are alike; `fun`: the first of them, with copies of the variables that it reads."""

    fun: Function
    numbers: dict[str, Array]  # the first values of the arrays and floats among the variables
    read: list[Any]  # the other objects that `fun` reads; the references keep their ids from being used again
    arguments: list[str]  # the names of the variables that are arguments
    jitted: Jitted
    most_operations: int | None

    def with_arguments(self, names: list[str]) -> _Template:
        """Return the form in which the variables with these names are arguments, too."""
        names = [name for name in self.numbers if name in {*names, *self.arguments}]
        fun = with_numbers(self.fun, dict.fromkeys(names)) if names else self.fun

        def called(variables: dict[str, Array], *args: Any) -> Any:
            return with_numbers(fun, variables)(*args)

        jitted = Jitted(functools.wraps(fun)(called) if names else fun)
        jitted.rename(f"{self.fun.__name__} at {place_of(self.fun)}")
        jitted.limit(self.most_operations)
        return self._replace(numbers={**self.numbers, **dict.fromkeys(names)}, arguments=names, jitted=jitted)


_templates: dict[Hashable, _Template | None] = {}
_counts: Counter[CodeType] = Counter()
_warned: set[CodeType] = set()


def compiled_form(fun: Any, calls_jitted: bool) -> Form | None:
    """Return the compiled form of a function, None if it hasn't one; `calls_jitted`: whether it must call a jitted one."""
    if isinstance(fun, Jitted):
        return Form(fun)
    most: int | None = _MOST_OPERATIONS
    if type(fun) is functools.partial and isinstance(fun.func, Jitted) and len(fun.args) == 1 and not fun.keywords:
        fun, calls_jitted, most = MethodType(fun.func.fun, fun.args[0]), False, None  # a jitted method
    plain = getattr(fun, "__func__", fun)
    if type(plain) is not FunctionType:
        return None
    contents = dict(zip(plain.__code__.co_freevars, map(content_of, plain.__closure__ or ())))
    numbers = {name: value for name, value in contents.items() if is_variable(value)}
    read = [getattr(fun, "__self__", None), plain.__globals__, *_defaults(plain)]
    read += [value for name, value in contents.items() if name not in numbers]
    key = calls_jitted, plain.__code__, *numbers, *map(_identity, read)
    is_known, template = key in _templates, _templates.pop(key, None)
    if not is_known:
        traced = [name for name, value in numbers.items() if type(value) in _boxes]
        # The function of the form has variables of its own, since those of `fun` may change later.
        known = {name: with_values_of_variables(value) for name, value in contents.items() if value is not MISSING}
        copy = fun if isinstance(fun, MethodType) else with_numbers(plain, {**known, **dict.fromkeys(traced)})
        try:
            is_compiled = _is_compiled(copy, plain, calls_jitted)
        except HoldsTraced:
            return None
        if is_compiled:
            template = _Template(copy, numbers, read, [], Jitted(copy), most).with_arguments(traced)
    if template is not None:
        changed = [name for name, value in numbers.items() if _identity(value) != _identity(template.numbers[name])]
        template = template if set(changed) <= set(template.arguments) else template.with_arguments(changed)
    _templates[key] = template
    if len(_templates) > _MOST_FORMS:
        del _templates[next(iter(_templates))]
    if template is None:
        return None
    return Form(template.jitted, ({name: numbers[name] for name in template.arguments},) if template.arguments else ())


def is_local(fun: Function) -> bool:
    """Return whether a function can't communicate."""
    return not may_communicate(fun, Jitted)


def _is_compiled(fun: Function, plain: FunctionType, calls_jitted: bool) -> bool:
    reads, effect = survey(fun, Jitted)
    if calls_jitted and not reads:
        return False
    wrapped = unwrap(plain)  # the user's function, in functions of the library
    user_function = wrapped if isinstance(wrapped, FunctionType) else plain
    code = user_function.__code__
    _counts[code] += 1
    if not effect and _counts[code] > _MOST_OF_ONE_CODE:
        effect = "reads other objects of enclosing functions in each loop"
    if effect and code not in _warned:
        _warned.add(code)
        text = "timestepping.scan: %s at %s isn't compiled, and Python calls it for each step, since it %s."
        _log.log(level_of_repeats(), text, fun.__name__, place_of(user_function), effect)
    return not effect


def _defaults(fun: FunctionType) -> list[Any]:
    return [*(fun.__defaults__ or ()), *(fun.__kwdefaults__ or {}).values()]


def _identity(value: Any, depth: int = 3) -> Hashable:
    """Return a key that is the same for the same object, for equal numbers and texts, and for alike local functions."""
    if type(value) in (type(None), bool, int, float, complex, str, bytes):
        return type(value), value
    if type(value) is FunctionType and depth:
        parts = [*map(content_of, value.__closure__ or ()), *_defaults(value)]
        return value.__code__, id(value.__globals__), *[_identity(part, depth - 1) for part in parts]
    return id(value)
