"""`mpiad.interop` where neither JAX nor PyTorch is imported."""

import subprocess
import sys

import pytest

from mpiad import interop


@pytest.mark.one_rank
@pytest.mark.launches
def test_neither_package_is_imported_before_use():
    program = "import sys, mpiad; mpiad.interop.from_jax; print({'jax', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("name, title, call", [("jax", "JAX", "from_jax"), ("torch", "PyTorch", "from_torch")])
def test_a_missing_package_is_named(name, title, call, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"needs {title}, which can't be imported .* pip install '{name}'"):
        getattr(interop, call)(abs)


@pytest.mark.parametrize("call", ["to_jax", "to_torch"])
def test_only_driven_functions_become_functions_of_other_frameworks(call):
    with pytest.raises(TypeError, match=f"{call}: expected a driven function, but got function .*mpiad.drive"):
        getattr(interop, call)(lambda x: x)
