"""Values and derivatives of each function where it has a zero, a tie, a kink, a pole or an end: NumPy's and autograd's.

What is compared is the text that kernels are made of, compiled: f, its derivative transposed, and along directions.
"""

from __future__ import annotations

import itertools

import autograd
import autograd.numpy as np
import autograd.scipy.special as special
import numpy as onp
import pytest
from autograd.core import make_jvp
from one_kernel import one_kernel

from mpiad.compiling.derivatives import jvp, vjp
from mpiad.compiling.program import Builder, copy_program
from mpiad.compiling.source import lines
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.trace import trace

pytestmark = [pytest.mark.serial, pytest.mark.limit(240),  # in one line with the name: no other ranks import the file
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Output seems independent"),  # of steps as floor
]  # fmt: skip

INF, NAN = onp.inf, onp.nan
ENTRYWISE = (
    "sqrt exp expm1 log log1p log2 log10 sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh abs fabs "
    "sign floor ceil trunc rint square reciprocal exp2 negative deg2rad radians rad2deg degrees sinc"
).split()
EXPONENTS = [-3, -2.5, -2, -1.5, -1, -0.5, 0, 0.0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 7.5, 2.3, -2.3, 1 / 3]
BINARY = (
    "add subtract multiply divide power maximum minimum fmax fmin logaddexp mod remainder floor_divide arctan2 hypot"
).split()
REDUCING = "max min amax amin sum prod mean".split()


def by_number(exponent):
    return lambda u: u[0] ** exponent


def of_number(base):
    return lambda u: base ** u[0]


def named(function, arity):
    return lambda u: function(*(u[i] for i in range(arity)))


def along_axis(function):
    return lambda u: function(u, axis=0)


ONE = {name: named(getattr(np, name), 1) for name in ENTRYWISE}
ONE |= {name: named(getattr(special, name), 1) for name in ("erf", "erfc", "expit", "logit")}
ONE |= {f"u ** {exponent!r}": by_number(exponent) for exponent in EXPONENTS}
ONE |= {f"{base} ** u": of_number(base) for base in (0.0, 2.0, -2.0, 0.5)}
ONE |= {
    "clip": lambda u: np.clip(u[0], -1.0, 1.0),
    "clip below": lambda u: np.clip(u[0], 0.5, None),
    "where >": lambda u: np.where(u[0] > 0, u[0] ** 2, -u[0]),
    "where >=": lambda u: np.where(u[0] >= 0, u[0] ** 2, -u[0]),
    "select": lambda u: np.select([u[0] > 0, u[0] < -1], [u[0] * 2, u[0] * 3], 7.0),
    "u sqrt(u)": lambda u: np.sqrt(u[0]) + u[0] ** 1.5,
}
TWO = {name: named(getattr(np, name), 2) for name in BINARY}
TWO |= {"where <": lambda u: np.where(u[0] < u[1], u[0] * u[1], u[0] - u[1])}
THREE = {name: along_axis(getattr(np, name)) for name in REDUCING}
THREE |= {
    "norm": lambda u: np.linalg.norm(u, axis=0),
    "max of all": lambda u: np.max(u),
    "largest twice": lambda u: np.max(u, axis=0, keepdims=True) * u[0] + np.maximum(u[0], u[1]),
}

ENDS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -1000.0, 1000.0, 1e-300, -1e-300, 1e300, -1e300, INF, -INF, NAN]
PAIRS = list(itertools.product([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 1000.0, INF, -INF, NAN], repeat=2))
TRIPLES = [
    (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (1.0, 1.0, 0.0), (0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (2.0, 1.0, -1.0), (0.0, -0.0, 1.0),
    (0.0, -0.0, -1.0), (INF, INF, 1.0), (-INF, -INF, -INF), (NAN, 1.0, 1.0), (0.0, 2.0, 3.0),
]  # fmt: skip
TABLE = {1: (ONE, [(x,) for x in ENDS]), 2: (TWO, PAIRS), 3: (THREE, TRIPLES)}

# autograd's derivative is NaN there, by zero over zero or infinity over infinity, where there is one.
KNOWN_BETTER = {"abs", "sinc", "prod", "logaddexp", "u ** 0", "u ** 0.0", "divide", "largest twice"}
# Of negative infinity a root's multiple is NaN, and NumPy's power is infinite. (What else isn't compared are overflows of
# autograd's: of the square in sinc, of the product in prod.)
ROOTS = {"sqrt", *(f"u ** {exponent!r}" for exponent in EXPONENTS if (2 * exponent) % 2 == 1)}


def first(value):
    return np.reshape(value, (-1,))[0:1]


def all_of(functions, d):
    """Return one program: of each function the value, its cotangents for a seed of 1, its tangents along each axis."""
    builder, outputs = Builder(), []
    for function in functions.values():
        program = trace(lambda u, p, t, f=function: [first(f(u))] + [0.0 * u[0]] * (d - 1), (d,), EMPTY, float)
        back, forth = vjp(program, {"state": None}), jvp(program, {"state": None})
        outputs.append(copy_program(builder, program)[program.outputs[0]])
        new = copy_program(builder, back, seeds(onp.eye(d)[0]))
        outputs += [new[o] for o in back.outputs]
        for direction in onp.eye(d):
            new = copy_program(builder, forth, seeds(direction))
            outputs.append(new[forth.outputs[0]])
    return builder.program({"state": d}, outputs)


def seeds(values):
    return {("seed", i): value for i, value in enumerate(values)}


EMPTY = Parameters([], [], lambda leaves: None)


def compiled(program, d):
    names = {"state": [f"x[{i}]" for i in range(d)]}
    body = lines(program, names, [f"o[{i}]" for i in range(len(program.outputs))])
    signature = "void(float64[::1], float64[::1])"
    return one_kernel("\n    ".join(["def f(x, o):", *body]), "f", signature)


def autograds(function, u):
    """Return the value, the gradient, and the tangents along each axis."""

    def value(x):
        return first(function(x[:, None]))

    gradient = autograd.elementwise_grad(value)(u)
    try:
        tangents = [onp.ravel(make_jvp(value, u)(axis)[1])[0] for axis in onp.eye(len(u))]
    except NotImplementedError:  # of some functions it has gradients only
        tangents = []
    return onp.array([*value(u), *gradient, *tangents])


def comparable(name, u, expected):
    """Return for which numbers NumPy and autograd have a number, or NaN with good reason."""
    rooted = name in ROOTS or (name == "power" and u[1] == 0.5)
    if (rooted and u[0] == -INF) or (name == "sinc" and abs(u[0]) > 1e100) or (name == "prod" and INF in u):
        return onp.zeros(len(expected), bool)
    return ~onp.isnan(expected) | (name not in KNOWN_BETTER)


@pytest.mark.few(2)
@pytest.mark.parametrize("d", TABLE)
def test_numpys_values_and_autograds_derivatives(d):
    functions, points = TABLE[d]
    f = compiled(all_of(functions, d), d)
    found = onp.empty((len(functions), 1 + 2 * d))
    wrong = []
    for u in onp.array(points):
        with onp.errstate(all="ignore"):
            f(u, found.reshape(-1))
            for row, (name, function) in zip(found, functions.items()):
                expected = autograds(function, u)
                known = comparable(name, u, expected)
                if not onp.allclose(row[: len(known)][known], expected[known], rtol=1e-12, atol=0, equal_nan=True):
                    wrong.append(f"{name} at {u}: {row}, but NumPy and autograd have {expected}")
    assert not wrong, "\n".join(wrong)
