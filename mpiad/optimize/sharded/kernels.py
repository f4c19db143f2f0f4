"""The loops that `compiled` compiles, in the language of `mpiad.compiling.translation`: over all tiles of the memory.

`memory` holds tiles of `height` rows of `length` numbers, with `padding` behind each row of a full tile: see `tiles`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AT_ONCE", "combination", "products", "taken"]

# Rows that are read at the same time, each by a name of its own; lists of rows have a multiple of so many.
AT_ONCE = 7


def products(
    memory: Any, height: int, size: int, length: int, padding: int, rows: Any, before: int, row: int, out: Any, total: Any
) -> None:
    """Turn row `before` into the change to `row`, if it is another; add its products with rows, and give row's square."""
    square, begin = 0.0, 0
    for start in range(0, size, length):
        n = min(length, size - start)
        stride = n + padding if n == length else n
        v = memory[begin + before * stride : begin + before * stride + n]
        w = memory[begin + row * stride : begin + row * stride + n]
        if row != before:
            for i in range(n):
                v[i] = w[i] - v[i]
                square += w[i] * w[i]
        else:
            for i in range(n):
                square += w[i] * w[i]
        for j in range(0, rows.size, 7):
            k = begin + rows[j] * stride
            a = memory[k : k + n]
            k = begin + rows[j + 1] * stride
            b = memory[k : k + n]
            k = begin + rows[j + 2] * stride
            c = memory[k : k + n]
            k = begin + rows[j + 3] * stride
            d = memory[k : k + n]
            k = begin + rows[j + 4] * stride
            e = memory[k : k + n]
            k = begin + rows[j + 5] * stride
            f = memory[k : k + n]
            k = begin + rows[j + 6] * stride
            g = memory[k : k + n]
            p = q = r = s = t = u = x = 0.0
            for i in range(n):
                p += a[i] * v[i]
                q += b[i] * v[i]
                r += c[i] * v[i]
                s += d[i] * v[i]
                t += e[i] * v[i]
                u += f[i] * v[i]
                x += g[i] * v[i]
            out[j] += p
            out[j + 1] += q
            out[j + 2] += r
            out[j + 3] += s
            out[j + 4] += t
            out[j + 5] += u
            out[j + 6] += x
        begin += height * stride
    total[0] = square


def combination(
    memory: Any, height: int, size: int, length: int, padding: int, rows: Any, weights: Any, row: int,
    here: Any, step: float, out: Any, copy: Any,
) -> None:
    """Write the weighted sum of rows into `row`, if there are any, and where a step along it leads, if that is asked."""
    begin = 0
    for start in range(0, size, length):
        n = min(length, size - start)
        stride = n + padding if n == length else n
        way = memory[begin + row * stride : begin + row * stride + n]
        for j in range(0, rows.size, 7):
            k = begin + rows[j] * stride
            a = memory[k : k + n]
            k = begin + rows[j + 1] * stride
            b = memory[k : k + n]
            k = begin + rows[j + 2] * stride
            c = memory[k : k + n]
            k = begin + rows[j + 3] * stride
            d = memory[k : k + n]
            k = begin + rows[j + 4] * stride
            e = memory[k : k + n]
            k = begin + rows[j + 5] * stride
            f = memory[k : k + n]
            k = begin + rows[j + 6] * stride
            g = memory[k : k + n]
            p, q, r, s = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
            t, u, v = weights[j + 4], weights[j + 5], weights[j + 6]
            if j == 0:
                for i in range(n):
                    way[i] = p * a[i] + q * b[i] + r * c[i] + s * d[i] + t * e[i] + u * f[i] + v * g[i]
            else:
                for i in range(n):
                    way[i] += p * a[i] + q * b[i] + r * c[i] + s * d[i] + t * e[i] + u * f[i] + v * g[i]
        if out.size > 0:
            x, moved, copied = here[start : start + n], out[start : start + n], copy[start : start + n]
            for i in range(n):
                there = x[i] + step * way[i]
                moved[i] = there
                copied[i] = there
        begin += height * stride


def taken(
    memory: Any, height: int, size: int, length: int, padding: int, gradient: Any, bits: Any, way: int, out: int,
    most: Any, total: Any,
) -> None:
    """Copy a gradient into row `out`; give its largest entry's bits, its slope along row `way`, and that one's square."""
    largest, slope, square, begin = 0, 0.0, 0.0, 0
    for start in range(0, size, length):
        n = min(length, size - start)
        stride = n + padding if n == length else n
        along = memory[begin + way * stride : begin + way * stride + n]
        copied = memory[begin + out * stride : begin + out * stride + n]
        g, b = gradient[start : start + n], bits[start : start + n]
        for i in range(n):
            copied[i] = g[i]
            slope += g[i] * along[i]
            square += along[i] * along[i]
            # Without their sign, doubles are in the order of their bits, and NaN comes behind infinity.
            largest = max(largest, b[i] & 0x7FFFFFFFFFFFFFFF)
        begin += height * stride
    most[0] = largest
    total[0] = slope
    total[1] = square
