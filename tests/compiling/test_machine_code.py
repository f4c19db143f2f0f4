"""Machine code takes no arrays but those that it was made for, and the next process runs it without a compiler."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading

import autograd.numpy as anp
import launch
import numpy as np
import pytest
from autograd import grad
from machine_load import slowdown

from mpiad.compiling import cache, translation
from mpiad.compiling.arguments import Argument, arguments_of
from mpiad.compiling.cache import Source, code_of, loaded
from mpiad.compiling.machine_code import _compiled
from mpiad.compiling.translation import translated
from mpiad.ensemble import EnsembleProblem, Event, ODEProblem, solve

pytestmark = pytest.mark.serial

SIGNATURE = "void(float64[::1], int64, float64, float64[:, :, ::1], boolean[::1], int8[::1])"
TEXT = """

def run(x, stop, factor, out, flags, codes):
    for i in range(stop):
        for j in range(out.shape[1]):
            out[i, j, 0] = math.exp(x[j]) * factor + i{more}
            flags[j] = not flags[j]
    codes[0] = 7
"""

PROGRAM = """
import json, sys
import numpy as np
from mpiad.compiling.cache import kernel_of
text, signature = json.load(sys.stdin)
made = kernel_of(text, "run", signature)
out, flags, codes = np.zeros((2, 3, 1)), np.zeros(3, bool), np.zeros(1, np.int8)
made.function(np.arange(3.0), 2, 0.5, out, flags, codes)
print(json.dumps([made.origin, out.tolist(), codes.tolist(), "mpiad.compiling.translation" in sys.modules]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIAD_CACHE", str(tmp_path / "kernels"))
    cache._loaded.clear()
    yield tmp_path / "kernels"
    cache._loaded.clear()


FUSED = """

def run(x, out):
    for i in range(x.size):
        out[i] = fma(x[i], x[i], -1.0)
"""


@pytest.mark.parametrize("fuses", [True, False])
def test_a_product_and_a_sum_are_rounded_twice_on_processors_without_fma(fuses, monkeypatch):
    if fuses and not translation.has_fma_instruction():
        pytest.skip("this processor has no such instruction")
    monkeypatch.setattr(translation, "has_fma_instruction", lambda: fuses)
    x, out = 1 + 2.0 ** -np.arange(20.0, 40.0), np.zeros(20)
    cache.kernel_of(FUSED, "run", "void(float64[::1], float64[::1])").function(x, out)
    # (1 + h)² - 1 = 2 h + h²; 1 + 2 h + h² is rounded to 1 + 2 h if h² is too small.
    h = x - 1
    np.testing.assert_array_equal(out, 2 * h + h**2 if fuses else x * x - 1)
    assert np.any(x * x - 1 != 2 * h + h**2)


def made(more=""):
    kernel = cache.kernel_of(TEXT.format(more=more), "run", SIGNATURE)
    x, out, flags, codes = arrays()
    assert kernel.function(x, 2, 0.5, out, flags, codes) is None
    extra = 0 if not more else 1.0
    np.testing.assert_allclose(out[..., 0], 0.5 * np.exp(x) + [[0], [1]] + extra, rtol=1e-15)
    assert not flags.any() and codes[0] == 7
    return kernel


def arrays():
    return np.arange(3.0), np.zeros((2, 3, 1)), np.zeros(3, bool), np.zeros(1, np.int8)


def again(more=""):
    cache._loaded.clear()
    return made(more).origin


def test_the_function_is_compiled_once(folder):
    first = made()
    assert first.origin == "compiled" and made() is first and again() == "disk"
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".kernel"]  # and the file of locks


@pytest.mark.launches
def test_the_next_process_compiles_nothing(folder):
    made()
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps([TEXT.format(more=""), SIGNATURE]), capture_output=True,
        text=True, timeout=50 * slowdown(), env=launch.launch_environment(1, folder.parent, {}),
    )  # fmt: skip
    origin, out, codes, compiler = json.loads(process.stdout)
    assert (origin, codes, compiler, process.stderr) == ("disk", [7], False, "")
    np.testing.assert_allclose(np.array(out)[..., 0], 0.5 * np.exp([0, 1, 2]) + [[0], [1]], rtol=1e-15)


def test_what_is_no_machine_code_is_an_error():
    file, _ = code_of([Source(TEXT.format(more=""), "run", SIGNATURE)])
    loaded(file, ["exp"], [SIGNATURE])
    for code in (b"no object file", [], 1), (b"", [], 1), (file, ["no_such_function"], 1), (file, [], 2):
        with pytest.raises(OSError, match="machine code"):
            loaded(*code[:2], [SIGNATURE] * code[2])


def test_types_of_a_signature():
    assert arguments_of("void(int64, float64[:, ::1], int8[::1], boolean[::1], float64)") == [
        Argument(np.dtype("int64"), None), Argument(np.dtype("float64"), 2), Argument(np.dtype("int8"), 1),
        Argument(np.dtype("bool"), 1), Argument(np.dtype("float64"), None),
    ]  # fmt: skip


