"""Exceptions that depend on values, which user code catches: the values of the NumPy program, never one branch for all."""

import contextlib
import logging
import sys

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same
from numpy.linalg import LinAlgError

import mpiad
from mpiad.timestepping import scan
from mpiad.transport.core import calls

REGULAR, SINGULAR = np.array([[2.0, 1.0], [1.0, 3.0]]), np.ones((2, 2))
X = np.array([1.0, 4.0, 9.0, 16.0])


def with_jitter(a):
    for jitter in (0.0, 1e-6):
        try:
            return anp.linalg.cholesky(a + jitter * np.eye(2))
        except LinAlgError:
            pass


def inverse(a):
    return anp.linalg.inv(a)


def inverse_or_transpose(a):
    try:
        return 2 * inverse(a)  # the handler is in another frame than the operation
    except LinAlgError:
        return a.T * a


def checked_only(a):
    try:
        anp.linalg.cholesky(np.array([[2.0, 1.0], [1.0, 1.0]]) * a)  # nothing depends on the result
    except LinAlgError:
        return -a
    return a * a


def suppressed(a):
    made = a * a
    with contextlib.suppress(LinAlgError):
        made = anp.linalg.inv(a)
    return made


def reraised(a):
    try:
        return anp.linalg.inv(a)
    except LinAlgError as error:
        raise ArithmeticError("singular") from error


def raising_by_errstate(x):
    try:
        with np.errstate(divide="raise"):
            return 1.0 / x
    except FloatingPointError:
        return x * x


def called_by_errstate(x):
    seen = []
    with np.errstate(divide="call", call=lambda *args: seen.append(args)):
        y = anp.where(x > 0, 1.0 / x, 1.0)
    return len(seen) * y


def entries(x, places):
    try:
        return x[places] * 2.0
    except IndexError:
        return x * x


def written(x, places):
    y = 1.0 * x
    try:
        y[places] = 7.0
    except IndexError:
        return x * x
    return y


def powers(x, numbers):
    try:
        return x * np.power(np.array([2, 3, 4, 5]), numbers)  # by `**`, older versions of NumPy ask for an index first
    except ValueError:
        return x * x


def neighbor(x, k):
    try:
        return x[k + 1] - x[k]
    except IndexError:
        return x[k] * x[k - 1]


