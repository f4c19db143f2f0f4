"""What `import mpiad` brings."""

import subprocess
import sys

import pytest
from machine_load import slowdown

import mpiad

pytestmark = pytest.mark.serial


def printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50 * slowdown())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rooms_and_names_are_there_without_an_import_of_their_own():
    program = (
        "import mpiad; print(all(getattr(mpiad, room).__name__ == f'mpiad.{room}' for room in reversed(mpiad._ROOMS)));"
        "print({*mpiad.__all__, *mpiad._ROOMS} <= {*dir(mpiad)}, all(callable(getattr(mpiad, n)) for n in mpiad.__all__))"
    )
    assert printed(program) == "True\nTrue True\n"


def test_what_nobody_asks_for_is_not_loaded():
    program = "import sys, mpiad; print([room for room in mpiad._ROOMS if f'mpiad.{room}' in sys.modules])"
    assert printed(program) == "['device', 'errors']\n"


def test_a_domain_minimizes_though_nobody_has_asked_for_optimization():
    program = (
        "import numpy as np, sys, mpiad; domain = mpiad.Domain((4,)); assert 'mpiad.optimize' not in sys.modules;"
        "print(abs(domain.minimize(lambda u: domain.sum((u - 1) ** 2), np.zeros(domain.local_shape)).x - 1).max() < 1e-6)"
    )
    assert printed(program) == "True\n"


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="'mpiad' has no attribute 'nonsense'"):
        _ = mpiad.nonsense
