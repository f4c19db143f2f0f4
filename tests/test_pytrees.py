"""Pytrees; formulas applied to many leaves at once, against NumPy leaf by leaf."""

from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import autograd.numpy as anp
import numpy as np
import pytest

from mpiad import jit, jvp, linearize, make_vjp, minimize, value_and_grad
from mpiad.parallel import SGD, Adam, DistributedOptimizer
from mpiad.pytrees import flatten, join, map_leaves, named_leaves, places_by_kind, refuse_objects, register, split

pytestmark = pytest.mark.serial

RNG = np.random.default_rng(0)
LEAVES = [
    RNG.normal(size=(3, 5)),
    0.3,
    RNG.normal(size=7).astype(np.float32),
    np.float32(1.5),
    RNG.normal(size=8191),
    RNG.normal(size=8192),
    RNG.normal(size=(200, 300)).T,  # longer than a piece, and not in the order of its axes
    np.zeros((0, 4)),
    RNG.normal(size=4) * (1 + 2j),
    RNG.normal(size=9000) * (1 + 2j),
    7,
    "a name",
    np.arange(3),
]


class Counted(SGD):
    """Notes the lengths of the arrays that the formula gets."""

    sizes = []  # noqa: RUF012

    def formula(self, x, *others, out):
        self.sizes.append(len(x))
        return super().formula(x, *others, out=out)


def updated(rule, state, params, gradient, compiled):
    """Return state and parameters after an update, or after the compiled step of a loss with this gradient."""
    if not compiled:
        return rule.update(state, params, gradient)
    optimizer = DistributedOptimizer(rule)
    places = [k for k, leaf in enumerate(gradient) if np.asarray(leaf).dtype.kind in "fc"]
    loss = jit(lambda p, g: sum([anp.sum(anp.real(p[k] * g[k])) for k in places]))
    state, params, _ = optimizer.step({"optimizer": state}, params, loss, gradient, samples=lambda *_: 1)
    (program,) = loss._derived.values()
    assert not program.refused
    return state["optimizer"], params


@pytest.mark.parametrize("compiled", [False, True])
def test_updates_are_those_of_each_leaf_by_itself(compiled):
    Counted.sizes.clear()
    rule = (SGD if compiled else Counted)(0.5, momentum=0.25)
    seconds = [leaf if isinstance(leaf, (str, int)) or np.asarray(leaf).dtype.kind == "i" else 2 * leaf for leaf in LEAVES]
    state, moved = updated(rule, {"updates": 0, "velocity": LEAVES}, LEAVES, seconds, compiled)
    for x, v, new in zip(LEAVES[:10], state["velocity"], moved):
        np.testing.assert_array_equal(v, x / 4 + np.conj(2 * x))
        np.testing.assert_array_equal(new, x - (x / 4 + np.conj(2 * x)) / 2)
        assert (np.shape(new), new.dtype) == (np.shape(x), np.asarray(x).dtype)
    assert isinstance(moved[1], np.float64)  # numbers stay numbers
    assert moved[10:] == LEAVES[10:]
    assert compiled or max(Counted.sizes) == 16384


def test_many_small_arrays_are_one_call():
    Counted.sizes.clear()
    params = [np.ones(k) for k in range(100)]
    Counted(0.5).update({"updates": 0}, params, params)
    assert Counted.sizes == [99 * 50]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_updates_are_the_same_bits_as_those_of_whole_arrays(dtype, compiled):
    params = [RNG.normal(size=n).astype(dtype) for n in (5, 40_000, 8192, 300)]
    gradient = [RNG.normal(size=len(x)).astype(dtype) for x in params]
    adam, sgd = Adam(0.1, 0.8, 0.95, 1e-3), SGD(0.1, 0.9, nesterov=True)
    state, new = updated(adam, adam.setup(params), params, gradient, compiled)
    state, new = updated(adam, state, new, gradient, compiled)
    _, moved = updated(sgd, sgd.setup(params), params, gradient, compiled)
    for k, (x, g) in enumerate(zip(params, gradient)):
        m = v = 0 * g
        y = x
        for t in (1, 2):
            m, v = 0.8 * m + (1 - 0.8) * g, 0.95 * v + (1 - 0.95) * g**2
            y = y - 0.1 / (1 - 0.8**t) * m / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
        assert new[k].tobytes() == y.tobytes()
        assert state["first"][k].tobytes() == m.tobytes()
        assert state["second"][k].tobytes() == v.tobytes()
        assert moved[k].tobytes() == (x - 0.1 * (g + 0.9 * g)).tobytes()


Pair = namedtuple("Pair", "left right")
TREE = {"b": [1.0, np.arange(6.0).reshape(2, 3)], "a": Pair(np.zeros(2, np.float32), None), "c": ()}


