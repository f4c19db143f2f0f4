"""``python -m mpiad``, ``mpiexec -n 4 python -m mpiad``: report the environment, and run a self-test."""

import sys

from mpiad.debug.environment import main

sys.exit(main())
