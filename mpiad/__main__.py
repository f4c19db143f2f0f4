"""``python -m mpiad``, ``mpiexec -n 4 python -m mpiad``: report what it runs on, and test that it works."""

import sys

from mpiad.debug.environment import main

sys.exit(main())
