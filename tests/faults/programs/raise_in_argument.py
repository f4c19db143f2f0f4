# The check of one rank's argument raises, inside a collective.
# thorough: yes
# raises: ValueError
# says: rank 1 ended the job.*{here}.*ValueError: mpi_bcast: root must be .*got 2

import mpiad

mpiad.mpi_bcast(1.0, root=2 * mpiad.mpi_rank())  # here
