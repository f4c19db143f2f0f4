"""Calls of autograd.numpy's functions that are run on device arrays and on NumPy's, and compared."""

from __future__ import annotations

import numpy as onp
from autograd.numpy import fft, linalg

import mpiad.device.numpy as np

POSITIVE, INSIDE, ABOVE_ONE, SQUARE, SPD, COMPLEX = "positive", "inside", "above one", "square", "spd", "complex"


def make_input(kind, shape, rng):
    x = rng.normal(size=shape)
    if kind == POSITIVE:
        return onp.abs(x) + 0.3
    if kind == INSIDE:
        return 0.8 * onp.tanh(x)
    if kind == ABOVE_ONE:
        return onp.abs(x) + 1.2
    if kind == SQUARE:
        return x + 3.0 * onp.eye(shape[-1])
    if kind == SPD:
        return x @ onp.swapaxes(x, -1, -2) + onp.diag(onp.arange(1.0, shape[-1] + 1))
    return x + 1j * rng.normal(size=shape) if kind == COMPLEX else x


UNARY = {
    **dict.fromkeys(("negative", "abs", "absolute", "fabs", "exp", "exp2", "expm1", "sin", "cos", "tanh", "arctan"), None),
    **dict.fromkeys(("sinh", "cosh", "arcsinh", "square", "rad2deg", "degrees", "deg2rad", "radians", "sinc"), None),
    **dict.fromkeys(("nan_to_num", "real", "imag", "conj", "conjugate", "ravel", "transpose", "atleast_1d", "diag"), None),
    **dict.fromkeys(("atleast_2d", "atleast_3d", "flipud", "fliplr", "rot90", "triu", "tril", "tan", "cumsum"), None),
    **dict.fromkeys(("sum", "mean", "prod", "var", "std", "max", "min", "amax", "amin", "trace", "diff"), None),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "sqrt", "reciprocal"), POSITIVE),
    **dict.fromkeys(("arcsin", "arccos", "arctanh"), INSIDE),
    "arccosh": ABOVE_ONE,
}
CALLS = {
    # elementwise, with numbers of the host's
    "x + 2": lambda x: x + 2,
    "2 - x": lambda x: 2.0 - x,
    "3 * x": lambda x: onp.float64(3) * x,
    "x / 3": lambda x: x / 3,
    "1 / x": lambda x: 1 / (x * x + 1),
    "x**2": lambda x: x**2,
    "x**3": lambda x: x**3,
    "x**4": lambda x: x**4,
    "x**0": lambda x: x**0 + x,
    "x**1": lambda x: x**1,
    "x**-1": lambda x: (x * x + 1) ** -1,
    "x**0.5": lambda x: (x * x + 1) ** 0.5,
    "x**2.5": lambda x: (x * x + 1) ** 2.5,
    "2**x": lambda x: 2.0**x,
    "x**x": lambda x: (x * x + 1) ** x,
    "x % 0.7": lambda x: x % 0.7,
    "mod": lambda x: np.mod(x, x * x + 1),
    "-x": lambda x: -x,
    "abs(x)": abs,
    "@": lambda x: x @ x.T,
    "r@": lambda x: (x @ x.T).T @ x,
    # of two arrays
    "add": lambda x: x + x[:1],
    "subtract": lambda x: x[:, :1] - x,
    "multiply": lambda x: x * x[0],
    "xx": lambda x: x * x,
    "divide": lambda x: x / (x[:1] ** 2 + 1),
    "maximum": lambda x: np.maximum(x, x[::-1]),
    "minimum": lambda x: np.minimum(x, 0.1),
    "fmax": lambda x: np.fmax(x[:, :1], x),
    "fmin": lambda x: np.fmin(x, x[1]),
    "tied": lambda x: np.maximum(x, x),
    "logaddexp": lambda x: np.logaddexp(x, x[0]),
    "logaddexp2": lambda x: np.logaddexp2(x[:, :1], x),
    "arctan2": lambda x: np.arctan2(x, x[0] + 3),
    "copysign": lambda x: np.copysign(x * x, x),
    "heaviside": lambda x: np.heaviside(np.floor(x), x),
    "hypot": lambda x: np.hypot(x, x[:1] + 2),
    "remainder": lambda x: np.remainder(x, 0.3),
    "true_divide": lambda x: np.true_divide(x, x * x + 1),
    "power": lambda x: np.power(x * x + 1, x[0]),
    "where": lambda x: np.where(x > 0, x**2, x),
    "where number": lambda x: np.where(x > 0, x, 0.5),
    "where broadcast": lambda x: np.where(x[:1] > 0, x, x[0]),
    "clip": lambda x: np.clip(x, -0.4, 0.7),
    "x.clip": lambda x: x.clip(-0.4, None),
    "angle": lambda x: np.angle(x + 1j * (x + 3)),
    # reductions
    "sum 0": lambda x: np.sum(x, axis=0),
    "sum keep": lambda x: np.sum(x, axis=-1, keepdims=True),
    "x.sum": lambda x: x.sum(1),
    "sum tuple": lambda x: np.sum(x, axis=(0, 1)),
    "mean 1": lambda x: np.mean(x, axis=1),
    "x.mean": lambda x: x.mean(),
    "prod 0": lambda x: np.prod(x, axis=0),
    "var 0": lambda x: np.var(x, axis=0, ddof=1),
    "x.var": lambda x: x.var(),
    "std 1": lambda x: np.std(x, axis=1, keepdims=True),
    "std of one": lambda x: np.std(x[:1], axis=0) + x[1],
    "std tuple": lambda x: np.std(x, axis=(0, 1)),
    "max 0": lambda x: np.max(x, axis=0),
    "min keep": lambda x: np.min(x, axis=1, keepdims=True),
    "x.max": lambda x: x.max(),
    "max tie": lambda x: np.max(np.where(x > 0, 1.0, x) + x[:1, :1], axis=1),
    "cumsum 1": lambda x: np.cumsum(x, axis=1),
    # shape
    "flip": lambda x: np.flip(x, 0) * x,
    "sort 2-D": lambda x: np.sort(x, 0) * x,
    "partition 2-D": lambda x: np.max(np.partition(x, 1)[:, :1]) * x,
    "repeat -1": lambda x: np.repeat(x, 2, axis=-1),
    "full": lambda x: np.full((2, 3, 4), x) * x,
    "full_like": lambda x: np.full_like(x, x[1]) * x,
    "full_like of a number": lambda x: np.full_like(x, x[1, 1], shape=(2, 4)),
    "broadcast_to new": lambda x: np.broadcast_to(x, (2, 3, 4)),
    "prod of a zero": lambda x: np.prod(x * (x > 0), axis=1),
    "outer 2-D": lambda x: np.outer(x, x[0]),
    "reshape": lambda x: np.reshape(x, (-1,)),
    "x.reshape": lambda x: x.reshape(4, 3),
    "x.T": lambda x: x.T,
    "squeeze": lambda x: np.squeeze(x[None]),
    "expand_dims": lambda x: np.expand_dims(x, 1),
    "x.flatten": lambda x: x.flatten(),
    "transpose axes": lambda x: np.transpose(x[None] * x[:, None], (-1, 0, 1)),
    "rollaxis": lambda x: np.rollaxis(x, 1),
    "swapaxes": lambda x: np.swapaxes(x, 0, 1),
    "moveaxis": lambda x: np.moveaxis(x, 0, -1),
    "roll": lambda x: np.roll(x, 1, axis=1),
    "roll flat": lambda x: np.roll(x, 2),
    "repeat": lambda x: np.repeat(x, 2, axis=1),
    "roll both": lambda x: np.roll(x, (1, 2), axis=(0, 1)),
    "repeat flat": lambda x: np.repeat(x, 3),
    "tile": lambda x: np.tile(x, (2, 1)),
    "broadcast_to": lambda x: np.broadcast_to(x[:1], (3, 4)),
    "pad": lambda x: np.pad(x, 1, "constant"),
    "pad edge": lambda x: np.pad(x, ((1, 0), (0, 2)), "edge"),
    "pad reflect": lambda x: np.pad(x, 1, "reflect"),
    "pad wrap": lambda x: np.pad(x, 1, "wrap"),
    "split": lambda x: np.split(x, 2, axis=1)[1],
    "array_split": lambda x: np.array_split(x, 3, axis=1)[0],
    "vsplit": lambda x: np.vsplit(x, 3)[2],
    "hsplit": lambda x: np.hsplit(x, 2)[0] * np.hsplit(x, 2)[1],
    "dsplit": lambda x: np.dsplit(x[None], 2)[0],
    "diff n": lambda x: np.diff(x, n=2, axis=0),
    "gradient axis": lambda x: np.gradient(x, axis=1),
    "trace k": lambda x: np.trace(x, 1) * x[0],
    "triu k": lambda x: np.triu(x, 1),
    "diag k": lambda x: np.diag(x[0], 2),
    "astype": lambda x: x.astype("f4").astype("f8"),
    "sort": lambda x: np.sort(x[0] ** 2),
    "rot90 k": lambda x: np.rot90(x, 3),
    "partition": lambda x: np.partition(x[0], 2)[2] * x,
    "real_part": lambda x: np.real(x + 1j * x**2),
    # elements
    "x[0]": lambda x: x[0],
    "x[1, 2]": lambda x: x[1, 2] * x,
    "x[-1]": lambda x: x[-1] * x,
    "x[::-1]": lambda x: x[::-1],
    "x[1:, ::2]": lambda x: x[1:, ::2],
    "x[None]": lambda x: x[None],
    "x[..., 0]": lambda x: x[..., 0],
    "x[:]": lambda x: x[:],
    "slices": lambda x: x[1:] * x[:-1] + x[1:] ** 2,
    "many": lambda x: x[0] * x[1] + x[2] * x[0, 0],
    "x[mask]": lambda x: x[x > 0],
    "x[array]": lambda x: x[np.argsort(x[:, 0])],
    "x[repeated]": lambda x: x[:, np.argmax(x, axis=0)],
    # assembled
    "concatenate": lambda x: np.concatenate([x, x[:1] ** 2]),
    "concatenate 1": lambda x: np.concatenate((x, x * x), axis=-1),
    "concatenate flat": lambda x: np.concatenate([x, x[0]], axis=None),
    "stack": lambda x: np.stack([x, x**2], axis=1),
    "stack last": lambda x: np.stack([x, x[::-1]], axis=-1),
    "array": lambda x: np.array([x[0, 0], x[1, 1] ** 2, 3.0]),
    "array nest": lambda x: np.array([[x[0, 0], x[0, 1]], [x[1, 0], x[0, 0] ** 2]]),
    "vstack": lambda x: np.vstack([x[0], x]),
    "hstack": lambda x: np.hstack([x, x**2]),
    "hstack rows": lambda x: np.hstack([x[0], x[1]]),
    "dstack": lambda x: np.dstack([x, x]),
    "column_stack": lambda x: np.column_stack([x[:, 0], x]),
    "append": lambda x: np.append(x, x[0] ** 2),
    "append axis": lambda x: np.append(x, x[:1], axis=0),
    "linspace": lambda x: np.linspace(x[0, 0], x[1, 1] ** 2, 5),
    # products
    "dot": lambda x: np.dot(x, x.T),
    "dot number": lambda x: np.dot(x, x[0, 1]) * np.dot(x[1, 2], x),
    "dot numbers": lambda x: np.dot(x[0, 1], x[1, 2]) * x,
    "dot vectors": lambda x: np.dot(x[0], x[1]),
    "dot vector": lambda x: np.dot(x, x[0]),
    "vector dot": lambda x: np.dot(x[:, 0], x),
    "dot 3": lambda x: np.dot(x[None] * x[:, None], x.T),
    "dot 3 3": lambda x: np.dot(x[None] + x[:, None], np.swapaxes(x[:, None] * x, 1, 2)),
    "matmul": lambda x: np.matmul(x[None], x.T * x[0, 0]),
    "matmul vector": lambda x: np.matmul(x[None] * x[:, None], x[1]),
    "inner": lambda x: np.inner(x, x[:2]),
    "outer": lambda x: np.outer(x[0], x[1]),
    "kron": lambda x: np.kron(x[:2], x),
    "tensordot": lambda x: np.tensordot(x, x.T, 1),
    "tensordot 2": lambda x: np.tensordot(x[None] * x[:, None], x, 2),
    "tensordot axes": lambda x: np.tensordot(x[None] * x[:, None], x, ([2, 0], [1, 0])),
    "cross": lambda x: np.cross(x[:, :3], x[::-1, 1:]),
    "einsum": lambda x: np.einsum("ij,kj->ik", x, x**2),
    "einsum sum": lambda x: np.einsum("ij->i", x),
    "einsum implicit": lambda x: np.einsum("ij,jk", x, x.T),
    "einsum three": lambda x: np.einsum("i,ij,j->", x[:, 0], x, x[0]),
    "einsum ...": lambda x: np.einsum("...i,i", x, x[0]),
    "einsum ones": lambda x: np.einsum("ij,kj->ik", x[:, :1], x),
    "einsum alone": lambda x: np.einsum("ij,k->k", x, x[0]),
    "einsum lists": lambda x: np.einsum(x, [0, 1], x, [2, 1], [0, 2]),
    # functions and methods without a rule of autograd
    "cumprod": lambda x: np.cumprod(x, axis=0),
    "positive": lambda x: +x,
    "divmod": lambda x: divmod(x, 0.7)[1],
    "trace of axes": lambda x: np.trace(x[None] * x[:, :1, None], 1, 2, 1),
    "transpose method": lambda x: x.transpose(1, 0).copy() @ x.conj().real,
}


