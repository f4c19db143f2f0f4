"""The bar of long calls, also if nobody can read it any more."""

import io
import os
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
        with pytest.raises(BrokenPipeError):
            gone.close()
