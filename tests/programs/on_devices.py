"""The library's calls as random programs make them, with every array that is communicated on a device.

What the program computes itself stays on the host: the copies are differentiable, and so part of what is compared.
"""

from types import SimpleNamespace

import numpy as np
from autograd.tracer import getval
from device_double import on_device

import mpiad
from mpiad.device import to_device, to_host

LIKE = on_device(0.0)
OF_ARRAYS = (
    "allreduce", "reduce", "sum", "scan", "exscan", "bcast", "gather", "allgather", "scatter", "reduce_scatter", "alltoall",
    "exchange", "sendrecv", "send", "recv",
)  # fmt: skip
OF_REQUESTS = ("isend", "irecv", "iallreduce")


def there(x):
    """Return an array on the device; what isn't one of real or complex numbers as it is."""
    plain = getval(x)
    return to_device(x, like=LIKE) if isinstance(plain, (np.ndarray, np.generic)) and plain.dtype.kind in "fc" else x


def calls():
    """Return what stands for the package `mpiad` in `on_ranks`."""
    found = {name: getattr(mpiad, name) for name in mpiad.__all__}
    for name in OF_ARRAYS + OF_REQUESTS:
        found[f"mpi_{name}"] = _on_device(getattr(mpiad, f"mpi_{name}"), back=name in OF_ARRAYS)
    found["mpi_wait"] = lambda request: to_host(mpiad.mpi_wait(request))
    found["mpi_waitall"] = lambda requests: [to_host(value) for value in mpiad.mpi_waitall(requests)]
    return SimpleNamespace(**found)


def _on_device(call, back):
    def run(x, *args, **kwargs):
        result = call(there(x), *args, **kwargs)
        return to_host(result) if back else result

    return run
