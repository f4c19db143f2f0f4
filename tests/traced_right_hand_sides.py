"""Right-hand sides of many styles, which the compiler must trace: each with its number of states and its parameters."""

from __future__ import annotations

from typing import NamedTuple

import autograd.numpy as anp
import numpy as np
import ode_systems
from autograd.scipy.special import erf, expit, logit

import mpiad

MATRIX = np.array([[-1.0, 2.0, 0.0], [0.5, -0.3, 1.0], [0.0, -0.7, 0.2]])


class System(NamedTuple):
    """f, its number of states, the parameters of one trajectory."""

    f: object
    states: int
    p: object


def sir(u, p, t):
    s, i, r = u
    infected = p["beta"] * s * i / (s + i + r)
    return anp.stack([-infected, infected - p["gamma"] * i, p["gamma"] * i])


def lorenz_array(u, p, t):
    sigma, rho, beta = p
    return anp.array([sigma * (u[1] - u[0]), u[0] * (rho - u[2]) - u[1], u[0] * u[1] - beta * u[2]])


def linear(u, p, t):
    return anp.dot(MATRIX, u) + p[0] * anp.sin(t)


def linear_operator(u, p, t):
    return MATRIX @ u * p[0]


def piecewise(u, p, t):
    cold = anp.where(u[0] > 0.2, u[0] ** 3 - 1.0, -anp.abs(u[0]) + p[0])
    both = anp.where((u[1] > -1) & (t < 0.5), u[1] * p[1], anp.sqrt(1 + u[1] ** 2))
    return anp.stack([cold, both])


def limits(u, p, t):
    clipped = np.clip(u, -0.5, 0.5)
    return anp.maximum(u, p[0]) - anp.minimum(u, 0.1) * clipped + anp.max(u, axis=0) - np.fmin(u, 0.0)


def elementary(u, p, t):
    x, y = 0.9 * anp.tanh(u[0]), u[1]
    first = anp.exp(-y) + anp.log(2 + x) + anp.sin(y) * anp.cos(x) + anp.tan(x) + anp.arctan(y) + anp.sinh(x)
    second = anp.cosh(x) + anp.arcsin(x) + anp.arccos(x) + anp.arctan2(y, 2 + x) + anp.log1p(x) + anp.expm1(y)
    third = anp.log2(3 + x) + anp.log10(4 + x) + anp.arcsinh(y) + anp.arctanh(x) + anp.arccosh(2 + x) + anp.sqrt(3 + y * y)
    return [first * p[0], second + third * t, anp.sign(y) * x]


def powers(u, p, t):
    base = 1.5 + u[0] ** 2
    return [
        base ** p[0] + base**-2 + base**0.5 + base**1.5 + base**7 - base**-1.5,
        2.0 ** u[0] + anp.power(base, 2.7) + anp.reciprocal(base) + anp.square(u[1]) + base**0 + anp.exp2(u[1]),
    ]


def in_place(u, p, t):
    du = np.zeros_like(u)
    du[0] = u[1] * p[0]
    du[1:] = -u[:-1] + t
    du[-1] *= 2.0
    du += 0.1
    return du


def views(u, p, t):
    du = np.zeros_like(u)
    position, velocity = du[:2], du[2:]
    position[:] = u[2:]
    velocity[:] = [-p[0] * u[0], -u[1]]
    velocity *= 2.0
    du.T[..., 3] += np.array([u[0] ** 2, 0 * u[1]])[0]
    velocity %= 3.0
    return du


def counting(u, p, t):
    several = np.sum(u > 0, axis=0) + np.sum(u[:1] > -9, axis=0) + np.sum(u[1:2] > -9, axis=0)
    return np.where(np.all(u > -9, axis=0) & np.any(u > 0, axis=0), u * several, p[0]) + u.astype(bool) * u


@mpiad.jit
def scaled(u, factor):
    return anp.sin(u) * factor


def with_jitted(u, p, t):
    return scaled(u, p[0]) + np.tril(MATRIX) @ u


def neighbours(u, p, t):
    left, right = anp.roll(u, 1, axis=0), u[[1, 2, 3, 4, 0]]
    mean = anp.mean(u, axis=0)
    return p * (left - 2 * u + right) + (u[::-1] - mean) * u.sum(axis=0) / anp.linalg.norm(u, axis=0)


