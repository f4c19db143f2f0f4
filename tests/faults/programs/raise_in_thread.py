# A thread of one rank raises, and its main thread waits for it.
# raises: EOFError
# says: rank 1 ended the job by an exception that nobody caught.*{here}.*EOFError: no header
# thorough: yes

import threading

import mpiad


def load():
    raise EOFError("no header")  # here


if mpiad.mpi_rank() == 1:
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
mpiad.mpi_recv(0.0, source=1 - mpiad.mpi_rank())