@pytest.mark.parametrize("place, wrong", [
    (0, np.arange(3)),
    (0, np.arange(3.0).astype(np.float32)),
    (0, [0.0, 1.0, 2.0]),
    (0, np.arange(6.0)[::2]),
    (3, np.zeros((2, 3))),
    (3, np.zeros((1, 3, 2)).T),
    (4, np.zeros(3, np.int8)),
])  # fmt: skip
def test_arrays_of_other_kinds_are_refused(place, wrong):
    function = made().function
    x, out, flags, codes = arrays()
    given = [x, 2, 0.5, out, flags, codes]
    given[place] = wrong
    with pytest.raises(TypeError, match=f"argument {place} of a kernel"):
        function(*given)
    given[place] = np.ascontiguousarray(arrays()[{0: 0, 3: 1, 4: 2}[place]])
    given[place].flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        function(*given)
    with pytest.raises(TypeError, match="takes 6 arguments, but got 2"):
        function(x, 2)


def test_other_threads_run_meanwhile():
    """Two threads in a kernel at the same time: each waits for what the other one writes."""
    text = """

def run(mine, other, most):
    count = 0
    while other[0] == 0 and count < most:
        mine[0] += 1
        count += 1
        for i in range(other.shape[0]):
            count += other[i] * 0
"""
    function = cache.kernel_of(text, "run", "void(int64[::1], int64[::1], int64)").function
    flag = np.zeros(1, np.int64)
    mine = np.zeros(1, np.int64)
    thread = threading.Thread(target=function, args=(mine, flag, 2_000_000_000))
    thread.start()
    while mine[0] == 0 and thread.is_alive():
        pass
    flag[0] = 1
    thread.join(30)
    assert not thread.is_alive() and 0 < mine[0]


