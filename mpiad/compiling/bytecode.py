"""The names of variables and attributes that bytecode reads, and the lines where it does."""

from __future__ import annotations

import dis
import inspect
import re
from collections import Counter
from functools import lru_cache
from itertools import chain
from types import CodeType
from typing import Any, TypeAlias


class Unknown(Exception):
    """Raised for an object that can't be followed; `watch`: that of the objects that were read before."""

    watch: Any


def line_of(code: CodeType, name: str) -> int | None:
    """Return the first line at which code or a nested function names a variable or an attribute."""
    for each in dis.get_instructions(code):
        if each.argval == name:
            return next(line for start, stop, line in code.co_lines() if start <= each.offset < stop)
    return next(filter(None, (line_of(inner, name) for inner in _nested(code))), None)


_Chain: TypeAlias = "tuple[str, Any, tuple[str, ...]]"
_PAIR = re.compile(r"((?:LOAD|STORE)_FAST\w*?)_((?:LOAD|STORE)_FAST\w*)")  # since Python 3.13 one instruction for two names


_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")


def _chains(code: CodeType) -> list[_Chain]:
    """Return a code object's instructions: operation, argument, and the chain of attributes read from the result.

    The instructions of a call ``super()`` are one, with the operation "SUPER". For aliases see `_without_aliases`.
    """
    chains: list[tuple[str, Any, list[str]]] = []
    for instruction in dis.get_instructions(code):
        if instruction.is_jump_target and instruction.opname.startswith("STORE_FAST"):
            chains.append(("JOIN", None, []))  # the value is that of either branch, as in `d = a or b`
        if instruction.opname in ("IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_CLASSDEREF"):
            statement = "an import statement" if instruction.opname == "IMPORT_NAME" else "the definition of a class"
            raise Unknown(f"{statement} in {code.co_name}, which should stand outside of the function")
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains[-1][2].append(instruction.argval)
        elif (pair := _PAIR.fullmatch(instruction.opname)) and isinstance(instruction.argval, tuple):
            chains += [(operation, name, []) for operation, name in zip(pair.groups(), instruction.argval)]
        elif instruction.opname == "LOAD_SUPER_ATTR" and chains[-2][:2] == ("LOAD_DEREF", "__class__"):
            chains[-3:] = [("SUPER", "", [instruction.argval])]  # in place of `super`, the class and the first argument
        elif instruction.opname in ("CALL", "CALL_FUNCTION") and chains[-1] == ("LOAD_GLOBAL", "super", []):
            chains[-1:] = [("SUPER", "", [])]  # before Python 3.12
        elif instruction.opname == "PRECALL":
            continue
        else:
            chains.append((instruction.opname, instruction.argval, []))
    return _without_aliases(code, [(operation, name, tuple(attributes)) for operation, name, attributes in chains])


def _without_aliases(code: CodeType, chains: list[_Chain]) -> list[_Chain]:
    """Return chains with ``self.data.dx`` in place of ``d.dx`` if ``d = self.data`` is the only assignment of d.

    Since objects from outside don't change during a call, the alias d is the object that ``self.data`` is at its use.
    """
    flags, loads_of_variables = code.co_flags, (*_LOADS, "LOAD_DEREF")
    arguments = code.co_argcount + code.co_kwonlyargcount
    arguments += bool(flags & inspect.CO_VARARGS) + bool(flags & inspect.CO_VARKEYWORDS)
    from_outside = (*code.co_varnames[: min(arguments, 1)], *code.co_freevars)
    changes = Counter(name for operation, name, _ in chains if "_FAST" in operation and operation not in _LOADS)
    changes.update(code.co_varnames[:arguments])
    first_load = {name: k for k, (operation, name, _) in reversed([*enumerate(chains)]) if operation in _LOADS}
    aliases: dict[str, _Chain] = {}
    result: list[_Chain] = []
    for k, (operation, name, attributes) in enumerate(chains):
        if operation in _LOADS and name in aliases:
            root, variable, first = aliases[name]
            result.append((root, variable, first + attributes))
            continue
        if operation == "STORE_FAST" and changes[name] == 1 and first_load.get(name, -1) > k:
            root, variable, _ = result[-1]
            is_from_outside = root in loads_of_variables and variable in from_outside and changes[variable] <= 1
            if root == "LOAD_GLOBAL" or is_from_outside:
                aliases[name] = result.pop()
                continue
        result.append((operation, name, attributes))
    return result


