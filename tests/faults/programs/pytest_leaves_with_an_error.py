# A test fails on one rank, whose pytest leaves with an error, and the other waits without any limit.
# thorough: yes
# prints: assert mpiad.mpi_rank\(\) == 0, "only here".*AssertionError: only here.*1 failed
# says: mpiad: rank 1 left the program by sys.exit\(<ExitCode.TESTS_FAILED: 1>\) at {here}, 5 s ago, and other ranks

import sys

import pytest

import mpiad

mpiad.mpi_init()


def test_total():
    assert mpiad.mpi_rank() == 0, "only here"
    assert mpiad.mpi_allreduce(1.0) == 2.0


if __name__ == "__main__":  # as the command does it
    sys.exit(pytest.main(["-q", "--noconftest", "-c", "/dev/null", "-p", "no:cacheprovider", __file__]))  # here