def central(x):
    return np.concatenate([x[1:2] - x[:1], (x[2:] - x[:-2]) / 2, x[-1:] - x[-2:-1]])


def whole(z):
    return np.real(fft.ifft(np.concatenate([z, np.conj(z[:, :0:-1])], axis=1)))


# Where autograd has no derivative on the host, the same written otherwise is the reference.
OTHERWISE = {
    "irfft odd": (
        lambda x: fft.irfft(x[:, :3] + 1j * x[:, 1:], 5),
        lambda x: whole(x[:, :3] + 1j * x[:, 1:]),
    ),
    "rfft odd": (lambda x: np.imag(fft.rfft(x[:, :3])), lambda x: np.imag(fft.fft(x[:, :3])[:, :2])),
    "gradient": (lambda x: np.gradient(x)[0] * np.gradient(x)[1], lambda x: central(x) * central(x.T).T),
    "gradient spacing": (lambda x: np.gradient(x, 0.5, axis=0), lambda x: 2 * central(x)),
    "block": (lambda x: np.block([[x, x**2], [x, x]]), lambda x: np.vstack([np.hstack([x, x**2]), np.hstack([x, x])])),
    "multi_dot": (lambda x: linalg.multi_dot([x, x.T, x]), lambda x: x @ x.T @ x),
    "diagonal": (lambda x: np.diagonal(x, 1), lambda x: x[onp.arange(3), onp.arange(3) + 1]),
    "diagonal tall": (lambda x: np.diagonal(x.T, -2), lambda x: x.T[onp.arange(2) + 2, onp.arange(2)]),
    "diagonal wide": (lambda x: np.diagonal(x, -1), lambda x: x[onp.arange(2) + 1, onp.arange(2)]),
    "diagonal stack": (
        lambda x: np.diagonal(x[None] * x[:, None], 0, 1, 2),
        lambda x: (x[None] * x[:, None])[:, onp.arange(3), onp.arange(3)],
    ),
}
MATRICES = {
    "det": lambda x: linalg.det(x),
    "inv": lambda x: linalg.inv(x),
    "solve": lambda x: linalg.solve(x, x.T[:, :2] ** 2),
    "solve vector": lambda x: linalg.solve(x, x[0]),
    "norm": lambda x: linalg.norm(x) * x,
    "norm axis": lambda x: linalg.norm(x, axis=1),
    "norm keep": lambda x: linalg.norm(x, axis=0, keepdims=True) * x,
    "norm 3": lambda x: linalg.norm(x, ord=3, axis=0),
    "pinv": lambda x: linalg.pinv(x[:, :2]),
    "cholesky": lambda x: linalg.cholesky(x @ x.T),
    "slogdet": lambda x: linalg.slogdet(x)[1] * x,
    "eigh": lambda x: linalg.eigh(x + x.T)[0],
    "eigh vectors": lambda x: linalg.eigh(x @ x.T)[1] ** 2,
    "eigh U": lambda x: linalg.eigh(x @ x.T, "U")[0],
}
# Singular values have no tangent, on the host neither.
REVERSE_ONLY = {
    "svd": lambda x: linalg.svd(x, compute_uv=False),
    "svd vectors": lambda x: linalg.svd(x, full_matrices=False)[0] ** 2 * linalg.svd(x, full_matrices=False)[2][0] ** 2,
}
TRANSFORMS = {
    "fft": lambda x: np.abs(fft.fft(x)) ** 2,
    "ifft": lambda x: np.real(fft.ifft(x, axis=0)),
    "fft n": lambda x: np.imag(fft.fft(x, 6)),
    "fft2": lambda x: np.real(fft.fft2(x)),
    "ifft2": lambda x: np.imag(fft.ifft2(x)),
    "fftn": lambda x: np.real(fft.fftn(x)),
    "ifftn": lambda x: np.real(fft.ifftn(x)),
    "fftshift": lambda x: fft.fftshift(x) * x,
    "ifftshift": lambda x: fft.ifftshift(x) * x,
    "rfft": lambda x: np.abs(fft.rfft(x)) ** 2,
    "irfft": lambda x: fft.irfft(fft.rfft(x) ** 2),
    "rfft ortho": lambda x: np.real(fft.rfft(x, norm="ortho")) ** 2,
    "rfft2": lambda x: np.abs(fft.rfft2(x)) ** 2,
    "rfftn": lambda x: np.imag(fft.rfftn(x, (5, 3), (0, 1))),
    "irfft2": lambda x: fft.irfft2(x * (1 + 2j)),
    "irfftn": lambda x: fft.irfftn(fft.fftn(x), (2, 5), (0, 1), norm="ortho"),
    "rfft n": lambda x: np.imag(fft.rfft(x, 6, axis=0)),
    "irfft n": lambda x: fft.irfft(fft.fft(x), 4, norm="ortho"),
}
INDEXED = {
    "tuple index": lambda x: x[(0, 1, 0), (2, 2, 1)],
    "take flat": lambda x: x.take([3, 1]),
    "take": lambda x: np.take(x, [0, -1, 0], axis=1),
    "x[list]": lambda x: x[[0, 2, 0]],
    "x[pairs]": lambda x: x[[0, 1, 1], [2, 3, 3]],
    "x[host]": lambda x: x[:, onp.array([1, 1, 0])],
}
