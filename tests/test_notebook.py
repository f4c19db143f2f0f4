"""`%%mpiad` in a kernel of Jupyter, as nbclient runs a notebook. `make test-notebook` has the packages."""

import asyncio
import base64
import re
import threading
import time

import pytest

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
pytest.importorskip("ipyparallel")

pytestmark = [pytest.mark.serial, pytest.mark.launches, pytest.mark.limit(300)]


def text_of(cell):
    """What a cell prints and returns, and the text of its error."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append(re.sub(r"\x1b\[[0-9;]*m", "", "\n".join([output.ename, output.evalue, *output.traceback])))
        else:
            parts.append(output.data.get("text/plain", ""))
    return "\n".join(parts)


class Notebook:
    """A notebook whose cells run one after the other in one kernel."""

    def __init__(self, client):
        self.client, self.cells = client, client.nb.cells

    def run(self, source):
        cell = nbformat.v4.new_code_cell(source)
        self.cells.append(cell)
        self.client.execute_cell(cell, len(self.cells) - 1)
        return cell

    def text(self, source):
        return text_of(self.run(source))


@pytest.fixture(scope="module")
def notebook():
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=200, kernel_name="python3", allow_errors=True)
    with client.setup_kernel():
        found = Notebook(client)
        assert found.text("%load_ext mpiad.notebook") == ""
        yield found
        found.run("%mpiad_stop")


def test_a_cell_on_four_ranks(notebook):
    """Prints by rank, and the value of rank 0; the next cell finds the variables."""
    found = notebook.text(
        "%%mpiad -n 4 -t 5\n"
        "import autograd.numpy as np\nimport mpiad\n"
        "rank = mpiad.mpi_rank()\n"
        "print('x =', rank)\n"
        "J, g = mpiad.value_and_grad(lambda x: mpiad.mpi_sum(x * (rank + 1)))(1.0 + rank)\n"
        "(float(J), float(g))"
    )
    lines = found.splitlines()
    assert [line for line in lines if line.startswith("[rank")] == [f"[rank {r}] x = {r}" for r in range(4)]
    assert lines[-1] == "(30.0, 1.0)" and found.count("(") == 1
    assert notebook.text("%%mpiad -n 4\nfloat(mpiad.mpi_allreduce(g))").strip() == "10.0"


def test_pictures(notebook):
    cell = notebook.run(
        "%%mpiad -n 4\n"
        "from IPython.display import Image, display\n"
        "import io, matplotlib\nmatplotlib.use('Agg')\nfrom matplotlib import pyplot\n"
        "if rank == 2:\n"
        "    figure, axes = pyplot.subplots()\n    axes.plot([1, 2])\n    file = io.BytesIO()\n"
        "    figure.savefig(file)\n    display(Image(file.getvalue()))"
    )
    (picture,) = [output.data["image/png"] for output in cell.outputs if "data" in output and "image/png" in output.data]
    assert base64.b64decode(picture).startswith(b"\x89PNG")


def test_an_exception_of_one_rank(notebook):
    found = notebook.text("%%mpiad -n 4\nkept = 7\nif rank == 1:\n    1 / 0")
    assert "[rank 1]" in found and "ZeroDivisionError" in found
    assert notebook.text("%%mpiad -n 4\nfloat(mpiad.mpi_allreduce(1.0)), kept").strip() == "(4.0, 7)"


def test_a_hang_ends_with_a_table(notebook):
    """Rank 3 doesn't take part in the sum."""
    found = notebook.text("%%mpiad -n 4\nif rank < 3:\n    mpiad.mpi_allreduce(1.0)")
    assert "DeadlockError" in found and re.search(r"rank 0.*mpi_allreduce", found), found
    assert notebook.text("%%mpiad -n 4\nfloat(mpiad.mpi_allreduce(1.0))").strip() == "4.0"


def test_an_interrupt(notebook):
    manager = notebook.client.km
    timer = threading.Timer(3.0, lambda: asyncio.run(manager.interrupt_kernel()))
    timer.start()
    start = time.monotonic()
    found = notebook.text("%%mpiad -n 4\nimport time\ntime.sleep(100) if rank else mpiad.mpi_allreduce(1.0)")
    timer.join()
    assert "KeyboardInterrupt" in found and time.monotonic() - start < 60
    assert notebook.text("%%mpiad -n 4\nimport mpiad\nfloat(mpiad.mpi_allreduce(1.0))").strip() == "4.0"


def test_another_number_of_ranks(notebook):
    assert notebook.text("%%mpiad -n 2\nimport mpiad\nmpiad.mpi_size()").splitlines()[-1] == "2"  # below a progress bar
