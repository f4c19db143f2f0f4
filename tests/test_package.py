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


def test_packages_and_names_are_there_without_an_import_of_their_own():
    program = (
        "import mpiad; print(all(getattr(mpiad, name).__name__ == f'mpiad.{name}' for name in reversed(mpiad._PACKAGES)));"
        "print({*mpiad.__all__, *mpiad._PACKAGES} <= {*dir(mpiad)});"
        "print(all(callable(getattr(mpiad, name)) for name in mpiad.__all__))"
    )
    assert printed(program) == "True\nTrue\nTrue\n"


def test_what_nobody_asks_for_is_not_loaded():
    program = "import sys, mpiad; print([name for name in mpiad._PACKAGES if f'mpiad.{name}' in sys.modules])"
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
