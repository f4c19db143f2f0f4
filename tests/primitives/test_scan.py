import numpy as np
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import EXACT_DTYPES, each_array

import mpiad


@each_array
def test_inclusive(rngs, size, dtype, shape, layout):
    check(mpiad.mpi_scan, reference.scan([shape] * size), arrays(rngs, shape, dtype, layout), rngs)


@each_array
def test_exclusive(rngs, size, dtype, shape, layout):
    check(mpiad.mpi_exscan, reference.exscan([shape] * size), arrays(rngs, shape, dtype, layout), rngs)


def test_integers(rngs, size):
    check_exact(mpiad.mpi_scan, reference.scan([(2, 3)] * size), rngs, EXACT_DTYPES[1:])
    check_exact(mpiad.mpi_exscan, reference.exscan([(2, 3)] * size), rngs, EXACT_DTYPES[1:])


def test_new_memory():
    check_new_memory(mpiad.mpi_scan, np.ones(3))
    check_new_memory(mpiad.mpi_exscan, np.ones(3))


def test_numbers(rank):
    for one in (1, 1.0, 1j, np.float32(1)):
        for scan, count in ((mpiad.mpi_scan, rank + 1), (mpiad.mpi_exscan, rank)):
            y = scan(one)
            assert y == one * count and y.dtype == np.result_type(one)
