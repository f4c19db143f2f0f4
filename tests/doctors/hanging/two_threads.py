# A thread receives what isn't sent, and the main thread waits for it.
# environment: MPIAD_TIMEOUT=2
# arguments: -m mpiad.watch
# thorough: yes
# says: 1 +waits [0-9.]+ s +recv\(from rank 0 with tag 1\) +{here}.* +rank 0
import threading

from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 1:
    thread = threading.Thread(target=lambda: comm.recv(source=0, tag=1))  # here
    thread.start()
    thread.join()
comm.Barrier()
