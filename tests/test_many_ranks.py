"""The checks of `make test-ranks`, on the fewest ranks on which each has two neighbors or more."""

import re

import pytest

pytestmark = [pytest.mark.serial, pytest.mark.launches]


@pytest.mark.thorough
@pytest.mark.limit(300)
def test_four_ranks(mpirun):
    done = mpirun(4, "tests/many_ranks.py", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"4 ranks: all right in \d+ s: 79 of primitives .*, 108 of domains .*, 18 of solvers", done.stdout)
