"""Let the launcher ask any Python program that it started for its stacks (SIGUSR1).

Python imports this at start-up because `launch.py` puts the folder on PYTHONPATH, so the programs
themselves need no preparation. The name of the file says who writes: `rank.pid`.
"""

import faulthandler
import os
import signal


def _report_file():
    folder = os.environ.get("MPIAD_LAUNCH_FOLDER")
    if not folder:
        return None
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
    rank = next((os.environ[name] for name in names if name in os.environ), "0")
    try:
        return open(os.path.join(folder, f"{rank}.{os.getpid()}"), "a")
    except OSError:  # the launcher has gone
        return None


report_file = _report_file()
if report_file is not None:
    faulthandler.register(signal.SIGUSR1, file=report_file)
