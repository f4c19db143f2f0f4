"""Powers without a call, so that a loop over lanes becomes vector instructions."""

from __future__ import annotations

import math

__all__ = ["power_lines"]

# For x = m 2^n with m near 1: log2 m = r q(r²), r = (m - 1) / (m + 1), and 2^f, for |f| <= 1/2, by their series.
_LOG2 = [2 / math.log(2) / (2 * k + 1) for k in range(11)]
_EXP2 = [math.log(2) ** k / math.factorial(k) for k in range(14)]
_ROOT_HALF = 0x3FE6A09E667F3BCD  # the bits of √½: m lies between it and √2


def power_lines(x: str, exponent: str, out: str) -> list[str]:
    """Return lines for out = x ** exponent, without a call: to a few units of the last place, for |exponent| <= 0.5.

    Outside of 1e-30 to 1e30, x is taken for these; NaN for the second.
    """
    return [
        f"x = where({x} < 1e30, {x}, 1e30)",
        "x = where(x > 1e-30, x, 1e-30)",
        f"i = bits_of(x) - {_ROOT_HALF}",
        # The exponent, by a double's bits: no vector unit before AVX-512 converts integers of 64 bits.
        # 0x433 is the exponent of 2^52, from which on doubles are the integers: the bits of n + 1024 become a number.
        "n = number_of(((i + 0x4000000000000000) >> 52) | 0x4330000000000000) - 4503599627371520.0",
        f"m = number_of((i & 0xFFFFFFFFFFFFF) + {_ROOT_HALF})",
        "r = (m - 1.0) / (m + 1.0)",
        "r2 = r * r",
        f"y = {exponent} * fma({_series('r2', _LOG2)}, r, n)",
        "w = y + 6755399441055744.0",  # 1.5 · 2^52: what is added to it is rounded to an integer
        "r = y - (w - 6755399441055744.0)",
        f"{out} = number_of(bits_of({_series('r', _EXP2)}) + (bits_of(w) << 52))",
    ]


def _series(x: str, terms: list[float]) -> str:
    text = repr(terms[-1])
    for term in terms[-2::-1]:
        text = f"fma({text}, {x}, {term!r})"
    return text
