# A fixture fails on one rank of a plain pytest run, and the tests after it communicate.
# thorough: yes
# within: 30
# arguments: -m pytest --noconftest -c /dev/null -p no:cacheprovider -q
# environment: MPIAD_TIMEOUT=2 MPIAD_DEBUG=1
# prints: ERROR.*OSError: no data file
# prints: 1 error

import pytest

import mpiad


@pytest.fixture
def data():
    if mpiad.mpi_rank() == 1:
        raise OSError("no data file")
    return 2.0


def test_total(data):
    assert mpiad.mpi_allreduce(data) == 4.0
