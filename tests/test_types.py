"""Types that pyright reveals for functions with annotations, and the mistakes that it finds."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.one_rank, pytest.mark.limit(180)]

PROGRAM = """
import numpy as np
from numpy.typing import NDArray

import mpiad
from mpiad.timestepping import scan

Field = NDArray[np.float64]


def loss(x: Field, scale: float = 1.0) -> float:
    return float(np.sum(x) * scale)


def step(u: Field, k: int) -> Field:
    return u


def mean(u: Field, k: int) -> float:
    return float(np.mean(u))


@mpiad.jit(strict=True)
def compiled(u: Field) -> Field:
    return u


x: Field = np.ones(3)
domain = mpiad.Domain(3)
reveal_type(mpiad.grad(loss)(x))  # Field
reveal_type(mpiad.value_and_grad(loss)(x, 2.0))  # tuple[float, Field]
reveal_type(mpiad.value_and_grad(loss, 1)(x, 2.0))  # tuple[float, Any]
reveal_type(mpiad.grad(mpiad.jit(loss))(x))  # Field
reveal_type(mpiad.jit(loss)(x))  # float
reveal_type(compiled(x))  # Field
reveal_type(mpiad.minimize(loss, x).x)  # Field
reveal_type(mpiad.minimize(loss, x if mpiad.mpi_rank() == 0 else None).fun)  # float
reveal_type(mpiad.minimize(lambda p: 0.0, {"a": x}).x)  # dict[str, Field]
reveal_type(domain.exchange(x))  # Field
reveal_type(domain.exchange([x, x]))  # Any
reveal_type(scan(step, x, 3))  # Field
reveal_type(scan(step, x, 3, observe=mean))  # tuple[Field, float]
reveal_type(mpiad.grad(lambda x: x**2)(1.0))  # Unknown
mpiad.grad(loss)("text")  # error
mpiad.value_and_grad(loss)(x, wrong=1.0)  # error
mpiad.jit(loss)(x, "text")  # error
"""


def test_types(tmp_path: Path) -> None:
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("pyright isn't installed")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    lines = PROGRAM.splitlines()
    found: dict[int, str] = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        revealed = re.search(r'is "(.*)"$', each["message"])
        text = "error" if each["severity"] == "error" else revealed[1] if revealed else ""
        found[each["range"]["start"]["line"]] = re.sub(
            r"ndarray\[tuple\[\w+(, \.\.\.)?\], dtype\[float64\]\]", "Field", text
        )
    expected = {k: line.partition("  # ")[2] for k, line in enumerate(lines) if "  # " in line}
    assert found == expected