def _nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


@lru_cache(maxsize=256)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of global variables and attributes in code and nested functions; for class patterns, MATCH_CLASS."""
    names = [*code.co_names, *[x.opname for x in dis.get_instructions(code) if x.opname == "MATCH_CLASS"]]
    return tuple(dict.fromkeys([*names, *[name for inner in _nested(code) for name in names_in(inner)]]))


@lru_cache(maxsize=256)
def reads_in(code: CodeType) -> tuple[tuple[bool, str, tuple[str, ...]], ...]:
    """Return the global and enclosing variables that a code object reads or assigns, as (is global, name, attributes)."""
    # Code that imports modules or defines classes raises Unknown.
    reads = []
    for operation, name, attributes in _chains(code):
        is_global = operation.endswith("_GLOBAL")
        if is_global or operation.endswith("_DEREF") and name in code.co_freevars:
            reads.append((is_global, name, attributes))
    for nested in _nested(code):
        if reads_of_super(nested):
            raise Unknown("super()")
        reads += [read for read in reads_in(nested) if read[0] or read[1] in code.co_freevars]
    return tuple(dict.fromkeys(reads))


@lru_cache(maxsize=256)
def reads_of_first_argument(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the chains of attributes read from `self`, in nested functions, too.

    If the variable or an attribute of it is assigned, raise Unknown.
    """
    if not code.co_varnames:
        raise Unknown("a method without arguments")
    return tuple(dict.fromkeys(_reads_of_variable(code, code.co_varnames[0])))


@lru_cache(maxsize=256)
def reads_of_super(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the chains of attributes read from `super()`."""
    reads = [attributes for operation, _, attributes in _chains(code) if operation == "SUPER"]
    if () in reads:
        raise Unknown("super()")
    return tuple(dict.fromkeys(reads))


def _reads_of_variable(code: CodeType, variable: str) -> list[tuple[str, ...]]:
    # Nested functions, such as comprehensions, read the variable from a cell; creating them loads the cell itself.
    in_cell = variable in (*code.co_cellvars, *code.co_freevars)
    reads, chains = [], _chains(code)
    for (operation, name, attributes), (following, attribute, _) in zip(chains, [*chains[1:], ("", "", ())]):
        if name == variable and not attributes and following == "STORE_ATTR":
            text = "of an object from outside: return the value, or create the object inside"
            raise Unknown(f"it assigns {variable}.{attribute} {text}")
        if operation == "LOAD_DEREF" if in_cell else operation in ("LOAD_FAST", "LOAD_FAST_BORROW"):
            reads += [attributes] if name == variable else []
        elif in_cell and operation in ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_CLOSURE", "MAKE_CELL"):
            continue
        elif ("FAST" in operation or "DEREF" in operation) and name == variable:
            raise Unknown(f"it assigns {variable}")
    nested = [inner for inner in _nested(code) if variable in inner.co_freevars]
    return reads + [read for inner in nested for read in _reads_of_variable(inner, variable)]


@lru_cache(maxsize=256)
def attributes_of_results(code: CodeType) -> tuple[str, ...]:
    """Return attributes that code and nested functions read from objects other than global and enclosing variables."""
    found = [names for operation, _, names in _chains(code) if operation not in ("LOAD_GLOBAL", "LOAD_DEREF")]
    return tuple(dict.fromkeys(chain(*found, *map(attributes_of_results, _nested(code)))))