def halved(x, k):
    try:
        return x * (4 // k)
    except ZeroDivisionError:
        return x * x


def with_finally(a):
    try:
        return anp.linalg.inv(a)
    finally:
        a = None


def quiet(x):
    with np.errstate(divide="ignore"):
        return 1.0 / x


def caught_elsewhere(a):
    try:
        b = anp.exp(a) * a
    except ValueError:
        b = a
    return anp.linalg.inv(b)


POSITIVE, ZERO = np.array([1.0, 2.0]), np.array([0.0, 2.0])
REFUSED = [
    (with_jitter, [(REGULAR,), (SINGULAR,)]),
    (inverse_or_transpose, [(REGULAR,), (SINGULAR,)]),
    (checked_only, [(SINGULAR,), (-SINGULAR,)]),
    (raising_by_errstate, [(POSITIVE,), (ZERO,)]),
    (called_by_errstate, [(POSITIVE,), (ZERO,)]),
    (entries, [(X, np.array([0, 3])), (X, np.array([0, 4]))]),
    (powers, [(X, np.array([0, 1, 2, 3])), (X, np.array([0, 1, 2, -1]))]),
]
SUPPRESSED = suppressed, [(REGULAR,), (SINGULAR,)]  # interpreted, since classes of the standard library can't be followed
WRITTEN = written, [(X, np.array([0, 3])), (X, np.array([0, 4]))]
# An integer is a constant where an exception may depend on it; numbers by which Python divides are tested in each call.
COMPILED = [
    (neighbor, [(X, 1), (X, 3), (X, 2)]),
    (halved, [(X, 2), (X, 0), (X, 1)]),
    (quiet, [(POSITIVE,), (ZERO,)]),
    (caught_elsewhere, [(REGULAR,), (2 * REGULAR,)]),
]
REASON = "it catches exceptions that depend on values|it raises FloatingPointError by np.errstate"


def total(fun):
    return lambda x, *rest: anp.sum(fun(x, *rest) ** 2)


def gradient_of(compiled, x, *rest):
    return mpiad.value_and_grad(total(compiled))(x, *rest)


def product_of(compiled, x, *rest):
    return mpiad.jvp(lambda x: compiled(x, *rest), x, np.ones_like(x))


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("order", ["as it is", "reversed"])
@pytest.mark.parametrize(
    ("fun", "given"), [*REFUSED, SUPPRESSED, WRITTEN, *COMPILED], ids=lambda x: getattr(x, "__name__", "")
)
def test_values_and_derivatives_are_those_of_numpy(fun, given, order):
    """Whichever branch the first call takes."""
    given = (given if order == "as it is" else given[::-1]) * 2
    compiled = mpiad.jit(fun)
    for args in given:
        assert_same(compiled(*args), fun(*args), 1e-13)
    if fun is written:
        return
    compiled, whole = mpiad.jit(fun), mpiad.jit(mpiad.value_and_grad(total(fun)))
    for args in given:
        expected = gradient_of(fun, *args)
        assert_same(gradient_of(compiled, *args), expected, 1e-12)
        assert_same(whole(*args), expected, 1e-12)
    compiled = mpiad.jit(fun)
    for args in given:
        assert_same(product_of(compiled, *args), product_of(fun, *args), 1e-12)


@pytest.mark.parametrize(("fun", "given"), [*REFUSED, WRITTEN], ids=lambda x: getattr(x, "__name__", ""))
def test_the_reason(fun, given, caplog):
    caplog.set_level(logging.WARNING, "mpiad")
    compiled = mpiad.jit(fun)
    with np.errstate(all="ignore"):
        for args in given * 2:
            with pytest.raises(TypeError, match=REASON):
                mpiad.jit(fun, strict=True)(*args)
            compiled(*args)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("fun", "given"), COMPILED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_compiled(fun, given):
    compiled = mpiad.jit(fun, strict=True)
    with np.errstate(all="ignore"):
        for args in given * 2:
            assert_same(compiled(*args), fun(*args), 1e-13)
    if fun is neighbor:
        with pytest.raises(IndexError):  # in the handler
            compiled(X, 4)


def test_exceptions_that_are_not_caught_in_the_function():
    """Neither `finally` nor a `try` around the jitted function stands in the way."""
    compiled = mpiad.jit(with_finally, strict=True)
    for _ in range(2):
        assert_same(compiled(REGULAR), np.linalg.inv(REGULAR), 1e-13)
        try:
            compiled(SINGULAR)
        except LinAlgError as error:
            assert "Singular" in str(error)
        else:
            pytest.fail("no LinAlgError")
    try:
        assert_same(mpiad.jit(inverse, strict=True)(REGULAR), np.linalg.inv(REGULAR), 1e-13)
    except LinAlgError:
        pytest.fail("a LinAlgError")


def test_an_exception_that_is_replaced():
    compiled = mpiad.jit(reraised)
    for _ in range(2):
        assert_same(compiled(REGULAR), np.linalg.inv(REGULAR), 1e-13)
        with pytest.raises(ArithmeticError, match="singular"):
            compiled(SINGULAR)


def test_operators_in_a_try():
    def checked(x):
        if np.min(x) < 0:
            raise ValueError("negative")
        return np.sqrt(x)

    operator = mpiad.extend.custom_operator(checked)
    mpiad.extend.defvjp(operator, lambda ans, x: lambda g: g / (2 * ans))

    def root(x):
        try:
            return operator(x)
        except ValueError:
            return x * x

    for first, second in ((1.0, -1.0), (-1.0, 1.0)):
        compiled = mpiad.jit(root)
        gradient = mpiad.jit(root)
        for sign in (first, second, first):
            assert_same(compiled(sign * X), root(sign * X), 1e-13)
            assert_same(gradient_of(gradient, sign * X), gradient_of(root, sign * X), 1e-12)


@pytest.mark.parametrize("checkpoints", [None, 3])
def test_steps_of_a_loop(checkpoints):
    def step(u, k):
        try:
            u = u + 0.1 * X[k + 1 :][0] * u
        except IndexError:
            u = u * u
        try:
            return u + 0.5 * u[k]
        except IndexError:
            return u - 0.25 * u

    def loop(step):
        return lambda u: anp.sum(scan(step, u, 8, checkpoints=checkpoints) ** 2)

    u = X / 20
    expected = u
    for k in range(8):
        expected = step(expected, k)
    for compiled in (mpiad.jit(step), step):
        for _ in range(2):
            value, gradient = mpiad.value_and_grad(loop(compiled))(u)
            np.testing.assert_allclose(value, np.sum(expected**2), rtol=1e-13)
            assert_same((value, gradient), mpiad.value_and_grad(loop(lambda u, k: step(u, int(k))))(u), 1e-12)
    np.testing.assert_allclose(mpiad.jit(loop(step))(u), np.sum(expected**2), rtol=1e-13)


FOUND = []


def look():
    frame = sys._getframe(1)
    FOUND.append(calls.is_caught(frame, frame.f_back))


def bare():
    try:
        look()
    except:  # noqa: E722
        raise


def with_a_name():
    for _ in range(2):
        try:
            look()
            break
        except (ValueError, KeyError) as error:
            print(error)
        finally:
            print(end="")


def around_a_with():
    try:
        with np.errstate(all="ignore"):
            look()
    except ValueError:
        pass


def around_a_finally():
    try:
        try:
            look()
        finally:
            print(end="")
    except ValueError:
        pass


def around_a_handler():
    try:
        try:
            raise KeyError
        except KeyError:
            look()
    except ValueError:
        pass


def returns_in_finally():
    try:
        look()
    finally:
        return  # noqa: B012


def outside():
    look()
    try:
        print(end="")
    except ValueError:
        print(end="")
    else:
        look()
    finally:
        look()
    try:
        raise KeyError
    except KeyError:
        look()
    with np.errstate(all="ignore"):
        look()
    for _ in range(3):
        with np.errstate(all="ignore"):
            look()
            continue
    try:
        look()
    finally:
        print(end="")


CATCHING = bare, with_a_name, around_a_with, around_a_finally, around_a_handler, returns_in_finally


@pytest.mark.serial
@pytest.mark.parametrize("fun", [*CATCHING, outside])
def test_lines_in_a_try(fun):
    """Of any version of Python."""
    FOUND.clear()
    fun()
    assert set(FOUND) == {fun is not outside}
