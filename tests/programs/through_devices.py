"""What ranks of `fuzz.py` run first (`--before`): arrays that are communicated lie on devices whose memory a node shares.

    python tests/fuzz.py --programs 1000 --ranks 2 3 4 --compiled none --before tests/programs/through_devices.py

The devices are late: each queued operation begins after a random time of up to 0.2 ms.
"""

import atexit

from device_ways import SETTINGS, sharing
from programs import on_devices, on_ranks

import mpiad
from mpiad.transport.devices import device_settings

mpiad.mpi_init()
device_settings.put(SETTINGS["shared"])
shared = sharing()
shared.__enter__().stream.late = 2e-4
atexit.register(shared.__exit__, None, None, None)
on_ranks.mpiad = on_devices.calls()
