"""CUDA sources as programs for this machine's processor: compiled by a compiler of C++, called by ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.kernel_spec import KernelSpec
from mpiad.ensemble.compiled.kernel_texts import cuda_text
from mpiad.ensemble.compiled.trace import names_of, packing_of, trace
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.field_jacobian import jacobian_program
from mpiad.ensemble.problem import ODEProblem
from mpiad.pytrees import flatten

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
LONG = 50_000  # bytes


def parameters_of(p, own):
    """Return parameters of which all trajectories have their own (the last axis counts them), or which they share."""
    leaves, build = flatten(ODEProblem(lambda u, p, t: u, [0.0], (0, 1), p).p)
    return Parameters(leaves, [own] * len(leaves), build)


class Plan(NamedTuple):
    """What the texts of kernels are made of."""

    traced: TracedProblem
    spec: KernelSpec

    def text(self, kernel):
        """Return CUDA C of a kernel that differentiates by all parameters."""
        own, common = ([j for j, name in enumerate(self.traced.names) if name[0] == kind] for kind in "ps")
        spec = self.spec._replace(wanted_varying=len(own), wanted_shared=len(common))
        return cuda_text(kernel, self.traced, spec, (*own, *common))


def plan_of(f, p, u0, alg, events=(), **options):
    """Return the plan of an f; u0 has shape (d, n), and events are triples of condition, terminal and direction."""
    program, packing = trace(f, (len(u0),), p, u0.dtype), packing_of(p)
    traced = TracedProblem(program, tuple(event[0] for event in events), packing, names_of(packing), ())
    _, jacobian, slopes = jacobian_program(program) if alg.tableau.implicit else (None, (), ())
    spec = KernelSpec(
        len(u0), len(packing.varying), len(packing.shared), alg.tableau, alg.controller, single=u0.dtype == np.float32,
        inside=True, record=True, tolerances=True, events=tuple(event[1:] for event in events), jacobian=jacobian,
        slopes=slopes, tables=traced.tables, points=8, reads=tuple(range(len(u0))), **options,
    )  # fmt: skip
    return Plan(traced, spec)


@cache
def library_of(text):
    """Return a kernel's text as a library; one compiler's start for all tests that ask for this text."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(text)
        # To optimise a long text takes seconds; warnings that only an optimiser has come of the short ones.
        level = "-O1" if len(text) < LONG else "-O0"
        command = [COMPILER, level, "-std=c++14", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror"]
        command += ["-Wno-unused-but-set-variable", "-Wno-unused-variable", str(source), "-o", str(library)]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        return ctypes.CDLL(str(library))


class Kernels:
    """The kernels of a plan, each compiled when it is called first."""

    def __init__(self, plan):
        self.plan = plan

    def forward(
        self, u0, p, start, stop, times, rtol=1e-3, atol=1e-6, dt=None, dtmax=np.inf, max_steps=100_000, capacity=0
    ):
        """Solve, and return all that the kernel writes, each array with the trajectories along its last axis."""
        plan, (d, n), real = self.plan, u0.shape, u0.dtype
        own, common = packing_of(p).split(p.leaves, n, real)
        start, stop = (np.broadcast_to(np.asarray(x, float), n).copy() for x in (start, stop))
        times = np.asarray(times, float)
        m, n_saved = len(plan.spec.directions), times.shape[-1]
        out = SimpleNamespace(
            u_end=np.full((d, n), np.nan, real), saved=np.full((n_saved, d, n), np.nan, real), t_reached=np.zeros(n),
            codes=np.zeros(n, np.int32), naccept=np.zeros(n, np.int32), nreject=np.zeros(n, np.int32),
            du_end=np.zeros((m, d, n), real), dsaved=np.zeros((m, n_saved, d, n), real), summary=np.zeros(2, np.int64),
            steps_u=np.zeros((capacity, d, n), real), steps_t=np.zeros((capacity, 2, n)),
        )  # fmt: skip
        self.given = (own, common, start, stop, 1, times, n_saved, int(times.ndim > 1))
        scalar = ctypes.c_float if real == np.float32 else ctypes.c_double
        self._call(
            "forward", n, 0, n, *self.given, u0, n, 1, np.full(d, atol, real), scalar(rtol), ctypes.c_double(dt or 0.0),
            ctypes.c_double(dtmax), max_steps, *vars(out).values(), capacity,
        )  # fmt: skip
        return out

    def reverse(self, out, alive, end_bar, saved_bar):
        """Return the cotangents of u0, of each trajectory's parameters, and of shared ones, a column from each.

        `alive` says of which trajectories; the others count as failed.
        """
        own, common = self.given[:2]
        n, real = end_bar.shape[1], end_bar.dtype
        u0_bar, p_bar = np.zeros_like(end_bar), np.zeros((len(own), n), real)
        s_bar = np.zeros((len(common), n), real)
        self._call(
            "reverse", n, 0, n, *self.given, out.steps_u, out.steps_t, out.naccept, out.t_reached,
            np.where(alive, out.codes, 2).astype(np.int32), end_bar, saved_bar, u0_bar, p_bar, s_bar,
        )  # fmt: skip
        return u0_bar, p_bar, s_bar

    def _call(self, kernel, *arguments):
        kept = [np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x for x in arguments]
        getattr(library_of(self.plan.text(kernel)), kernel)(*map(_as_c, kept))


def _as_c(x):
    if isinstance(x, np.ndarray):
        return x.ctypes.data_as(ctypes.c_void_p)
    return ctypes.c_longlong(x) if isinstance(x, int) else x
