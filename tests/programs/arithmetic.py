"""The local part of random programs, written once for both interpreters.

`num` is either `autograd.numpy`'s functions (`on_arrays`) or the reference's (`jets`). Nothing here communicates, and
the local derivatives of the two have nothing in common.
"""

from types import SimpleNamespace

import autograd.numpy as anp
import numpy as np
from programs.steps import LENGTH

import mpiad
import mpiad.device.numpy as device_numpy

ON_DEVICES = []
"""The module of the stand-in for devices, if the arrays of programs are there."""


def placed(x):
    """Return an array, or number, where programs have their arrays."""
    return mpiad.device.to_device(x, like=ON_DEVICES[0].on_device(0.0)) if ON_DEVICES else x


def on_arrays(single):
    """Return the functions that act on arrays."""
    real = np.float32 if single else np.float64
    joining = device_numpy if ON_DEVICES else anp
    return SimpleNamespace(
        sin=anp.sin, cos=anp.cos, exp=anp.exp, tanh=anp.tanh, real=anp.real, imag=anp.imag, conj=anp.conj,
        concatenate=joining.concatenate, stack=joining.stack, reshape=anp.reshape, dot=anp.dot, total=anp.sum,
        rot90=anp.rot90, rollaxis=anp.rollaxis, transpose=anp.transpose, swapaxes=anp.swapaxes,
        stop=mpiad.stop_gradient, segment_sum=mpiad.segment_sum, largest=anp.max, quotient=lambda x, y: x / y,
        constant=lambda x: placed(np.asarray(x, real)),
    )  # fmt: skip


SOURCES, ENDS = np.array([2, 0, 1, 0, 2]), np.array([0, -1, -3, 1, 0], np.int32)
"""The edges of a graph of three nodes: unsorted indices, some repeated, some negative."""


def peak(num, a):
    """Return the largest entry of a quotient."""
    x = num.real(a) + num.constant([0.1, -0.35, 0.6])  # entries that are equal, such as zeros, are no longer
    return num.largest(num.quotient(x, x * x + num.constant([1.0, 1.0, 1.0])))


FORMS = (
    lambda num, a, b: a * b,
    lambda num, a, b: num.sin(a) + b[::-1],
    lambda num, a, b: num.exp(a / 2) - 1,
    lambda num, a, b: num.constant([0.3, -0.2, 0.1]),
    lambda num, a, b: a * a - b * num.conj(b) / 2,
    lambda num, a, b: num.stop(a) * b + a / 2,
    lambda num, a, b: num.concatenate([b[1:], a[:1]]) * 2,
    lambda num, a, b: num.cos(num.sin(a) * b + a),
    lambda num, a, b: num.rot90(a[:, None] * num.sin(b))[1] + b,
    lambda num, a, b: num.rollaxis(num.stack([a * b, num.sin(a), b]), 1)[0],
    lambda num, a, b: num.reshape(num.stack([num.cos(b), a * a]), (3, 2), order="F")[:, 1],
    lambda num, a, b: num.transpose(num.stack([a, a - b, num.tanh(b)]))[2] * a,
    lambda num, a, b: num.swapaxes(num.sin(a)[:, None] + b, 0, 1)[::-1, ::2][:, 1],
    lambda num, a, b: num.reshape(num.transpose(num.reshape(num.concatenate([a * b, b]), (2, 3))), (6,), order="F")[1:6:2],
    lambda num, a, b: num.sin(a)[ENDS[:3]] * b,
    lambda num, a, b: num.segment_sum((a[SOURCES] - b[ENDS]) * num.sin(a[ENDS]), SOURCES, 3),
    lambda num, a, b: b * peak(num, a) + num.sin(a),
)
"""Functions of two registers; one depends on neither. Of six NumPy makes views of temporary arrays."""


def pattern(rows, columns):
    """Return a matrix without structure."""
    return np.cos(1.0 + 1.3 * np.arange(rows)[:, None] + 2.7 * np.arange(columns) ** 1.5)


def take(num, a, part):
    """Return the part of a register that is communicated: its first entries, or one number without dimensions (-1)."""
    return a[0] if part == -1 else a[:part]


def fill(num, y, part):
    """Make a whole register of a part."""
    if part == -1:
        return y * num.constant([1.0, -0.5, 0.25])
    return y if part == LENGTH else num.concatenate([y, num.constant([0.5] * (LENGTH - part))])


def mix(num, y):
    """Make a register of an array of any shape."""
    count = int(np.prod(y.shape))
    return num.dot(num.constant(pattern(LENGTH, count)), num.reshape(y, (count,)))


def copies(blocks, sender, receiver):
    """Return the number of arrays that a rank sends to another one, both counted in their group."""
    return 1 if blocks == "equal" else (1 + sender + 2 * receiver) % 3


def spread(num, a, shape):
    """Make an array of a shape of a register."""
    return num.reshape(num.dot(num.constant(pattern(int(np.prod(shape)), LENGTH)), a), shape)


def store(num, y, is_complex):
    """Return what a register keeps: real or complex, of size about one at most."""
    if y.dtype.kind != "c":
        y = num.tanh(y)
        return y * (0.8 + 0.6j) if is_complex else y
    if is_complex:
        return num.sin(num.real(y)) + 1j * num.sin(num.imag(y))
    return num.tanh(num.real(y) + num.imag(y) / 2)


def begin(num, x, kinds):
    """Return the registers that a rank begins with."""
    return [store(num, y, kind) for y, kind in zip((x[:LENGTH], x[LENGTH:] / 2, num.cos(x[:LENGTH])), kinds)]


def loss(num, registers, rank):
    """Return a rank's real number, which depends on all of its registers."""
    parts = [num.real(y) + num.imag(y) / 2 if y.dtype.kind == "c" else y for y in registers]
    weights = num.constant(pattern(1, LENGTH)[0] + rank / 4)
    return num.total(parts[0] * parts[1] * weights) + num.total(parts[2] * parts[2] + parts[0] / 4)


def inputs(program):
    """Return all ranks' inputs and directions, in double precision; those of rank 0 for all where they share one."""
    found = []
    for rank in range(program.size):
        rng = np.random.default_rng([program.seed, 0 if program.shared else rank])
        pair = rng.standard_normal((2, 2 * LENGTH))
        if program.complex_input:
            pair = pair + 1j * rng.standard_normal((2, 2 * LENGTH))
        # Rounded as the ranks' own are, so that both interpreters begin with the same numbers.
        found.append(pair.astype(np.complex64 if program.complex_input else np.float32).astype(pair.dtype))
    return [pair[0] for pair in found], [pair[1] for pair in found]