def network(u, p, t):
    (first, bias), second = p["layers"], p["out"]
    return anp.dot(second, anp.tanh(anp.dot(first, u) + bias[:, None]))


def counted(u, p, t):
    x = u
    for _ in range(p["times"]):
        x = x + p["rate"] * u * x
    return x if p["kind"] == "growth" else -x


def remainders(u, p, t):
    return [(u[0] % 0.7) + u[1] // p[0], np.floor(u[0] * 3) * u[1] + np.heaviside(u[0], 0.5) + np.hypot(u[0], u[1]),
            (u[0] > u[1]) * u[0] + np.logaddexp(u[0], u[1]) + np.isfinite(u[2]) * u[2]]  # fmt: skip


def curves(u, p, t):
    force = np.interp(t, [0.1, 0.3, 0.8], [1.0, 2.0, -1.0]) + np.interp(u[0], [-0.5, 0.5], [1.0, 3.0], left=-1.0, right=7.0)
    return [force * u[1] + np.polyval([1.0, -2.0, 0.5], u[0]), np.round(3 * u[1]) + np.sinc(u[0]) * p[0]]


def special(u, p, t):
    parts = [u[0] * expit(u[1]), erf(u[0]) - t, logit(expit(u[2]))]
    return anp.concatenate([part[None] for part in parts]) * p[0]


def put_together(u, p, t):
    both = anp.concatenate([u[1:], anp.vstack([u[0] * p[0]])])
    return anp.where(both > 0.1, anp.vstack([u[0], u[1], u[2]]), 2 * both)


def arranged(u, p, t):
    pairs = u.copy().reshape(2, 2, -1)
    turned = pairs.transpose(1, 0, 2) * pairs + np.add.reduce(pairs, axis=1)
    weighed = np.multiply.outer(np.array([1.0, -2.0]), u)[1] * (u > 0).astype(float)
    chosen = np.where(np.isinf(u), 0.0, np.where(np.where(u > 0.1, True, False), +u, t))
    clipped = np.clip(u, min=-0.5) * u.clip(None, 0.5) + chosen
    return turned.reshape((4, -1)) + np.copy(weighed) * p[0] + clipped * np.diff(u, axis=0, prepend=u[-1:])


SYSTEMS = {
    "lorenz": System(ode_systems.lorenz, 3, [28.0]),
    "lorenz_array": System(lorenz_array, 3, (10.0, 28.0, 8 / 3)),
    "lotka_volterra": System(ode_systems.lotka_volterra, 2, np.array([1.5, 1.0, 0.7, 3.0])),
    "van_der_pol": System(ode_systems.van_der_pol, 2, [2.5]),
    "forced_pendulum": System(ode_systems.forced_pendulum, 2, [9.8, 0.3]),
    "decay": System(ode_systems.decay, 2, 0.7),
    "sir": System(sir, 3, {"beta": 0.4, "gamma": 0.1}),
    "linear": System(linear, 3, [0.4]),
    "linear_operator": System(linear_operator, 3, np.array([0.4])),
    "piecewise": System(piecewise, 2, [0.3, -0.8]),
    "limits": System(limits, 3, [0.2]),
    "elementary": System(elementary, 3, [0.6]),
    "powers": System(powers, 2, [2.3]),
    "in_place": System(in_place, 4, [1.7]),
    "views": System(views, 4, [1.7]),
    "counting": System(counting, 3, [0.2]),
    "with_jitted": System(with_jitted, 3, [0.2]),
    "neighbours": System(neighbours, 5, 0.4),
    "network": System(
        network, 3, {"layers": (np.linspace(-1, 1, 12).reshape(4, 3), np.linspace(0, 1, 4)), "out": np.ones((3, 4)) / 3}
    ),
    "counted": System(counted, 2, {"times": 3, "rate": 0.2, "kind": "growth"}),
    "curves": System(curves, 2, [0.3]),
    "special": System(special, 3, [0.3]),
    "put_together": System(put_together, 3, [0.4]),
    "remainders": System(remainders, 3, [0.4]),
    "arranged": System(arranged, 4, [0.4]),
}
# autograd differentiates neither writing into arrays nor some of NumPy's functions.
FOR_AUTOGRAD = sorted(set(SYSTEMS) - {"in_place", "views", "counting", "remainders", "limits", "curves", "arranged"})
