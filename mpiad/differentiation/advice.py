"""Advice for errors of code that doesn't support traced values.

NumPy, SciPy, Python and mpi4py report an unsupported operation, but no alternative. If such an exception is raised
in a traced function, advice is appended to the exception's text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dis import opmap
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import NoReturn, TypeVar

import autograd.numpy as anp
from autograd.core import VJPNode, primitive_vjps
from autograd.tracer import Box, notrace_primitives

from mpiad.differentiation.rules import VJP_RULES

T = TypeVar("T")

SUMS = "in place of a[i] += x, np.add.at and np.bincount, write a + mpiad.segment_sum(x, i, len(a))"
_SUMS = f"{SUMS[0].upper()}{SUMS[1:]}."
_STOP = "pass mpiad.stop_gradient(x), the value without its derivative."
_NO_ASSIGNMENT = (
    "Elements of traced arrays can't be assigned, and other arrays can't hold traced values: make a new array by "
    f"np.concatenate, np.stack, np.array or np.where of autograd.numpy (import autograd.numpy as np). {_SUMS}"
)
_NO_DIAGONAL = (
    "Elements of traced arrays can't be assigned: make a new array by np.where of autograd.numpy, for the diagonal "
    "np.where(np.eye(n) == 1, value, x)."
)
# Plain NumPy converts an element, or an argument such as the probabilities of a random choice.
_NO_CONVERSION = f"{_NO_ASSIGNMENT} To a function of plain NumPy {_STOP}"
_NO_SPARSE = "mpiad.linalg.sparse_matmul(A, x) is the product of a constant sparse matrix of SciPy with a traced array."
_NO_SUM_WITH_SPARSE = "A sparse matrix of SciPy can't be added to a traced array: write A.toarray() + x."
_NO_PRODUCT_FROM_LEFT = (
    "The operator @ takes no numbers: write x * a. For x @ A with a sparse matrix A of SciPy, write "
    "mpiad.linalg.sparse_matmul(A.T, x.T).T."
)
_NO_SUBCLASS = (
    "Arrays with arithmetic of their own don't hold traced values: of np.matrix make an array, a = np.asarray(a), and "
    "write a @ x for the product; of a masked array, np.where(a.mask, 0.0, a.data)."
)
_SINGULAR = (
    "np.linalg.inv, solve or slogdet, or a derivative of theirs, got a matrix without an inverse. Regularize it, for "
    "example a + 1e-8 * np.eye(n), or write np.linalg.pinv(a) or np.linalg.lstsq(a, b, rcond=None)[0]."
)
_NO_OBJECTS = (
    "Write np.dot(a, x) instead of a.dot(x), call the functions of autograd.numpy (import autograd.numpy as np) instead of "
    f"plain NumPy's, and pass np.array(xs) instead of a list xs of traced arrays. {_NO_SPARSE}"
)
# The rest of a warning that begins with a line.
NO_CONVERSION_BY_ENTRY = (
    f"makes an array of objects from the entries of a traced array, with which NumPy computes slowly. {_NO_OBJECTS}"
)
NO_COMPLEX_CONVERSION = (
    "Plain NumPy can't convert traced complex values: it would make an array of objects, and take the array itself as its "
    "real part. Call the functions of autograd.numpy instead of plain NumPy's, and write np.dot(a, x) instead of a.dot(x). "
    f"{_NO_ASSIGNMENT}"
)
_NO_TRACED_ENTRIES = (
    "A sparse matrix of SciPy can't hold traced entries: write its product with a vector as "
    "mpiad.segment_sum(entries * x[columns], rows, number_of_rows)."
)
_NOT_IN_PLACE = (
    "An array that isn't traced can't hold traced values: write a = a + x instead of a += x, and y = f(x) instead of "
    f"f(x, out=y). {_SUMS}"
)
_NO_PLAIN_NUMPY = (
    "Plain NumPy, SciPy, math and float() don't accept traced values: call the functions of autograd.numpy (import "
    f"autograd.numpy as np) and autograd.scipy, or {_STOP}"
)
_NO_FILTER = (
    f"{_NO_PLAIN_NUMPY} Instead of a filter of SciPy write a sum of slices or of np.roll(x, 1, axis=0), or call "
    'autograd.scipy.signal.convolve(np.pad(x, 1, mode="symmetric"), weights, mode="valid").'
)
_NO_REPMAT = (
    f"{_NO_PLAIN_NUMPY} Write np.tile(x, (m, n)) instead of numpy.matlib.repmat(x, m, n), and a = a * x for a *= x."
)
_NO_MPI4PY = (
    "mpi4py's functions don't accept traced values: call mpiad's, such as mpi_allreduce(x) or mpi_send(x, dest), "
    f"or {_STOP}"
)
_OTHER_FUNCTIONS = (
    (
        r"^(percentile|quantile|median) can't be",
        "Write s = np.sort(x), k = q * (len(x) - 1) and i = min(int(k), len(x) - 2), with q from 0 to 1 (0.5 for the "
        "median): the quantile is s[i] + (k - i) * (s[i + 1] - s[i]).",
    ),
    (
        r"^(cov|corrcoef) can't be",
        "With d = x - np.mean(x, axis=1, keepdims=True), the covariances of the rows of x are np.dot(d, d.T) / (x.shape[1] "
        "- 1), and with e = d / np.sqrt(np.sum(d**2, axis=1, keepdims=True)) their correlations are np.dot(e, e.T).",
    ),
    (r"^correlate can't be", 'Call autograd.scipy.signal.convolve(x, np.conj(y)[::-1], mode="valid").'),
    (r"^unwrap can't be", "Write x + (np.unwrap(v) - v) with v = mpiad.stop_gradient(x): it adds constants."),
    (r"^polyfit can't be", "Write np.linalg.lstsq(x[:, None] ** np.arange(degree, -1, -1), y, rcond=None)[0]."),
    (r"^nan(max|min) can't be", "Write np.max(np.where(np.isnan(x), -np.inf, x), axis), or np.min and np.inf."),
    (r"^nan(std|var|prod|median) can't be", "Call the function without nan of x[~np.isnan(x)]."),
    (r"^convolve can't be", 'Call autograd.scipy.signal.convolve(x, y, mode="full").'),
    (r"^ptp can't be", "Write np.max(x, axis) - np.min(x, axis)."),
    (r"^piecewise can't be", "Write np.where(x < 0, f(x), g(x)), or np.select(conditions, [f(x), g(x)], default)."),
    (r"^meshgrid can't be", "Write x[None, :] and y[:, None] for the arrays of np.meshgrid(x, y): they are broadcast."),
    (r"^matrix_power can't be", "Write a product, such as np.dot(a, np.dot(a, a)), or a loop with np.dot."),
    (r"^delete can't be", "Write x[k] with the indices that remain, k = np.delete(np.arange(len(x)), i)."),
    (r"^insert can't be", "Write np.concatenate([x[:i], np.array([value]), x[i:]])."),
    (r"^polyval can't be", "Write y = 0.0, and then the loop for c in p: y = y * x + c."),
    (r"^vander can't be", "Write x[:, None] ** np.arange(n)[::-1]."),
    (r"^(extract|compress) can't be", "Write x[mask], or x[:, mask] for the second axis."),
    (r"^ediff1d can't be", "Write np.diff(np.ravel(x))."),
    (
        r"^histogram can't be",
        "Counts are constants: pass mpiad.stop_gradient(x). Sums of traced values in bins, weights=y, have derivatives.",
    ),
    (r"^interp can't be differentiated with period", "Pass x % period, and tables for one period with both of its ends."),
)
# Functions of scipy.linalg and scipy.spatial.distance, and what has derivatives in their place.
_CHOLESKY = "np.linalg.cholesky(a), which is the lower triangle L"
_LOWER = "and for L y = b autograd.scipy.linalg.solve_triangular(L, b, lower=True)"
_BY_VALUES = "for a symmetric matrix v, V = np.linalg.eigh(a), and np.dot(V * f(v), V.T) with the function f"
_IN_PLACE_OF_SCIPY = {
    **{name: f"np.linalg.{name}(a)" for name in "inv pinv det eigh eigvalsh eig qr".split()},
    **dict.fromkeys(("solve", "lu_factor", "lu_solve"), "np.linalg.solve(a, b)"),
    **dict.fromkeys(("cho_factor", "cho_solve"), f"{_CHOLESKY}, {_LOWER}"),
    **dict.fromkeys(("expm", "logm", "funm"), _BY_VALUES),
    **{name: f"autograd.scipy.linalg.{name}" for name in "solve_triangular solve_banded solve_sylvester sqrtm".split()},
    "cholesky": f"{_CHOLESKY} (the upper one is its transpose)",
    "eigvals": "np.linalg.eig(a)[0]",
    "svd": "np.linalg.svd(a, full_matrices=False)",
    "svdvals": "np.linalg.svd(a, compute_uv=False)",
    "lstsq": "np.linalg.lstsq(a, b, rcond=None)",
    "solveh_banded": "autograd.scipy.linalg.solve_banded, with all bands",
    "cdist": "np.sqrt(np.sum((x[:, None] - y) ** 2, axis=-1)), for squares without np.sqrt",
    "pdist": "np.sqrt(np.sum((x[i] - x[j]) ** 2, axis=-1)) with i, j = np.triu_indices(len(x), 1)",
}
_OTHER_ARGUMENTS = (
    "mpiad's functions return their results and take no receive buffers, and op, root, tag and like are passed by name: "
    "y = mpi_gather(x, root=0), y = mpi_exchange(x, dest, source, tag=1)."
)
# Pairs of a pattern and advice. The text of an exception and its cause is searched for the pattern; the first match counts.
# Some patterns name object arrays, which plain NumPy makes from traced values.
_ADVICE = (
    (r"__array_ufunc__\(.*'__call__',.*out=.*Box", _NOT_IN_PLACE),
    (r"__array_ufunc__\(.*'at',.*Box|'function' object has no attribute 'at'|bincount can't be", _SUMS),
    *_OTHER_FUNCTIONS,
    (r"^eig can't be differentiated forwards", "Call mpiad.make_vjp, or for a symmetric matrix np.linalg.eigh(a)."),
    *[(rf"^{name} can't be .* it has no (adjoint|tangent)", f"Call {call}.") for name, call in _IN_PLACE_OF_SCIPY.items()],
    (
        r"'function' object has no attribute '(reduce|accumulate|reduceat)'",
        "autograd.numpy has outer of the functions of two arrays, reduce of add, multiply, maximum, minimum, logical_and "
        "and logical_or, and accumulate of add and multiply. In place of np.add.reduceat call mpiad.segment_sum.",
    ),
    (
        r"'\w*Box' object has no attribute 'flat'",
        f"For its elements call np.ravel(x) of autograd.numpy. {_NO_DIAGONAL}",
    ),
    (r"^(copyto|place)\(\) argument 1 must be|^putmask: first argument must be", _NO_DIAGONAL),
    (r"Cannot cast ufunc '\w+' output from dtype\('O'\)", _NO_REPMAT),
    (r"array type (dtype\('O'\) )?not supported|convolve2d not available for this type|^Unsupported type $", _NO_FILTER),
    (
        r"mpi_\w+\(\) (got multiple values|takes .*positional|got .*keyword argument '(recv|send)?(buf|obj))",
        _OTHER_ARGUMENTS,
    ),
    (r"element with a sequence.*Box'", _NO_CONVERSION),
    (r"^Singular matrix *$", _SINGULAR),
    (r"sparse array (is not|from a nonzero scalar is not) supported|a nonzero scalar to a sparse", _NO_SUM_WITH_SPARSE),
    (r"^matmul: Input operand [01] does not have enough dimensions", _NO_PRODUCT_FROM_LEFT),
    (r"w\.r\.t\. type <class 'numpy\.(matrix|ma\.)", _NO_SUBCLASS),
    (
        r"no supported conversion for types: \(dtype\('O'\)|scipy\.sparse does not support dtype object|"
        r"^Different number of diagonals and offsets",
        _NO_TRACED_ENTRIES,
    ),
    (r"no supported conversion for types: .*O|w\.r\.t\. type <class 'scipy\.sparse", _NO_SPARSE),
    (
        r"Box' object does(n't| not) support item|__array_ufunc__\(.*out=.*Box|"
        r"only integer scalar arrays can be converted to a scalar index",
        _NO_ASSIGNMENT,
    ),
    (r"expecting buffer or list/tuple|bytes-like object is required, not '\w*Box|cannot map 'O' to MPI", _NO_MPI4PY),
    (
        r"dtype\('O'\) with shape|^loop of ufunc .*Box",
        f"{_NO_PLAIN_NUMPY} Of lists with traced values make arrays by np.array.",
    ),
    (
        r"(loop of ufunc|__array_ufunc__).*Box|which has no callable \w+ method|(number|integers or slices), not '?\w*Box|"
        r"Box' object cannot be interpreted|Box\.__format__|dtype\('O'\)|[Uu]nsupported dtype object|"
        r"dtype object cannot be cast|object arrays are not supported|dtype=object is not supported|"
        r"input type 'object' not supported|not supported for the input types|common type for non-numeric array",
        _NO_PLAIN_NUMPY,
    ),
)
# NumPy's methods that change the array, for which there is no function that returns a new one.
_CHANGING = frozenset({"byteswap", "fill", "put", "resize", "setfield", "setflags"})
_METHOD = re.compile(r"'\w*Box' object has no attribute '(\w+)'")
_CONVERSION = "Implicit conversion to a NumPy array"
_WRAPPERS = "autograd.numpy.numpy_wrapper"


def explain(error: BaseException, trace: TracebackType | None) -> None:
    """Append advice, if there is any, to the text of an exception that was raised in a traced function."""
    if not isinstance(error, (AttributeError, KeyError, RuntimeError, TypeError, ValueError)):
        return
    # Python would show the text of a KeyError in quotes.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if text.startswith(_CONVERSION):
        _explain_conversion(error, trace)
        return
    advice = _keyword_advice(trace) if "can't be differentiated" not in text else None
    advice = advice or _advice_for(f"{text} {error.__cause__ or ''}")
    if "must be real number, not" in text and _is_assignment(trace):  # of an element of a complex array
        advice = _NO_ASSIGNMENT
    if advice is not None and trace is not None:
        of_scipy = in_place_of_scipy(frame for frame, _ in walk_tb(trace))
        advice = f"{of_scipy}, or {_STOP}" if of_scipy else advice
    # An inner trace may already have appended the advice.
    if advice is None or advice in text or advice in getattr(error, "__notes__", ()):
        return
    # Without the values of all arguments, which NumPy's text contains.
    text = re.sub(r"(from __array_ufunc__\(<ufunc '\w+'>, '\w+').*", r"\1, ...)", text, flags=re.DOTALL)
    error.args = (f"{text.rstrip().rstrip('.')}. {advice}",)
    # NumPy's casting errors don't show `args` in their text, so the advice is a note; in Python 3.10 only repr shows it.
    note = getattr(error, "add_note", None)
    if advice not in str(error) and note is not None:
        note(advice)


def _keyword_advice(trace: TracebackType | None) -> str | None:
    """Return advice if the exception was raised by a function of autograd that got a traced value by keyword."""
    for frame, _ in walk_tb(trace):
        if frame.f_code.co_name == "f_wrapped" and frame.f_globals.get("__name__") == "autograd.tracer":
            local = frame.f_locals
            names = " and ".join(f"{name}=" for name, x in local.get("kwargs", {}).items() if type(x) in Box.types)
            if names:
                function = getattr(local.get("f_wrapped"), "__name__", "The function")
                return f"{function} got a traced value by keyword, {names}: only positional arguments have derivatives."
    return None


def _is_assignment(trace: TracebackType | None) -> bool:
    """Return whether an exception was raised by an assignment of elements, `x[i] = y`."""
    while trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] != opmap["STORE_SUBSCR"]:
        trace = trace.tb_next
    return trace is not None


def _advice_for(text: str) -> str | None:
    for pattern, advice in _ADVICE:
        if re.search(pattern, text, re.DOTALL):
            return advice
    method = _METHOD.search(text)
    if method is None:
        return None
    name = method[1]
    if name in _CHANGING:
        return _NO_ASSIGNMENT
    function = getattr(anp, name, None)
    if function in VJP_RULES or function in primitive_vjps or function in notrace_primitives[VJPNode]:
        return f"Call autograd.numpy's function, np.{name}(x, ...)."
    return f"Only the plain value has this attribute, without a derivative: mpiad.stop_gradient(x).{name}."


def in_place_of_scipy(frames: Iterable[FrameType]) -> str:
    """Return what to call in place of a function of SciPy that is among the frames of calls; "" without any."""
    for frame in frames:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("scipy.") and name == "wrapper":  # SciPy's decorator for stacks of matrices
            function = frame.f_locals.get("f")
            module, name = getattr(function, "__module__", module), getattr(function, "__name__", name)
        if module.startswith(("scipy.linalg", "scipy.spatial.distance")) and name in _IN_PLACE_OF_SCIPY:
            call = f"import autograd.numpy as np, and call {_IN_PLACE_OF_SCIPY[name]}"
            return f"SciPy's {name} doesn't accept traced values: {call}"
    return ""


def objects_error(fun: Callable) -> TypeError:
    """Return the error for an array of objects that holds traced values, whose derivatives would be lost."""
    name = getattr(fun, "__name__", repr(fun)).removesuffix("_args").removesuffix("_from")
    return TypeError(
        f"{name} got a traced array together with a list or an array of objects with traced values, whose "
        f"derivatives would be lost. {_NO_OBJECTS}"
    )


def refuse_pickling(node: object, protocol: object) -> NoReturn:
    """Raise a TypeError, since a pickled value would lose its derivative; the `__reduce_ex__` of nodes."""
    raise TypeError(f"A traced value can't be pickled. {_NO_MPI4PY}")


def itself(node: T, memo: object) -> T:
    """Return the node itself, so a copy of a traced value has the same derivative; the `__deepcopy__` of nodes."""
    return node


def _explain_conversion(error: BaseException, trace: TracebackType | None) -> None:
    """If NumPy couldn't convert a device array, replace the error's text by one that names a function for device arrays."""
    from mpiad.device import numpy as ours

    while trace is not None:
        code = trace.tb_frame.f_code
        if trace.tb_frame.f_globals.get("__name__") == _WRAPPERS and code.co_name in ours.__all__:
            name = code.co_name
            error.args = (
                f"autograd.numpy.{name} makes NumPy arrays, but got a device array. Call "
                f"mpiad.device.numpy.{name} instead (import mpiad.device.numpy as np). The array's error is: {error}",
            )
            return
        trace = trace.tb_next
