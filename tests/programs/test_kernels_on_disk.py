"""The kernels of a program come from the disk in a second process, and are compiled where there are none or wrong ones."""

import numpy as np
import pytest

PROGRAM = """
import logging
import autograd.numpy as np
import numpy, mpiad

mpiad.mpi_init()
jitted = mpiad.jit(lambda x: np.sum(np.sin(x[1:] * x[:-1])) * mpiad.mpi_allreduce(x[0]), strict=True)
x = numpy.arange(6.0)
print(float(jitted(x)) == float(jitted(x)), float(mpiad.grad(jitted)(x)[0]))
(entry, _) = jitted._cache.entries.values()
print(*{kernel.origin for kernel in entry.replays.kernels if kernel is not None})
"""


@pytest.mark.thorough
@pytest.mark.launches
def test_a_second_process_finds_them(mpirun, tmp_path):
    cache = tmp_path / "kernels"

    def run(ranks=1):
        made = mpirun(ranks, PROGRAM, env={"MPIAD_CACHE": str(cache)})
        assert made.returncode == 0, made.stderr
        return made.stdout.split("\n")[:-1]

    x = np.arange(6.0)
    value = np.sum(np.sin(x[1:] * x[:-1]))
    first = run()
    assert first[0].split()[0] == "True" and first[1] == "compiled"
    np.testing.assert_allclose(float(first[0].split()[1]), value, rtol=1e-13)  # x[0] is 0
    assert run() == [first[0], "disk"]
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:-7] + b"damaged")
    assert run() == first
    assert set(run(3)) >= {"disk"}
