"""Servers of UM-Bridge that one rank can't reach, or that answer nonsense: one error on all ranks."""

import pytest

PROGRAM = """
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import mpiad
import numpy as np
import umbridge

rank = mpiad.mpi_rank()


class Nonsense(BaseHTTPRequestHandler):
    log_message = lambda self, *args: None

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"nonsense")

    do_POST = do_GET


server = HTTPServer(("localhost", 0), Nonsense)
threading.Thread(target=server.serve_forever, daemon=True).start()
with socket.socket() as unused:
    unused.bind(("localhost", 0))
    for port in (unused.getsockname()[1], server.server_port):

        def misfit(x):
            if rank == 1:
                umbridge.HTTPModel(f"http://localhost:{port}", "model")
            return np.sum(x**2)

        try:
            mpiad.minimize(misfit, np.ones(2), objective="sum")
        except mpiad.errors.WorkerError as error:
            mpiad.mpi_print(error.rank, str(error).partition("raised")[2].split(":")[0].split(".")[-1])
"""


@pytest.mark.launches
def test_a_server_that_fails_on_one_rank(mpirun):
    done = mpirun(2, PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["1 ConnectionError"] * 2 + ["1 JSONDecodeError"] * 2
