import re

import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import each_array

import mpiad


@each_array
def test_against_reference(rngs, size, dtype, shape, layout):
    shape = (size, *shape)
    check(mpiad.mpi_alltoall, reference.alltoall([shape] * size), arrays(rngs, shape, dtype, layout), rngs)


def test_integers_and_booleans(rngs, size):
    check_exact(mpiad.mpi_alltoall, reference.alltoall([(size, 3)] * size), rngs)


def test_new_memory(size):
    check_new_memory(mpiad.mpi_alltoall, np.ones((size, 3)))


def test_first_axis_that_is_not_the_number_of_ranks(size):
    for shape in [(), (size + 1,), (size + 1, size)]:
        text = f"mpi_alltoall: .*first axis of x must be the number of ranks, {size}, but x has shape "
        with pytest.raises(ValueError, match=text + re.escape(str(shape))):
            mpiad.mpi_alltoall(np.ones(shape))


def test_advice_names_no_argument_that_it_has_not(size):
    with pytest.raises(ValueError, match=rf"Reshape x to \({size}, \.\.\.\), or pad it") as raised:
        mpiad.mpi_alltoall(np.ones(2 * size + 1))
    assert "axis=" not in str(raised.value)
