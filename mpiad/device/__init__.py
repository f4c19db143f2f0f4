"""Arrays on GPUs: selection of a GPU per rank, copies between host and device, and traced device arrays.

Importing mpiad doesn't load CuPy: `select` and `to_device` load it.
"""

from mpiad.device import boxes, numpy
from mpiad.device.transfer import select, to_device, to_host
from mpiad.transport.devices.device_arrays import ArrayModule, is_device_array, register_arrays, when_registered

when_registered(boxes.register)

__all__ = ["ArrayModule", "is_device_array", "numpy", "register_arrays", "select", "to_device", "to_host"]
__dir__ = __all__.copy
