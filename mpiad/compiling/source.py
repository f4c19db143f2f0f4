"""Source text of programs, in the kernel language: one assignment to a local scalar per operation.

The values of a user's function are computed in the order of the operations in the function, so they equal those computed
by NumPy, except for the rounding of operations that `lowered` replaces.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from operator import mul
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from mpiad.compiling.c_translation import c_lines
from mpiad.compiling.program import OPERATIONS, Builder, Program, copy_program
from mpiad.compiling.rerolling import Stored, rerolled
from mpiad.compiling.symbols import Symbol, choose, integer_power

# Lowering: the replacement of operations without a machine instruction by other operations.
#
# Operations are lowered when a program becomes text, after differentiation. The derivatives of a lowered operation (such as
# a power written as a product) would differ from autograd's at zeros and ties.

# A power with an exponent up to this one takes at most twelve multiplications.
_LARGEST_EXPONENT = 64


@lru_cache(32)
def lowered(program: Program) -> Program:
    """Return a program, equivalent up to rounding, whose operations all have a text in the kernel language."""
    builder = Builder()

    def call(operation: str, *arguments: int) -> int:
        simpler = _RULES[operation](*[Symbol(builder, i) for i in arguments]) if operation in _RULES else None
        return builder.call(operation, *arguments) if simpler is None else simpler.number

    new = copy_program(builder, program, call=call)
    return builder.program(program.groups, [new[i] for i in program.outputs])


def are_simple(programs: Iterable[Program]) -> bool:
    """Return whether programs call no functions; calls in loops over wide vectors are slow, since registers are saved."""
    operations = {instruction.operation for program in programs for instruction in lowered(program).instructions}
    return all(OPERATIONS[operation].simple for operation in operations & OPERATIONS.keys())


def _power(x: Symbol, y: Symbol) -> Symbol | None:
    """Return a power with a small constant exponent as products and a root; None for other exponents."""
    exponent = x.builder.value(y.number)
    if exponent is None or abs(exponent) > _LARGEST_EXPONENT or (2 * exponent) % 1:
        return None
    result = integer_power(x, int(abs(exponent)), mul)
    if exponent % 1:
        root = x.sqrt()
        result = root if result is None else result * root
        # The root of -0 is -0, whose reciprocal would be -inf instead of inf.
        result = abs(result) if exponent < 0 else result
    if result is None:
        return x.symbol_of(1.0)
    return result if exponent > 0 else 1.0 / result


def _by_pairs(operation: str) -> Callable[..., Symbol]:
    return lambda *arguments: reduce(lambda x, y: x.call(operation, y), arguments)


# The remainder has the sign of the divisor, unlike in C.
def _remainder(x: Symbol, y: Symbol) -> Symbol:
    rest = x.fmod(y)
    return choose(rest == 0.0, rest.copysign(y), choose((rest < 0.0) ^ (y < 0.0), rest + y, rest))


# hypot isn't called, since a call would prevent the vectorization of a loop around the program.
def _modulus(x: Symbol, y: Symbol) -> Symbol:
    larger, smaller = abs(x).maximum(abs(y)), abs(x).minimum(abs(y))
    ratio = smaller / choose(larger == 0.0, 1.0, larger)
    return larger * (ratio * ratio + 1.0).sqrt()


_RULES: dict[str, Callable[..., Symbol | None]] = {
    "power": _power,
    "largest": _by_pairs("maximum"),
    "smallest": _by_pairs("minimum"),
    "remainder": _remainder,
    "modulus": _modulus,
    "stop_gradient": lambda x: x,
    "expit": lambda x: 1.0 / (1.0 + (-x).exp()),
    "logit": lambda x: (x / (1.0 - x)).log(),
}

# For each group, the expressions of its inputs.
Names: TypeAlias = "Mapping[str, Sequence[str]]"


def number(value: float | bool, single: bool = False) -> str:
    """Return a literal of a number, in double or single precision."""
    if isinstance(value, bool):
        return str(value)
    text = repr(abs(float(value))) if math.isfinite(value) else f"math.{'nan' if math.isnan(value) else 'inf'}"
    # In parentheses, since an operator may precede the literal.
    text = f"(-{text})" if math.copysign(1, value) < 0 else text
    # A double literal would convert the whole expression to double precision.
    return f"np.float32({text})" if single else text


def numbered(name: str, count: int) -> list[str]:
    """Return the names name0, name1, ..."""
    return [f"{name}{i}" for i in range(count)]


def indented(lines: list[str], depth: int = 1) -> list[str]:
    """Return indented lines."""
    return ["    " * depth + line for line in lines]


def lines(program: Program, names: Names, outputs: Sequence[str], dtype: DTypeLike = float, prefix: str = "v") -> list[str]:
    """Return unindented statements that assign a program's outputs; `names`: local scalars, since each use repeats them."""
    # ``names["table of group"]``: for each input that begins a table, the text of an entry, with {} for the index.
    # Two programs in one function need different prefixes of local scalars.
    program, single = lowered(program), np.dtype(dtype) == np.float32
    zero, one = number(0.0, single), number(1.0, single)
    texts, statements = leaf_texts(program, names, single), list[str]()
    for i, (operation, arguments, _) in enumerate(program.instructions):
        if arguments:
            texts[i] = f"{prefix}{i}"
            if operation == "lookup":
                text = texts[arguments[0]].format(texts[arguments[1]])
            else:
                text = OPERATIONS[operation].text.format(*(texts[j] for j in arguments), zero=zero, one=one)
            statements.append(f"{texts[i]} = {text}")
    return statements + [f"{target} = {texts[i]}" for target, i in zip(outputs, program.outputs, strict=True)]


