# A rank of a grid doesn't exchange with its neighbors.
# ranks: 4
# arguments: -m mpiad.watch
# thorough: yes
# says: 1 +waits [0-9.]+ s +neighbor_allgather\(on communicator .*\) +{here} +rank 0
from mpi4py import MPI

grid = MPI.COMM_WORLD.Create_cart([4], periods=[False])
if grid.rank > 0:
    grid.neighbor_allgather(grid.rank)  # here
grid.Barrier()
