"""Whether `diagnose` finds nothing wrong in a random program, whose derivatives are right."""

import numpy as np
from programs import arithmetic, on_ranks

import mpiad


def alarms(program):
    """Diagnose a program; return what is found on any rank, one line each, on rank 0. All ranks call it."""
    rank, (xs, _) = on_ranks.WORLD.rank, arithmetic.inputs(program)
    on_ranks.communicators()
    x = xs[rank].astype({8: "f4", 16: "c8"}[xs[rank].itemsize]) if program.single else xs[rank]

    def run(z):
        return on_ranks.run(program, z)

    is_jitted = program.compiled == "all" or (program.compiled == "some" and rank % 2 == 0)
    report = mpiad.testing.diagnose(mpiad.jit(run) if is_jitted else run, np.asarray(x), shared=program.shared)
    return [finding.text for finding in report.findings] + list(report.unrepeatable) if rank == 0 else []