def test_what_one_thread_claims_no_other_gets():
    text = """

def run(count, taken, most):
    first = claimed(count, 3)
    while first < most:
        for i in range(first, min(first + 3, most)):
            taken[i] += 1
        first = claimed(count, 3)
"""
    function = cache.kernel_of(text, "run", "void(int64[::1], int64[::1], int64)").function
    count, taken = np.zeros(1, np.int64), np.zeros(1_000_001, np.int64)
    threads = [threading.Thread(target=function, args=(count, taken, len(taken))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (taken == 1).all() and count[0] == 1_000_002 + 3 * 3  # the last that each thread claims is beyond


def attributes_after(call):
    """Return LLVM's attributes of a kernel that asks for something."""
    text = translated(f"def run(x):\n    {call}()\n    x[0] += 1.0", "run", arguments_of("void(float64[::1])"))
    return re.search(r"^define void @run\([^)]*\) (.*) {$", text, re.MULTILINE)[1]


def test_what_has_no_register_begins_with_a_line_of_the_cache():
    # Callers leave the stack at any multiple of 16 bytes, another one in each process: in half of them a kernel that keeps
    # vectors there took up to 1.3 times as long.
    assert "alignstack(64)" in attributes_after("aligned_stack")


@pytest.mark.parametrize("wide", [False, True])
def test_vectors_are_as_wide_as_the_chip_has_them_where_that_costs_no_clock(wide, monkeypatch):
    monkeypatch.setattr("mpiad.compiling.translation.prefers_512_bit_vectors", lambda: wide)
    assert ('"prefer-vector-width"="512"' in attributes_after("wide_vectors")) == wide


def test_constant_ranges_of_kernels_with_many_loops_are_not_unrolled():
    loops = "    for i in range(100):\n        x[i] += 1.0\n    for i in range(x.size):\n        x[i] *= 2.0\n"
    text, plain = (f"def run(x):\n{call}{loops}" for call in ("    rolled_loops()\n", ""))
    ir, plain_ir = (translated(t, "run", arguments_of("void(float64[::1])")) for t in (text, plain))
    assert ir.count("!llvm.loop !0") == 1 and "!llvm.loop" not in plain_ir
    x = np.arange(130.0)
    kernel = Source(text, "run", "void(float64[::1])")
    loaded(*code_of([kernel]), [kernel.signature])[0](x)
    np.testing.assert_array_equal(x, 2.0 * (np.arange(130.0) + (np.arange(130) < 100)))


def test_loops_that_look_up_indices_are_neither_unrolled_nor_vectorized():
    loops = "    for i in range(100):\n        x[table[i]] += 1.0\n    for i in range(100):\n        x[i] *= 2.0\n"
    signature, names = "void(float64[::1], int64[::1])", "def run(x, table):\n    rolled_loops()\n"
    ir = translated(names + loops, "run", arguments_of(signature))
    assert (ir.count("!llvm.loop !3"), ir.count("!llvm.loop !0")) == (1, 1)
    x, table = np.arange(130.0), np.arange(100)[::-1] // 2
    loaded(*code_of([Source(names + loops, "run", signature)]), [signature])[0](x, table)
    expected = np.arange(130.0)
    np.add.at(expected, table, 1.0)
    np.testing.assert_array_equal(x, expected * np.where(np.arange(130) < 100, 2.0, 1.0))


@pytest.mark.parametrize(("kind", "metadata"), [("few", 3), ("rolled", 0)])
def test_loops_that_are_not_unrolled(kind, metadata):
    loops = f"    for i in {kind}(ends[0], ends[1]):\n        x[i] += 1.0\n    for i in {kind}(2):\n        x[i] *= 2.0\n"
    text = f"def run(x, ends):\n{loops}"
    signature = "void(float64[::1], int64[::1])"
    assert translated(text, "run", arguments_of(signature)).count(f"!llvm.loop !{metadata}") == 2
    x = np.arange(8.0)
    loaded(*code_of([Source(text, "run", signature)]), [signature])[0](x, np.array([1, 4]))
    np.testing.assert_array_equal(x, [0.0, 4.0, 3.0, 4.0, 4.0, 5.0, 6.0, 7.0])


@pytest.mark.parametrize("version, is_known", [((22, 1, 0), True), ((99, 0, 0), False)])
def test_indices_stay_indices_in_kernels_with_many_loops_only_and_other_packages_see_no_option(
    version, is_known, monkeypatch
):
    import llvmlite.binding as llvm

    options = []
    set_option = llvm.set_option
    monkeypatch.setattr(llvm, "llvm_version_info", version)
    monkeypatch.setattr(llvm, "set_option", lambda name, option: (options.append(option), set_option(name, option)))
    for attribute in ("", "    rolled_loops()\n"):
        text = f"def run(x):\n{attribute}    for i in range(100):\n        x[i] += 1.0\n"
        _compiled([(translated(text, "run", arguments_of("void(float64[::1])")), "run")], 2)
    # LLVM ends the process if it doesn't know an option.
    assert options == (["-disable-lsr", "-disable-lsr=false"] if is_known else [])


def sources(f, condition=None):
    """Return a forward and a reverse kernel's texts."""

    def end(p):
        one = ODEProblem(f, np.array([1.0, 0.0]), (0.0, 0.1), np.ones(1))
        events = () if condition is None else Event(condition)
        solutions.append(solve(EnsembleProblem(one, p=p), gradient="adjoint", compile=True, events=events))
        return anp.sum(solutions[-1].u_end ** 2)

    solutions = []
    grad(end)(np.ones((16, 1)))
    return {name: solutions[-1].problem.kernel_source(name) for name in ("forward", "reverse")}


def oscillator(u, p, t):
    return p[0] * u[1], -p[0] * u[0]


def test_kernels_ask_for_both():
    for name, source in sources(oscillator).items():
        assert re.search(rf"def {name}\([^)]*\):\n    aligned_stack\(\)\n    wide_vectors\(\)\n", source)


@pytest.mark.parametrize("d", [64, 65])
def test_loops_over_many_components_are_not_unrolled(d):
    problem = ODEProblem(lambda u, p, t: [-p[0] * x for x in u], np.ones(d), (0.0, 1.0), np.ones(1))
    found = solve(EnsembleProblem(problem, p=np.ones((2, 1))), compile=True)
    assert ("    rolled_loops()\n" in found.problem.kernel_source("forward")) == (d > 64)


def test_kernels_that_call_functions_do_not_ask_for_wide_vectors():
    # Around each call of exp all vectors are put away: 1.2 times as slow with wide ones.
    for source in sources(lambda u, p, t: (p[0] * u[1], -anp.exp(u[0]))).values():
        assert "    aligned_stack()\n" in source and "    wide_vectors()\n" not in source
    source = sources(oscillator, lambda u, p, t: anp.tanh(u[1]) + 2.0)["forward"]
    assert "tanh" in source and "    wide_vectors()\n" not in source


def test_linked_kernels_run_in_one_call():
    """Each takes its arguments from a block of memory, which says what comes next."""
    text = "def run(x, y):\n    for i in range(x.size):\n        y[i] = {} * x[i]\n"
    signature = "linked(float64[::1], float64[::1])"
    first, second = (cache.kernel_of(text.format(factor), "run", signature) for factor in (2.0, 5.0))
    x, y, z = np.arange(40.0), np.zeros(40), np.zeros(40)
    last = np.array([0, 0, y.ctypes.data, 40, z.ctypes.data, 40])
    block = np.array([second.function.address, last.ctypes.data, x.ctypes.data, 40, y.ctypes.data, 40])
    first.function(block.ctypes.data)
    np.testing.assert_array_equal(y, 2 * x)
    np.testing.assert_array_equal(z, 10 * x)
