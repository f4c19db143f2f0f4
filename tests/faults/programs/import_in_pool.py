# A program that mpi4py.futures runs on one rank imports the library.
# raises: CommunicatorError
# says: import mpiad: all ranks must call this, but `python -m mpi4py.futures` runs .* mpiad\.mpi_map, or by

import runpy
import sys

# As `python -m mpi4py.futures -c "import mpiad"` does.
sys.argv = ["", "-c", "import mpiad"]
runpy.run_module("mpi4py.futures", run_name="__main__")
