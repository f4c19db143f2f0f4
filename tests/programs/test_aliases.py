"""Local names of attributes: `d = self.data; d.dx` is followed like `self.data.dx`."""

from types import SimpleNamespace

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.compiling.closure import Unknown, watch_of

X = np.arange(1.0, 4.0)
CONDITION = True


class Data:
    def __init__(self):
        self.dx, self.weights, self.inner = 2.0, np.ones(3), SimpleNamespace(k=3.0)


class Model:
    def __init__(self):
        self.data, self.other = Data(), Data()

    def attribute(self, x):
        d = self.data
        return x * d.dx + d.dx * 1.0

    def alias_of_an_alias(self, x):
        d = self.data
        inner = d.inner
        weights = d.weights
        return inner.k * (x * weights) + d.dx

    def in_a_branch(self, x):
        if CONDITION:
            d = self.data
            x = x + d.inner.k
        return x * d.dx

    def in_a_loop(self, x):
        for _ in range(3):
            d = self.data
            x = x * d.dx + d.inner.k
        return x * d.dx

    def itself(self, x):
        model = self
        return x * model.data.dx + model.data.inner.k

    def in_a_nested_function(self, x):
        def scaled(x):
            d = self.data
            return x * d.dx + d.inner.k

        return scaled(x)

    def assigned_twice(self, x):
        d = self.data
        y = x * d.dx
        d = self.other
        return y * d.dx

    def conditional(self, x):
        d = self.data if CONDITION else self.other
        return x * d.dx

    def either(self, x):
        d = self.data or self.other
        return x * d.dx

    def read_before(self, x):
        d = None
        for _ in range(2):
            x = x * (2.0 if d is None else d.dx)
            d = self.data
        return x

    def first_read_in_a_loop(self, x):
        for k in range(2):
            if k:
                x = x * d.dx  # noqa: F821 (assigned below, in the first round)
            d = self.data  # noqa: F841
        return x

    def deleted(self, x):
        d = self.data
        x = x * d.dx
        del d
        return x

    def argument(self, x, d=None):
        d = self.data
        return x * d.dx

    def of_a_comprehension(self, x):
        d = self.data
        return x * d.dx * sum([2.0 * d for d in (1.0, 2.0)])

    def two_names(self, x):
        d, other = self.data, self.other
        return x * d.dx + d.inner.k * other.dx

    def captured(self, x):
        d = self.data
        return (lambda: x * d.dx)()


MODEL = Model()


def of_a_global(x):
    d = MODEL.data
    return x * d.dx + d.inner.k * d.weights


def of_a_variable():
    model = MODEL

    def fun(x):
        d = model.data
        return x * d.dx + d.inner.k * d.weights

    return fun


def changes():
    """Yield after each change of an attribute of the model, and after each change back."""
    data = MODEL.data
    for owner, name, new in ((data, "dx", 5.0), (data.inner, "k", -1.0), (data, "weights", X), (MODEL, "data", Data())):
        old = getattr(owner, name)
        setattr(owner, name, new)
        new is not MODEL.data or setattr(new, "dx", 7.0)
        yield
        setattr(owner, name, old)
        yield


FOLLOWED = [
    MODEL.attribute, MODEL.alias_of_an_alias, MODEL.in_a_branch, MODEL.in_a_loop, MODEL.itself,
    MODEL.in_a_nested_function, of_a_global, of_a_variable(),
    # The code doesn't show of which object the attribute is, so all objects are followed as a whole.
    MODEL.assigned_twice, MODEL.conditional, MODEL.either, MODEL.read_before, MODEL.first_read_in_a_loop, MODEL.deleted,
    MODEL.argument, MODEL.captured, MODEL.of_a_comprehension, MODEL.two_names,
]  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize("fun", FOLLOWED, ids=lambda fun: fun.__name__)
def test_aliases_are_followed_and_their_changes_are_seen(fun):
    """Against the interpreted function, at each state of the objects."""
    compiled, slope = mpiad.jit(fun, strict=True), mpiad.grad(lambda x: anp.sum(fun(x) ** 2))
    compiled_slope = mpiad.jit(slope, strict=True)
    values = [compiled(X)]
    for _ in changes():
        np.testing.assert_allclose(compiled(X), fun(X), rtol=1e-14)
        np.testing.assert_allclose(compiled_slope(X), slope(X), rtol=1e-14)
        values.append(compiled(X))
    assert not np.array_equal(values[1], values[0])
    np.testing.assert_array_equal(values[-1], values[0])


@pytest.mark.serial
def test_an_alias_of_self_assigns_its_attributes():
    class Counter:
        count = 0.0

        def fun(self, x):
            me = self
            me.count = me.count + 1.0
            return x * me.count

    with pytest.raises(Unknown, match=r"assigns self\.count"):
        watch_of(Counter().fun)


def test_objects_that_differ_between_ranks(rank, size):
    """Rank r scales by r + 1, then the last rank by 10 more."""
    model = Model()
    model.data.dx = rank + 1.0

    def total(x):
        return mpiad.mpi_allreduce(anp.sum(model.attribute(x)))

    compiled, slope = mpiad.jit(total, strict=True), mpiad.jit(mpiad.grad(total), strict=True)
    for extra in (0.0, 10.0, 0.0):
        model.data.dx = rank + 1.0 + extra * (rank == size - 1)
        scales = size * (size + 1) / 2 + extra
        np.testing.assert_allclose(compiled(X), scales * (np.sum(X) + 3.0))
        np.testing.assert_allclose(slope(X), np.full(3, model.data.dx))
