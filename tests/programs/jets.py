"""Arrays that carry their derivatives by all inputs, and the derivatives of these along one direction.

The reference's arithmetic, in NumPy alone. All ranks' inputs are m real numbers z. The last two axes of `coefficients`
hold, for each entry y,

    y       ∂y/∂z_1, ..., ∂y/∂z_m
    dy      the same, differentiated along the direction v

so that one run of a program gives its value, its gradient, its tangent and its Hessian times v, of every rank's loss.
Rules that are linear act on the leading axes alone; a product and a function of one argument have a rule each.
A complex entry has complex derivatives by real numbers: nothing need be holomorphic.
"""

import numpy as np


class Jet:
    """An array with its derivatives; `shape` and `dtype` are the array's."""

    __slots__ = ("coefficients",)
    __array_ufunc__ = None  # NumPy's arrays leave the operations with this class to it

    def __init__(self, coefficients):
        self.coefficients = coefficients

    @property
    def value(self):
        return self.coefficients[..., 0, 0]

    @property
    def first(self):
        return self.coefficients[..., 0, 1:]

    @property
    def along(self):
        return self.coefficients[..., 1, 0]

    @property
    def second(self):
        return self.coefficients[..., 1, 1:]

    @property
    def shape(self):
        return self.coefficients.shape[:-2]

    @property
    def dtype(self):
        return self.coefficients.dtype

    def __getitem__(self, key):
        return Jet(self.coefficients[key])

    def __add__(self, other):
        return Jet(self.coefficients + lifted(other, self).coefficients)

    __radd__ = __add__

    def __neg__(self):
        return Jet(-self.coefficients)

    def __sub__(self, other):
        return self + (-other)

    def __rsub__(self, other):
        return other + (-self)

    def __mul__(self, other):
        if not isinstance(other, Jet):
            return Jet(self.coefficients * np.asarray(other)[..., None, None])
        x, y = self.coefficients, other.coefficients
        out = product(x[..., :1, :], y[..., :1, :])
        bent = product(x[..., 1:, :], y[..., :1, :]) + product(x[..., :1, :], y[..., 1:, :])
        return Jet(np.concatenate([out, bent], axis=-2))

    __rmul__ = __mul__

    def __truediv__(self, number):
        return self * (1 / number)


def product(x, y):
    """Return the row [x y, x ∂y + y ∂x] of two rows [x, ∂x] and [y, ∂y]."""
    out = x[..., :1] * y + y[..., :1] * x
    out[..., :1] -= x[..., :1] * y[..., :1]
    return out


def lifted(x, like):
    """Return a constant as a jet with as many derivatives as `like`; a jet as it is."""
    if isinstance(x, Jet):
        return x
    x = np.asarray(x)
    coefficients = np.zeros((*x.shape, *like.coefficients.shape[-2:]), np.result_type(x, np.float64))
    coefficients[..., 0, 0] = x
    return Jet(coefficients)


def variables(xs, vs):
    """Return each input as a jet: its numbers are the z, real and imaginary parts one after the other."""
    count = sum(x.size * (2 if x.dtype.kind == "c" else 1) for x in xs)
    made, place = [], 0
    for x, v in zip(xs, vs):
        coefficients = np.zeros((*x.shape, 2, 1 + count), np.result_type(x.dtype, np.float64))
        coefficients[..., 0, 0], coefficients[..., 1, 0] = x, v
        for unit in (1, 1j) if x.dtype.kind == "c" else (1,):
            coefficients[np.arange(x.size), 0, 1 + place + np.arange(x.size)] = unit
            place += x.size
        made.append(Jet(coefficients))
    return made


def cut(derivatives, xs):
    """Cut derivatives by z into one array for each input: dJ = Re Σ g dx, so g = ∂J/∂Re x - i ∂J/∂Im x."""
    pieces, place = [], 0
    for x in xs:
        piece = derivatives[place : place + x.size]
        place += x.size
        if x.dtype.kind == "c":
            piece = piece - 1j * derivatives[place : place + x.size]
            place += x.size
        pieces.append(piece)
    return pieces


# ---- functions, under autograd.numpy's names


def apply(x, f0, f1, f2):
    """Return f(x), for the values of f, f' and f'' at x."""
    c = x.coefficients
    out = f1[..., None, None] * c
    out[..., 0, 0] = f0
    out[..., 1, 1:] += (f2 * c[..., 1, 0])[..., None] * c[..., 0, 1:]
    return Jet(out)


def quotient(x, y):
    inverse = 1 / y.value
    return x * apply(y, inverse, -(inverse**2), 2 * inverse**3)


def largest(x):
    return x[int(np.argmax(x.value))]


def sin(x):
    s, c = np.sin(x.value), np.cos(x.value)
    return apply(x, s, c, -s)


def cos(x):
    s, c = np.sin(x.value), np.cos(x.value)
    return apply(x, c, -s, -c)


def exp(x):
    e = np.exp(x.value)
    return apply(x, e, e, e)


def tanh(x):
    t = np.tanh(x.value)
    return apply(x, t, 1 - t * t, -2 * t * (1 - t * t))


def reciprocal(x):
    y = 1 / x.value
    return apply(x, y, -y * y, 2 * y * y * y)


def real(x):
    return Jet(x.coefficients.real)


def imag(x):
    return Jet(x.coefficients.imag)


def conj(x):
    return Jet(x.coefficients.conj())


def stop(x):
    return lifted(x.value, x)


def constant(x):
    return np.asarray(x, np.float64)


def concatenate(parts, axis=0):
    like = next(part for part in parts if isinstance(part, Jet))
    return Jet(np.concatenate([lifted(part, like).coefficients for part in parts], axis))


def stack(parts, axis=0):
    return Jet(np.stack([part.coefficients for part in parts], axis))


def reshape(x, shape, order="C"):
    if order == "F":
        return transpose(reshape(transpose(x), shape[::-1]))
    return Jet(x.coefficients.reshape(*shape, *x.coefficients.shape[-2:]))


def transpose(x):
    ndim = len(x.shape)
    return Jet(x.coefficients.transpose(*range(ndim)[::-1], ndim, ndim + 1))


def swapaxes(x, one, other):
    return Jet(x.coefficients.swapaxes(one, other))


def rollaxis(x, axis, start=0):
    return Jet(np.rollaxis(x.coefficients, axis, start))


def rot90(x):
    return Jet(np.rot90(x.coefficients))


def dot(matrix, vector):
    return Jet(np.tensordot(matrix, vector.coefficients, (1, 0)))


def segment_sum(x, segments, count):
    return dot((np.arange(count)[:, None] == segments).astype(float), x)


def total(x):
    return Jet(x.coefficients.sum(axis=tuple(range(len(x.shape)))))
