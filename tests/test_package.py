"""What `import mpiad` brings."""

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import autograd.numpy
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
        "print(dir(mpiad) == sorted([*mpiad.__all__, *mpiad._PACKAGES]));"
        "print(all(callable(getattr(mpiad, name)) for name in mpiad.__all__))"
    )
    assert printed(program) == "True\nTrue\nTrue\n"


@pytest.mark.parametrize("name", [*mpiad._PACKAGES, "device.numpy", "differentiation", "linalg.petsc"])
def test_completion_offers_public_names_only(name):
    package = import_module(f"mpiad.{name}")
    of_autograd = {each for each in dir(autograd.numpy) if not each.startswith("_")} if name == "device.numpy" else set()
    assert {*dir(package)} == {*package.__all__} | of_autograd


def test_what_nobody_asks_for_is_not_loaded():
    program = "import sys, mpiad; print([name for name in mpiad._PACKAGES if f'mpiad.{name}' in sys.modules])"
    assert printed(program) == "['device', 'errors', 'pytrees']\n"


def test_ensembles_and_variational_inference_load_parts_of_scipy_where_they_use_them():
    """Each of these parts takes as long to load as the library."""
    program = (
        "import sys, numpy as np, mpiad.vi; from mpiad.ensemble import ODEProblem, Rodas5P, Tsit5, solve;"
        "f = lambda u, p, t: [-p[0] * u[0], u[0] - u[1]];"
        "ends = [solve(ODEProblem(f, [1.0, 0.0], (0.0, 1.0), [2.0]), alg).u_end for alg in (Tsit5(), Rodas5P())];"
        "print(np.ptp(ends, axis=0).max() < 1e-2, sys.modules.keys() & {'scipy.sparse', 'scipy.linalg', 'scipy.stats'})"
    )
    assert printed(program) == "True set()\n"


@pytest.mark.thorough
def test_a_domain_minimizes_though_nobody_has_asked_for_optimization():
    program = (
        "import numpy as np, sys, mpiad; domain = mpiad.Domain((4,)); assert 'mpiad.optimize' not in sys.modules;"
        "print(abs(domain.minimize(lambda u: domain.sum((u - 1) ** 2), np.zeros(domain.local_shape)).x - 1).max() < 1e-6)"
    )
    assert printed(program) == "True\n"


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="'mpiad' has no attribute 'nonsense'"):
        _ = mpiad.nonsense
    with pytest.raises(
        AttributeError, match=r"no attribute 'least_squares'; did you mean mpiad\.optimize\.least_squares\?$"
    ):
        _ = mpiad.least_squares
    with pytest.raises(AttributeError, match=r"did you mean mpiad\.ensemble\.solve or mpiad\.linalg\.solve\?$"):
        _ = mpiad.solve


def test_the_encoding_of_texts_does_not_depend_on_the_locale():
    """In a locale of ASCII, the sources of the compiler, which are read for the names of kernels, couldn't be decoded."""
    program = (
        "import locale, autograd.numpy as np, mpiad; f = mpiad.jit(np.sin, strict=True); f(np.ones(3));"
        "print(locale.getpreferredencoding(False), f(np.ones(3)).shape)"
    )
    of_ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50 * slowdown(), env=os.environ | of_ascii)
    assert (done.returncode, done.stdout) == (0, "ANSI_X3.4-1968 (3,)\n"), done.stderr


def test_files_of_text_have_an_encoding():
    found = []
    for file in Path(mpiad.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if not re.search(r"\bopen\(|(read|write)_text\b|\btext\s*=\s*True", text):  # most files, and the others take long
            continue
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call) or "encoding" in {word.arg for word in call.keywords}:
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            is_binary = any(isinstance(x, ast.Constant) and "b" in str(x.value) for x in call.args)
            is_text = any(word.arg == "text" and ast.unparse(word.value) == "True" for word in call.keywords)
            is_open = isinstance(call.func, ast.Name) and name == "open" and not is_binary
            if name in ("read_text", "write_text") or is_open or is_text:
                found.append(f"{file}:{call.lineno}: {ast.unparse(call)}")
    assert not found
