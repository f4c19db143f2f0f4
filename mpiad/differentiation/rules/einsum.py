"""Einstein summation, with the subscripts in a string.

Autograd's rule fails for device arrays if an index occurs in one operand only, and is wrong if an operand has length one
along an axis and another operand is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import autograd.numpy as anp

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.expansion import expand
from mpiad.differentiation.rules.protocol import Argnums, Vjp, inherited_vjp, refusal


def einsum_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """For each operand, multiply the cotangent by the other operands, and sum over the indices that the operand lacks."""
    if not isinstance(args[0], str):
        return inherited_vjp(anp.einsum, argnums, ans, args, kwargs)
    operands = args[1:]
    inputs, out = letters_of(args[0], [len(anp.shape(operand)) for operand in operands])
    return lambda g: tuple([_part(g, i - 1, inputs, out, operands) for i in argnums])


def _part(g: Array, k: int, inputs: list[str], out: str, operands: tuple) -> Array:
    axes, shape = inputs[k], anp.shape(operands[k])
    if len(set(axes)) < len(axes):
        raise refusal(anp.einsum, f"with respect to operand {k} with subscripts {axes!r}: take its diagonal first")
    others = [operand for j, operand in enumerate(operands) if j != k]
    subscripts = [letters for j, letters in enumerate(inputs) if j != k]
    # The cotangent is constant along an index that occurs neither in the result nor in another operand.
    present = set(out).union(*subscripts)
    kept = "".join(letter for letter in axes if letter in present)
    part = anp.einsum(f"{','.join([out, *subscripts])}->{kept}", g, *others)
    sizes = iter(anp.shape(part))
    full = tuple([next(sizes) if letter in present else 1 for letter in axes])
    stretched = tuple(map(max, full, shape))
    return fitted(part if stretched == anp.shape(part) else expand(part, stretched, full), operands[k])


def letters_of(subscripts: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand's axes, one string per operand, and the letters of the result's axes."""
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    unused = [letter for letter in ascii_letters if letter not in subscripts]
    dots = "".join(unused[: max(ndims, default=0)])
    inputs, longest = [], ""
    for part, ndim in zip(left.split(","), ndims):
        count = ndim - len(part.replace("...", ""))
        ellipsis = dots[len(dots) - count :] if "..." in part else ""
        longest = max(longest, ellipsis, key=len)
        inputs.append(part.replace("...", ellipsis))
    if arrow:
        return inputs, right.replace("...", longest)
    named = left.replace("...", "").replace(",", "")
    # Without an arrow, NumPy's result has the letters that occur once, in alphabetical order.
    return inputs, longest + "".join(sorted(letter for letter in set(named) if named.count(letter) == 1))


VJPS = {anp.einsum: einsum_vjp}
JVPS: dict = {}
