"""Arrays on GPUs: the GPU of each rank, copies to it and back, and traced device arrays.

CuPy is loaded when `select` or `to_device` is called, or by the user.
"""

from mpiad.device import boxes, numpy
from mpiad.device.transfer import select, to_device, to_host
from mpiad.transport.device_arrays import ArrayModule, is_device_array, register_arrays, when_registered

when_registered(boxes.register)

__all__ = ["ArrayModule", "is_device_array", "numpy", "register_arrays", "select", "to_device", "to_host"]
