"""Arrays on GPUs: a GPU for each rank, arrays to it and back, and their registration with autograd.

Nothing of CuPy's is loaded before one of its arrays is met, or `select` or `to_device` is called.
"""

from mpiad.device import boxes, numpy
from mpiad.device.transfer import select, to_device, to_host
from mpiad.transport.device_arrays import ArrayModule, is_device_array, register_arrays, when_registered

when_registered(boxes.register)

__all__ = ["ArrayModule", "is_device_array", "numpy", "register_arrays", "select", "to_device", "to_host"]
