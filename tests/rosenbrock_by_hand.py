"""Rosenbrock methods for one trajectory, as their papers write them; of the library's it has Rodas5P's digits only.

All goes in the precision of what is given, complex numbers included, so that derivatives by complex steps are exact.
"""

from __future__ import annotations

import numpy as np

from mpiad.ensemble import Rodas5P

_D, _E32 = 1 / (2 + np.sqrt(2)), 6 + np.sqrt(2)


def rosenbrock23(f, jacobian, slope, u, p, t, h):
    """Return the new state, the error, and the states between (Shampine and Reichelt 1997, section 3)."""
    w = np.eye(len(u)) - h * _D * jacobian(u, p, t)
    rise = h * _D * slope(u, p, t)
    f0 = f(u, p, t)
    k1 = np.linalg.solve(w, f0 + rise)
    f1 = f(u + h / 2 * k1, p, t + h / 2)
    k2 = np.linalg.solve(w, f1 - k1) + k1
    new = u + h * k2
    k3 = np.linalg.solve(w, f(new, p, t + h) - _E32 * (k2 - f1) - 2 * (k1 - f0) + rise)

    def inside(x):
        return u + h * (x * (1 - x) / (1 - 2 * _D) * k1 + x * (x - 2 * _D) / (1 - 2 * _D) * k2)

    return new, h / 6 * (k1 - 2 * k2 + k3), inside


def rodas5p(f, jacobian, slope, u, p, t, h):
    """The same in the form of the definition: Hairer and Wanner, IV.7, (7.4), with α and Γ from the published numbers."""
    table = Rodas5P.tableau
    count, gamma = len(table.slopes), table.gamma

    def square(rows):
        return np.array([[*row[1:], *[0.0] * (count + 1 - len(row))] for row in rows])

    g = np.linalg.inv(np.eye(count) / gamma - square(table.coupling))
    alpha, b = square(table.a[:-1]) @ g, np.array(table.a[-1][1:]) @ g
    error, times = np.array(table.error[1:-1]) @ g, alpha.sum(axis=1)
    j, rise, k = jacobian(u, p, t), h * slope(u, p, t), []
    w = np.eye(len(u)) - h * gamma * j
    for i in range(count):
        y = u + h * sum((alpha[i, m] * k[m] for m in range(i)), 0 * u)
        before = sum((g[i, m] * k[m] for m in range(i)), 0 * u)
        k.append(np.linalg.solve(w, f(y, p, t + times[i] * h) + h * j @ before + g[i].sum() * rise))
    new, weights = u + h * sum(x * y for x, y in zip(b, k)), table.dense[1:-1]

    def inside(x):
        part = (weights @ x ** np.arange(1, weights.shape[1] + 1)) @ g
        return u + h * sum(w * y for w, y in zip(part, k))

    return new, h * sum(x * y for x, y in zip(error, k)), inside


def solved_by_hand(step, order, system, u, p, span, rtol, atol):
    """Return the times of the accepted steps, the number of rejected ones, and the last state."""
    f, jacobian, slope = system
    (t, end), norm = span, lambda x: np.sqrt(np.mean(x**2))
    k, scale = f(u, p, t), atol + rtol * np.abs(u)
    d0, d1 = norm(u / scale), norm(k / scale)
    h0 = min(1e-6 if min(d0, d1) < 1e-5 else 0.01 * d0 / d1, end - t)
    d2 = norm((f(u + h0 * k, p, t + h0) - k) / scale) / h0
    h = min(100 * h0, (0.01 / max(d1, d2)) ** (1 / order), end - t)
    times, rejected = [t], 0
    while t < end:
        shrunk = False
        while True:
            t_new = min(t + h, end)
            new, error, _ = step(f, jacobian, slope, u, p, t, t_new - t)
            size = norm(error / (atol + rtol * np.maximum(np.abs(u), np.abs(new))))
            factor = 0.9 * size ** (-1 / order)
            if size < 1:
                break
            h, shrunk, rejected = (t_new - t) * max(0.2, factor), True, rejected + 1
        h = (t_new - t) * min(1.0 if shrunk else 10.0, max(0.2, factor))
        t, u = t_new, new
        times.append(t)
    return np.array(times), rejected, u
