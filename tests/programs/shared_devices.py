"""What ranks of `fuzz.py --devices` run first (`--before`): the ranks of a node share the memory of the stand-in.

    python tests/fuzz.py --programs 100 --ranks 2 3 --devices --compiled all some --before tests/programs/shared_devices.py

So arrays of compiled programs travel in device memory, and loops of any size are divided while they do. The devices are
late: each queued operation begins after a random time of up to 0.1 ms.
"""

import atexit

from device_ways import SETTINGS, sharing

import mpiad
from mpiad.programs import device_replay
from mpiad.transport.devices import device_settings

mpiad.mpi_init()
device_replay._LARGE = 1
device_settings.put(SETTINGS["shared"])
shared = sharing()
shared.__enter__().stream.late = 1e-4
atexit.register(shared.__exit__, None, None, None)
