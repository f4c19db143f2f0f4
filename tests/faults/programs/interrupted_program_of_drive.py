# The program of drive is interrupted on the root, between two evaluations: all ranks raise.
# raises: mpiad.errors.WorkerError
# says: rank \d ended the job by an exception that nobody caught
# says: {here}
# says: drive: the root, rank 0, raised KeyboardInterrupt
# thorough: yes

import os
import signal
import time

import mpiad


def program(f):
    f(1.0)
    os.kill(os.getpid(), signal.SIGINT)  # here
    time.sleep(10.0)


mpiad.drive(program, lambda x: x**2)
