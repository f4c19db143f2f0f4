"""Run autograd's own tests with mpiad's derivatives in place of autograd's, interpreted and under `mpiad.jit`.

    python tests/autograd_suite.py

The tests are those of autograd's release in the lock file: pip downloads its source distribution into `build/`. In the
processes of pytest this file is a plugin that replaces autograd's functions: `grad`, `value_and_grad`, `jacobian`,
`make_vjp`, `make_jvp` and Hessian products by mpiad's, and the operators that mpiad lacks (`elementwise_grad`, `deriv`,
`check_grads` …) are autograd's, of mpiad's `make_vjp` and `make_jvp`. In the second run, each function that a test
differentiates or checks is jitted.

A test that fails must be listed in `FAILS`, with the reason, and one that is listed must fail.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LOCK, BUILD = ROOT / ".ci" / "requirements.lock", ROOT / "build"
JIT, RESULTS = "AUTOGRAD_SUITE_JIT", "AUTOGRAD_SUITE_RESULTS"

FAILS = {
    "test_builtins.py::test_isinstance": "takes gradients with respect to empty lists, which mpiad refuses",
    "test_fft.py::test_rfftn_odd_not_implemented": "expects that autograd refuses odd lengths; mpiad has their derivatives",
    "test_scipy.py::test_odeint": "autograd's rule needs a tuple of arguments that is traced as one object",
    "test_wrappers.py::test_wrapped_name_and_docs": "compares names and texts of autograd's functions",
}
FAILS_IN_JIT: dict[str, str] = {}


class Jitting:
    """Jits the functions that a test differentiates."""

    def __init__(self) -> None:
        self.jitted: dict[int, Any] = {}  # by the function's id; a jitted function keeps its function alive

    def __call__(self, fun: Callable) -> Callable:
        from mpiad import jit
        from mpiad.programs import Jitted
        from mpiad.transport.core.tracing import tracing

        if tracing.tape is not None or tracing.recorder is not None or isinstance(fun, Jitted):
            return fun
        return self.jitted.setdefault(id(fun), jit(fun))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Note for each function of the test whether it was compiled: "", or the reason why not."""
        self.jitted.clear()
        try:
            return (yield)
        finally:
            reasons = [next(iter(fun._cache.reasons.values()), "") for fun in self.jitted.values() if fun._cache.entries]
            item.user_properties.append(("jitted", reasons))


class Results:
    """Collects the results of all tests."""

    def __init__(self) -> None:
        self.passed, self.failed, self.jitted = list[str](), dict[str, str](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext
        elif report.when == "call":
            self.passed.append(report.nodeid)
        if report.when == "call":
            self.jitted += dict(report.user_properties).get("jitted", ())

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[RESULTS]).write_text(json.dumps(vars(self)))


def pytest_configure(config: pytest.Config) -> None:
    import mpiad
    from mpiad.compiling import cache, closure

    mpiad.mpi_init()
    cache.optimization_level = 0  # many small programs
    for reader in (closure.FunctionReader, closure._WatchReader):
        reader.constant_modules |= {__name__}  # functions that differentiate in their turn can be compiled
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results())
    wrapped = Jitting() if os.environ[JIT] else None
    if wrapped is not None:
        config.pluginmanager.register(wrapped)
    replace(wrapped or (lambda fun: fun))


def replace(wrapped: Callable[[Callable], Callable]) -> None:
    """Replace autograd's functions by mpiad's, which differentiate `wrapped(fun)`."""
    import mpiad

    autograd, core, operators, test_util, wrap_util = [
        importlib.import_module(f"autograd{name}")
        for name in ("", ".core", ".differential_operators", ".test_util", ".wrap_util")
    ]
    autograds_check, checks = test_util.check_grads, []

    def make_vjp(fun: Callable, x: Any) -> Any:
        return mpiad.make_vjp(wrapped(fun))(x)

    def make_jvp(fun: Callable, x: Any) -> Any:
        return mpiad.make_jvp(wrapped(fun))(x)

    @wrap_util.unary_to_nary
    def check_grads(fun: Callable, x: Any, *args: Any, **kwargs: Any) -> None:
        checks.append(fun)  # a check of second derivatives calls this function for first derivatives
        try:
            autograds_check(fun if len(checks) > 1 else wrapped(fun), 0, *args, **kwargs)(x)
        finally:
            checks.pop()

    def operator(name: str) -> Callable:
        made_by = getattr(mpiad, name)

        def make(fun: Callable, argnum: Any = 0) -> Callable:
            return made_by(wrapped(fun), tuple(argnum) if isinstance(argnum, list) else argnum)

        return make

    for module in (core, test_util):
        module.make_vjp, module.make_jvp = make_vjp, make_jvp
    operators._make_vjp, operators._make_jvp, test_util.check_grads = make_vjp, make_jvp, check_grads
    own = {name: wrap_util.unary_to_nary(make) for name, make in (("make_vjp", make_vjp), ("make_jvp", make_jvp))}
    own |= {name: operator(name) for name in ("grad", "value_and_grad", "jacobian")}
    own |= dict.fromkeys(("hessian_tensor_product", "hessian_vector_product"), operator("hvp"))
    for module in (autograd, operators):
        vars(module).update(own)


def suite() -> Path:
    """Return the folder of autograd's tests; download them if they aren't there."""
    found = re.search(r"^autograd==(\S+)", LOCK.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{LOCK} has no version of autograd")
    folder = BUILD / f"autograd-{found[1]}"
    if not folder.exists():
        pip = ("-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--no-binary", ":all:")
        with tempfile.TemporaryDirectory() as downloads:
            command = [sys.executable, *pip, "--dest", downloads, f"autograd=={found[1]}"]
            subprocess.run(command, check=True)
            (archive,) = Path(downloads).iterdir()
            with tarfile.open(archive) as packed:
                packed.extractall(BUILD, filter="data")
    return folder / "tests"


def run(tests: Path, jit: bool, flags: list[str]) -> dict[str, Any]:
    """Run the tests in processes of pytest; return what `Results` collects."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        own = {JIT: "jit" if jit else "", RESULTS: str(results), "PYTHONPATH": str(Path(__file__).parent)}
        # Without autograd's settings of pytest, which need more packages.
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
        command += ["-p", Path(__file__).stem, "-n", "auto", "--tb=short", "-W", "ignore", *flags, "."]
        subprocess.run(command, cwd=tests, env={**os.environ, **own})
        if not results.exists():
            raise SystemExit("pytest ended without results")
        return json.loads(results.read_text())


def main(flags: list[str]) -> int:
    tests, wrong = suite(), False
    for jit in (False, True):
        found, listed = run(tests, jit, flags), FAILS | (FAILS_IN_JIT if jit else {})
        total = len(found["passed"]) + len(found["failed"])
        print(f"{'under jit' if jit else 'interpreted'}: {len(found['passed'])} of {total} of autograd's tests pass")
        for name in found["failed"]:
            print(f"  {name}: {listed.get(name, 'NOT LISTED')}")
        passing = [name for name in listed if name in found["passed"]]
        print(*(f"  {name}: LISTED, BUT PASSES\n" for name in passing), end="", sep="")
        wrong |= bool(passing or found["failed"].keys() - listed.keys())
        if jit:
            compiled = found["jitted"].count("")
            print(f"  {compiled} of {len(found['jitted'])} differentiated functions were compiled; others:")
            for reason, count in Counter(filter(None, found["jitted"])).most_common():
                print(f"  {count:5}  {reason}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
