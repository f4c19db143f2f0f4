# A thread of one rank's test raises: pytest reports it, and the test that waited for it fails.
# within: 30
# arguments: -m pytest --noconftest -c /dev/null -p no:cacheprovider -q
# prints: EOFError: no header
# prints: 1 failed
# thorough: yes

import threading

import mpiad


def test_load():
    loaded = []

    def load():
        raise EOFError("no header")

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert mpiad.mpi_allreduce(float(len(loaded))) == 2.0