def leaf_texts(program: Program, names: Names, single: bool) -> dict[int, str]:
    """Return the texts of a program's inputs, constants and tables, by value number."""
    texts: dict[int, str] = {}
    for i, (operation, _, value) in enumerate(program.instructions):
        if operation == "constant":
            texts[i] = number(value, single)  # type: ignore[arg-type]
        elif operation == "input":
            group, place = value  # type: ignore[misc]
            texts[i] = names[group][place]  # type: ignore[index]
        elif operation == "table":
            table, first, _ = value  # type: ignore[misc]
            texts[i] = names[f"table of {table}"][first]  # type: ignore[index]
    return texts


def function_source(
    program: Program,
    name: str,
    names: Names,
    arguments: Sequence[str],
    dtype: DTypeLike = float,
    language: str = "python",
    stored: Mapping[int, Stored] | None = None,
) -> str:
    """Return the text of a function of scalars that returns the outputs as a tuple; in C, by reference parameters.

    `stored`: outputs that aren't returned, by their indices.
    """
    # In C, numbers have the type `real`, except arguments that are given with their types, and the function is `INLINE`.
    outputs = numbered("out", len(program.outputs))
    if language == "c":
        given = [x if " " in x else f"const real {x}" for x in arguments] + [f"real& {x}" for x in outputs]
        body = c_lines(lines(program, names, outputs, dtype), outputs)
        return "\n".join([f"INLINE void {name}({', '.join(given)}) {{", *indented(body), "}"])
    stored, single, simpler = stored or {}, np.dtype(dtype) == np.float32, lowered(program)
    loops = rerolled(simpler, leaf_texts(simpler, names, single), outputs, stored, single)
    added = (one.statement.format(one.place, outputs[i]) for i, one in stored.items())
    body = loops or [*lines(program, names, outputs, dtype), *added]
    results = [x for i, x in enumerate(outputs) if i not in stored]
    return (_function if loops else _in_pieces)(name, arguments, body, results)


