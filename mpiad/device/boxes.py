"""Registration of device arrays with autograd: boxes (traced arrays) and vector spaces."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import VSpace, defjvp, defvjp, primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.numpy.numpy_vspaces import ArrayVSpace, ComplexArrayVSpace
from numpy.typing import DTypeLike

from mpiad._typing import Array, Function
from mpiad.transport.devices.device_arrays import arrays_of


@primitive
def cast(x: Array, dtype: np.dtype) -> Array:
    """Convert a device array to another dtype; conversion to a real dtype discards imaginary parts."""
    if x.dtype.kind == "c" and np.dtype(dtype).kind != "c":
        x = x.real
    return x.astype(dtype)


def _cast_vjp(ans: Array, x: Array, dtype: np.dtype) -> Function:
    original = x.dtype
    return lambda g: cast(anp.real(g) if anp.iscomplexobj(g) and original.kind != "c" else g, original)


defvjp(cast, _cast_vjp)
defjvp(cast, lambda g, ans, x, dtype: cast(g, dtype))


class DeviceBox(ArrayBox):
    """A traced device array, with the operators and methods of a traced NumPy array."""

    __slots__ = ()
    shape = property(lambda self: self._value.shape)
    ndim = property(lambda self: len(self._value.shape))
    size = property(lambda self: self._value.size)
    dtype = property(lambda self: self._value.dtype)

    def astype(self, dtype: DTypeLike, *args: object, **kwargs: object) -> Array:
        """Convert the array to another dtype."""
        return cast(self, np.dtype(dtype))


class DeviceSpace(ArrayVSpace):
    """The real arrays of one shape and dtype on one device."""

    def __init__(self, value: Array):
        # ArrayVSpace.__init__ isn't called, since it would convert the value to a NumPy array.
        self.shape, self.dtype = value.shape, value.dtype
        self.arrays: Any = arrays_of(value)

    def zeros(self) -> Array:
        """Return the zero vector."""
        return self.arrays.full(self.shape, 0, self.dtype)

    def ones(self) -> Array:
        """Return the vector of ones, or of 1 + 1j for complex arrays."""
        return self.arrays.full(self.shape, 1 + 1j if self.iscomplex else 1, self.dtype)

    def standard_basis(self) -> Array:
        """Yield the unit vectors, for complex arrays also multiplied by 1j."""
        for idx in np.ndindex(*self.shape):
            for unit in (1.0, 1.0j) if self.iscomplex else (1.0,):
                vector = self.zeros()
                vector[idx] = unit
                yield vector

    def randn(self) -> Array:
        """Return normally distributed numbers of NumPy's global generator, so that NumPy's seed determines the numbers."""
        noise = np.random.randn(*self.shape)  # noqa: NPY002
        if self.iscomplex:
            noise = noise + 1j * np.random.randn(*self.shape)  # noqa: NPY002
        return self.arrays.to_device(np.asarray(noise, self.dtype))


class ComplexDeviceSpace(DeviceSpace, ComplexArrayVSpace):
    """The complex arrays of one shape and dtype on one device."""


def register(kind: type) -> None:
    """Register a type of device arrays with autograd."""
    DeviceBox.register(kind)
    VSpace.register(kind, lambda x: (ComplexDeviceSpace if x.dtype.kind == "c" else DeviceSpace)(x))
