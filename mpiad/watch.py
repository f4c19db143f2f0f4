"""``mpiexec -n 4 python -m mpiad.watch program.py``: run a program, and end it with a table of all ranks if it hangs."""

import sys

from mpiad.debug.checked import main

if __name__ == "__main__":
    main(sys.argv[1:])