# LLVM's time grows faster than linearly with the length of straight-line code, so longer functions are divided. Values pass
# from piece to piece through memory, as values that don't fit into registers do in any case.
_PIECE = 1000
_SEPARATORS = str.maketrans(dict.fromkeys("()[]{}+-*/%=<>!&|^~,.:", " "))  # between names


def _in_pieces(name: str, arguments: Sequence[str], body: list[str], outputs: Sequence[str]) -> str:
    """Return the text of a function, whose statements assign to each variable once, as a sequence of shorter functions."""
    count = -(-len(body) // _PIECE)
    if count < 2:
        return _function(name, arguments, body, outputs)
    size, pieces, calls = -(-len(body) // count), list[str](), list[str]()
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    # The targets of += are entries of arrays.
    targets = [[line.partition(" = ")[0] for line in chunk if " += " not in line] for chunk in chunks]
    known = {*arguments, *(target for chunk in targets for target in chunk)}
    read = [known & set(" ".join(chunk).translate(_SEPARATORS).split()) for chunk in chunks]
    later = set(outputs)
    for k in range(len(chunks) - 1, -1, -1):
        results = [target for target in targets[k] if target in later]
        given = sorted(read[k] - set(targets[k]))
        later |= set(given)
        pieces.append(_function(f"{name}_{k}", given, chunks[k], results))
        calls.append(f"{', '.join(results)}{', = ' * bool(results)}{name}_{k}({', '.join(given)})")
    return "\n\n".join([*pieces, _function(name, arguments, calls[::-1], outputs)])


def _function(name: str, arguments: Sequence[str], body: list[str], outputs: Sequence[str]) -> str:
    result = f"return ({', '.join(outputs)}{',' * bool(outputs)})"
    return "\n".join([f"def {name}({', '.join(arguments)}):", *indented([*body, result])]) + "\n"


def targets_of(statements: Sequence[str]) -> list[str]:
    """Return the variables and entries to which statements assign."""
    return [statement.partition(" = ")[0] for statement in statements]


def operands_of(statements: Sequence[str]) -> list[list[int]]:
    """Return, for each of some assignments to new targets, those whose targets it reads."""
    places = {target: k for k, target in enumerate(targets_of(statements))}
    words = [statement.partition(" = ")[2].translate(_SEPARATORS).split() for statement in statements]
    return [sorted({places[word] for word in each if word in places}) for each in words]


def with_few_live(statements: Sequence[str], first: Container[str] = ()) -> list[int]:
    """Return an order of assignments, each to a new target, in which few variables are live at the same time.

    `first`: variables that are assigned before all others. The method is greedy: next comes the statement that, with the
    loads it needs, adds the fewest live variables.
    """
    targets, reads = targets_of(statements), operands_of(statements)
    users: list[set[int]] = [set() for _ in statements]  # that are left
    for k, found in enumerate(reads):
        for i in found:
            users[i].add(k)
    order: dict[int, None] = {}
    used = [bool(found) for found in users]
    queue: list[tuple[int, int]] = []

    def offer(k: int) -> None:
        """Put a statement into the queue if all that it needs, but loads, is computed."""
        if reads[k] and k not in order and all(i in order or not reads[i] for i in reads[k]):
            added = sum(i not in order for i in reads[k]) + used[k] - sum(len(users[i]) == 1 for i in reads[k])
            heapq.heappush(queue, (added, k))

    def assign(k: int) -> None:
        order[k] = None
        for i in reads[k]:
            users[i].discard(k)
            if len(users[i]) == 1:
                offer(*users[i])
        for j in users[k]:
            offer(j)

    for k, target in enumerate(targets):
        if target in first:
            assign(k)
    for k in range(len(statements)):
        offer(k)
    while queue:
        _, k = heapq.heappop(queue)
        if k not in order:
            for i in reads[k]:
                if i not in order:
                    assign(i)
            assign(k)
    # The others read no variable, and nothing reads them.
    return [*order, *(k for k in range(len(statements)) if k not in order)]
