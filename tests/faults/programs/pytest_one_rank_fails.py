# A test fails on one rank of a plain pytest run, while the other waits inside a communication.
# within: 30
# arguments: -m pytest --noconftest -c /dev/null -p no:cacheprovider -q
# environment: MPIAD_TIMEOUT=2
# prints: def test_total.*assert mpiad.mpi_rank\(\) == 0, "only here".*AssertionError: only here
# prints: DeadlockError
# prints: 1 failed, 1 passed

import mpiad


def test_total():
    assert mpiad.mpi_rank() == 0, "only here"
    assert mpiad.mpi_allreduce(1.0) == 2.0


def test_rank():
    assert mpiad.mpi_rank() < 2
