# A program that mpi4py.futures runs on one rank communicates.
# raises: CommunicatorError
# says: mpi_sum: all ranks must call this, but `python -m mpi4py.futures` runs .* mpiad\.mpi_map, or by

import runpy
import sys

# As `python -m mpi4py.futures -c "import mpiad; mpiad.mpi_sum(1.0)"` does.
sys.argv = ["", "-c", "import mpiad; mpiad.mpi_sum(1.0)"]
runpy.run_module("mpi4py.futures", run_name="__main__")
