# A driven function is called after the end of drive.
# raises: RuntimeError
# says: RuntimeError: drive: a driven function was called after the end of `drive`.
# says: {here}
# together: yes

import mpiad

kept = mpiad.drive(lambda f: f, lambda x: x**2)
if mpiad.mpi_rank() == 0:
    kept(1.0)  # here
