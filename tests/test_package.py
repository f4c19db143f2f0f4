"""What `import mpiad` brings."""

import subprocess
import sys

import pytest
from machine_load import slowdown

import mpiad

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("room", mpiad._ROOMS)
def test_rooms_are_there_without_an_import_of_their_own(room):
    program = f"import mpiad; assert {room!r} in dir(mpiad); print(mpiad.{room}.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50 * slowdown())
    assert done.stdout == f"mpiad.{room}\n", done.stderr


def test_what_nobody_asks_for_is_not_loaded():
    program = "import sys, mpiad; print([name for name in sys.modules if name.startswith('mpiad.debug')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50 * slowdown())
    assert done.stdout == "[]\n", done.stderr


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="'mpiad' has no attribute 'nonsense'"):
        _ = mpiad.nonsense