def test_leaves_have_paths_and_every_kind_of_nest_comes_back():
    leaves, build = flatten(TREE)
    paths = [path for path, leaf in named_leaves(TREE, "x") if not isinstance(leaf, str)]
    assert paths == ["x['a'].left", "x['a'].right", "x['b'][0]", "x['b'][1]"]
    assert all(leaf is part for leaf, part in zip(leaves, [*TREE["a"], *TREE["b"]]))
    for same in (build(leaves), map_leaves(lambda leaf: leaf, TREE)):
        assert repr(same) == repr(TREE) and list(same) == ["b", "a", "c"]
    assert map_leaves(type, TREE) == {"b": [float, np.ndarray], "a": Pair(np.ndarray, type(None)), "c": ()}


def test_what_is_joined_is_split_again():
    leaves = flatten(TREE)[0]
    assert places_by_kind(leaves, [0, 2, 3]) == [[0], [2, 3]]
    whole = join(leaves[2:])
    np.testing.assert_array_equal(whole, [1.0, 0, 1, 2, 3, 4, 5])
    number, array = split(whole, [(), (2, 3)])
    assert type(number) is np.float64 and number == 1.0
    np.testing.assert_array_equal(array, leaves[3])
    assert np.shares_memory(array, whole) and np.shares_memory(join(leaves[3:]), leaves[3])


def test_the_path_of_another_object_is_named():
    with pytest.raises(TypeError, match=r"fit: x\['w'\]\[1\] is object <object .*strings and None are expected"):
        refuse_objects({"w": [1.0, object()]}, "x", "fit")


@register
@dataclass(frozen=True)
class Line:
    slope: np.ndarray
    offset: float = 2.0

    def __post_init__(self):
        object.__setattr__(self, "offset", factor * self.offset)


factor = 3.0


def test_a_compiled_function_creates_objects_of_a_registered_class(monkeypatch):
    doubled = jit(lambda x: Line(2 * x, anp.sum(x)), strict=True)
    for value in (3.0, 5.0):
        monkeypatch.setitem(globals(), "factor", value)  # which `__post_init__` reads
        for _ in range(2):
            made = doubled(np.ones(4))
            assert type(made) is Line
            np.testing.assert_array_equal(made.slope, 2 * np.ones(4))
            assert made.offset == 4 * value


@pytest.mark.parametrize("make", [lambda part: [part], lambda part: (part,), lambda part: {"a": part}])
def test_pytrees_of_too_many_levels(make):
    tree = np.ones(3)
    for _ in range(1500):  # Python 3.13 walks through 900
        tree = make(tree)
    endless = []
    endless.append(endless)
    leaf = lambda tree: anp.sum(flatten(tree)[0][0])  # noqa: E731
    for deep in (tree, endless):
        for call in (
            value_and_grad(leaf), jit(leaf), value_and_grad(jit(leaf)), linearize(leaf), flatten,
            lambda tree: jvp(leaf, tree, tree), lambda tree: minimize(leaf, tree),
            lambda tree: make_vjp(lambda x: tree)(1.0), lambda tree: named_leaves(tree, "x"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="too many levels of containers for Python's recursion limit of"):
                call(deep)


def test_results_are_of_the_same_container():
    Matrix = namedtuple("Matrix", "sign logarithm")  # noqa: PYI024
    x, matrix = np.arange(4.0), np.diag([1.0, 2.0])
    for fun, x, kind in (
        (lambda x: anp.split(x, 2), x, list), (lambda x: [x, 2 * x], x, list), (lambda x: (x, x), x, tuple),
        (lambda x: x, [x, x], list),
        (lambda x: Matrix(*anp.linalg.slogdet(x)), matrix, Matrix),
        (anp.linalg.slogdet, matrix, type(np.linalg.slogdet(matrix))),
    ):  # fmt: skip
        assert type(make_vjp(fun)(x)[1]) is kind
        assert [type(part) for part in jvp(fun, x, x)] == [kind, kind]


@pytest.mark.parametrize("compiled", [False, True])
def test_dicts_of_the_standard_library_stay_what_they_are(compiled):
    """In arguments, gradients and results; a missing key has the default."""
    around = jit if compiled else lambda fun: fun
    total = around(lambda d: anp.sum(d["b"] ** 2) * d["a"] + d["missing"])
    for given in (defaultdict(float, b=np.arange(3.0), a=2.0), Counter(b=np.arange(3.0), a=2.0)):
        for _ in range(2):
            value, gradient = value_and_grad(total)(given)
            assert (value, type(gradient), list(gradient), gradient["a"]) == (10.0, type(given), ["b", "a"], 5.0)
            np.testing.assert_array_equal(gradient["b"], [0.0, 4.0, 8.0])
            assert gradient["missing"] == 0.0
    made = around(lambda x: OrderedDict(b=x, a=2 * x))
    for x in (np.ones(2), np.zeros(2)):
        found = made(x)
        assert type(found) is OrderedDict and list(found) == ["b", "a"] and np.array_equal(found["a"], 2 * x)
