"""The bar of long calls, also if nobody can read it any more."""

import io
import os
import subprocess
import sys

import pytest

from mpiad.progress import progress_bar

pytestmark = pytest.mark.serial


def test_a_bar_counts_on_from_what_was_done(capsys: pytest.CaptureFixture) -> None:
    with progress_bar("epochs", 40, 30) as bar:
        bar.set_postfix_str("loss 2", refresh=False)
        bar.update(3)
    shown = capsys.readouterr().err
    assert shown.startswith("\repochs:  75%") and "| 33/40 [" in shown and shown.endswith(", loss 2]\n")


def closed_file():
    stream = io.StringIO()
    stream.close()
    return stream


def pipe_without_a_reader():
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w", buffering=1)


@pytest.mark.parametrize("stream", [closed_file, pipe_without_a_reader, lambda: None])
def test_a_closed_standard_error_does_not_end_the_call(stream, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = stream()
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", gone)
        with progress_bar("epochs", 4) as bar:
            for k in range(4):
                bar.set_postfix_str(f"loss {k}")
                bar.update()
    assert bar.n == 4 or gone is None  # without a stream tqdm doesn't count
    if gone is not None and not gone.closed:
        gone.close()  # nothing is left that it could not write


CALLS = """
import time
import autograd.numpy as np
import mpiad

squares = mpiad.mpi_map(lambda k: time.sleep(0.06) or k * k, range(20), progress=True)
found = mpiad.minimize(lambda x: np.sum((x - 2.0) ** 2), np.zeros(3), progress=True)
print(sum(squares), found.x.round(6).tolist())
"""


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.parametrize("kind", ["closed", pytest.param("nobody reads it", marks=pytest.mark.thorough)])
@pytest.mark.unguarded
def test_a_standard_error_that_takes_nothing_does_not_end_the_program(kind: str) -> None:
    def leave() -> None:
        if kind == "closed":
            os.close(2)
        else:
            read, write = os.pipe()
            os.dup2(write, 2)
            os.close(read)

    done = subprocess.run([sys.executable, "-c", CALLS], stdout=subprocess.PIPE, preexec_fn=leave, timeout=60, text=True)
    assert (done.returncode, done.stdout) == (0, "2470 [2.0, 2.0, 2.0]\n")
