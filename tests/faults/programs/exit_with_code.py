# One rank leaves with an error, and the others wait for it.
# says: mpiad: rank 1 left the program by sys.exit\(3\) at {here} in main, 5 s ago, and other ranks have not left
# thorough: yes

import sys

import mpiad

mpiad.mpi_init()


def main():
    if mpiad.mpi_rank() == 1:
        sys.exit(3)  # here
    mpiad.mpi_allreduce(1.0)


main()
