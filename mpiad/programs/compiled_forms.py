"""Compiled forms of functions that aren't jitted themselves, but call jitted functions: steps of loops, for example.

The compiled form of a function is that of ``jit``, with two differences. First, a function has no compiled form if its code
changes objects that it reads, or prints: a compiled function would do so only while it is traced. Secondly, the number of
its operations is limited, since calls of jitted functions become parts of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any

from mpiad._typing import Function
from mpiad.compiling.closure import HoldsTraced, may_communicate, survey
from mpiad.compiling.program import place_of
from mpiad.programs.alike_functions import Form, Parts, Template, Templates
from mpiad.programs.function import Jitted
from mpiad.programs.program_cache import Attempts
from mpiad.pytrees import is_variable
from mpiad.transport.world import level_of_repeats

_log = logging.getLogger("mpiad")
# The maximum number of operations of a function that isn't jitted: compiling one may take 10 to 40 ms.
_MOST_OPERATIONS = 1000
_templates = Templates()
_counts: Counter[CodeType] = Counter()
_warned: set[CodeType] = set()


def compiled_form(fun: Any, calls_jitted: bool) -> Form | None:
    """Return the compiled form of a function, None if it hasn't one; `calls_jitted`: whether it must call a jitted one."""
    if type(fun) is partial and isinstance(fun.func, Jitted):
        plain, args = fun.func.fun, fun.args
        if args and not is_variable(args[0]):  # the code of a method shows which attributes of its object it reads
            plain, args = MethodType(plain, args[0]), args[1:]
        plain = partial(plain, *args, **fun.keywords) if args or fun.keywords else plain
        fun = Jitted.shared(plain, *fun.func.options)
    if isinstance(fun, Jitted):
        return fun.form()
    parts = Parts(fun, Jitted)
    if not parts.snapshot:
        return None
    key = calls_jitted, parts.key
    template = _templates.get(key)
    if template is None:
        template = Template(parts, partial(_compiled, Attempts()))
        try:
            template.is_refused = not _is_compiled(template.made.fun, parts.snapshot[0][0], calls_jitted)
        except HoldsTraced:
            return None
        _templates.add(key, template)
    return None if template.is_refused else template.form(parts.numbers)


def _compiled(attempts: Attempts, fun: Any, arguments: Sequence[int]) -> Jitted:
    jitted = Jitted(fun, attempts=attempts)
    jitted.rename(f"{jitted.__name__} at {place_of(unwrap(fun))}")
    jitted.limit(_MOST_OPERATIONS)
    return jitted


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
    if not effect and _counts[code] > Templates.MOST_OF_ONE_CODE:
        effect = "reads other objects of enclosing functions in each loop"
    if effect and code not in _warned:
        _warned.add(code)
        text = "timestepping.scan: %s at %s isn't compiled, and Python calls it for each step, since it %s."
        _log.log(level_of_repeats(), text, fun.__name__, place_of(user_function), effect)
    return not effect
