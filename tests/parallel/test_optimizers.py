"""Adam, AdamW and SGD against the formulas of their papers, number by number in plain Python."""

import math

import autograd.numpy as anp
import numpy as np
import pytest

from mpiad import grad, jit
from mpiad.parallel import SGD, Adam, AdamW, DistributedOptimizer, ParameterGroups

pytestmark = pytest.mark.serial


def gradients(x):
    """Return some gradients of 0.5·a·x² + noise for one number, as the updates ask for them."""
    return [0.7 * x - 0.1, -1.3, 0.02, 2.5, -0.4]


def adam(x, rate, b1=0.9, b2=0.999, eps=1e-8, decay=0.0):
    m = v = 0.0
    for t, g in enumerate(gradients(x), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        x = x - rate * decay * x - rate * (m / (1 - b1**t)) / (math.sqrt(v / (1 - b2**t)) + eps)
    return x


def momentum(x, rate, mu, nesterov=False):
    v = 0.0
    for g in gradients(x):
        v = mu * v + g
        x = x - rate * (g + mu * v if nesterov else v)
    return x


@pytest.mark.parametrize(
    "rule, exact",
    [
        (Adam(0.05), lambda x: adam(x, 0.05)),
        (Adam(0.05, 0.8, 0.95, 1e-3), lambda x: adam(x, 0.05, 0.8, 0.95, 1e-3)),
        (AdamW(0.05, weight_decay=0.3), lambda x: adam(x, 0.05, decay=0.3)),
        (SGD(0.1), lambda x: momentum(x, 0.1, 0.0)),
        (SGD(0.1, 0.9), lambda x: momentum(x, 0.1, 0.9)),
        (SGD(0.1, 0.9, nesterov=True), lambda x: momentum(x, 0.1, 0.9, True)),
    ],
)
def test_updates_follow_the_papers(rule, exact):
    start = np.array([[0.3, -2.0], [5.0, 0.0]])
    params = {"w": start, "b": 0.25}
    state = rule.setup(params)
    for k in range(5):
        g = {"w": np.vectorize(lambda x, k=k: gradients(x)[k])(start), "b": gradients(0.25)[k]}
        state, params = rule.update(state, params, g)
    np.testing.assert_allclose(params["w"], np.vectorize(exact)(start), rtol=1e-12)
    assert params["b"] == pytest.approx(exact(0.25), rel=1e-12)
    np.testing.assert_array_equal(start, [[0.3, -2.0], [5.0, 0.0]])
    assert state["updates"] == 5


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_schedule_is_asked_with_the_number_of_updates(kind):
    asked = []

    def rate(updates):
        asked.append(updates)
        return 0.1 / (1 + updates)

    rule, x = kind(rate), np.ones(2)
    state = rule.setup(x)
    for _ in range(3):
        state, x = rule.update(state, x, np.ones(2))
    assert asked == [0, 1, 2]
    if kind is not AdamW:  # with equal gradients Adam's steps are as long as the rate
        np.testing.assert_allclose(x, 1 - 0.1 - 0.05 - 0.1 / 3, rtol=1e-7)


def distance(z):
    """Return the sum of squared distances to 1 + 2i, whose steepest descent is along 2 (1 + 2i - z)."""
    return anp.sum(anp.abs(z - (1 + 2j)) ** 2)


@pytest.mark.parametrize("rule", [SGD(0.1), SGD(0.05, 0.5), SGD(0.05, 0.5, True, 0.1), Adam(0.1), AdamW(0.1)])
def test_complex_parameters_are_updated_like_their_real_and_imaginary_parts(rule):
    z, pair = {"z": np.array([2.0 - 1j, 0.5j])}, np.array([[2.0, 0.0], [-1.0, 0.5]])
    state, of_pair = rule.setup(z), rule.setup(pair)
    for _ in range(5):
        state, z = rule.update(state, z, grad(lambda z: distance(z["z"]))(z))
        of_pair, pair = rule.update(of_pair, pair, 2 * (pair - np.array([[1.0], [2.0]])))
        np.testing.assert_allclose(z["z"], pair[0] + 1j * pair[1], rtol=1e-14)


F = np.float64


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, ">f8"])
@pytest.mark.parametrize("rule", [Adam(F(0.1), F(0.9), F(0.99), F(1e-7)), AdamW(weight_decay=F(0.1)), SGD(0.1, F(0.9))])
def test_dtypes_stay_and_compiled_updates_have_the_same_bits(rule, dtype):
    """Settings and numbers of updates may be NumPy's, which would otherwise decide about the precision."""
    for x in (np.linspace(-1, 1, 9).astype(dtype), np.linspace(-1, 1, 60_000).astype(dtype)[::2].reshape(300, 100).T):
        before, g = rule.setup(x) | {"updates": np.int64(3)}, (3 * x).astype(dtype)
        clipped = rule.update(before, x, (0.3 * g).astype(dtype))
        results = [clipped, rule.prepare(before, x).applied([g], 0.3), rule.update(before, x, g)]
        for fun in (of_gradient, jit(of_gradient)):
            optimizer = DistributedOptimizer(rule)
            state, new, _ = optimizer.step({"optimizer": before}, x, fun, g, samples=one)
            results.append((state["optimizer"], new))
        leaves = [[new, *(state[name] for name in rule.moments)] for state, new in results]
        for first, second in [*zip(*leaves[:2]), *zip(*leaves[2:4]), *zip(leaves[2], leaves[4])]:
            assert first.dtype == second.dtype == x.dtype
            assert first.tobytes() == second.tobytes()


def of_gradient(x, g):
    """Return a loss that has the gradient g."""
    return anp.sum(anp.real(x * g))


def one(x, g):
    """Return the number of samples by which the gradient isn't multiplied."""
    return 1


@pytest.mark.parametrize("rule", [SGD(0.05, 0.5, True, 0.1), AdamW(0.1)])
def test_updates_are_part_of_compiled_programs(rule):
    params = {"a": np.array([2.0 - 1j, 0.5j]), "b": np.linspace(-1, 1, 20_000)}

    def descend(p, state):
        return rule.update(state, p, grad(lambda p: distance(p["a"]) + anp.sum(p["b"] ** 4))(p))

    compiled = jit(descend)
    results = []
    for step in (descend, compiled):
        state, p = rule.setup(params), params
        for _ in range(3):
            state, p = step(p, state)
        results.append(p)
    assert not compiled.refused
    for name in params:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=0, atol=1e-13)


def test_what_is_no_float_stays():
    params = {"w": np.ones(2), "steps": 3, "name": "net", "mask": np.array([1, 0])}
    for rule in (Adam(), SGD(0.1)):
        _, new = rule.update(rule.setup(params), params, {**params, "w": np.ones(2)})
        assert new["steps"] == 3
        assert new["name"] == "net"
        assert new["mask"] is params["mask"]


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Adam(0.0), "learning_rate must be above zero.*0.0"),
        (lambda: AdamW(-1), "AdamW: learning_rate.*-1"),
        (lambda: SGD(math.inf), "inf"),
        (lambda: Adam(beta1=1.0), r"beta1 must be a number in \[0, 1\), but got 1.0"),
        (lambda: AdamW(beta2=np.array(0.9)), r"AdamW: beta2 must be a number.* but got array\(0.9\)"),
        (lambda: Adam(epsilon=math.nan), r"epsilon must be a number in \[0, inf\), but got nan"),
        (lambda: SGD(momentum=-0.1), "-0.1"),
        (lambda: SGD(nesterov=True), "nesterov=True needs a momentum"),
        (lambda: SGD(0.1).update({"updates": 0}, np.ones(2), np.ones(3)), r"gradient must have the shape \(2,\).*\(3,\)"),
        (lambda: SGD(0.1).update({"updates": 0}, {"a": 1.0}, {"a": np.float32(1)}), "dtype float64 of params.*float32"),
    ],
)
def test_what_cannot_be_used_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_gradients_of_another_form_are_refused():
    with pytest.raises(TypeError, match="have 2 leaves, but has 1"):
        SGD(0.1).update({"updates": 0}, {"a": 1.0, "b": 2.0}, {"a": 1.0})


@pytest.mark.parametrize("rule", [Adam(0.1), SGD(0.1, 0.9)])
@pytest.mark.parametrize(
    "model, kind, text",
    [
        ({"a": np.ones(5), "b": np.ones(3)}, ValueError, r"\['a'\] must have the shape \(3,\).* has shape \(5,\)"),
        ({"a": np.ones(3), "b": np.ones(1)}, ValueError, r"\['b'\] must have the shape \(5,\).* has shape \(1,\)"),
        ({"a": np.ones(3, np.float32), "b": np.ones(5)}, ValueError, r"\['a'\] must have .*float64.*float32"),
        ({"a": np.ones(3), "c": np.ones(5)}, TypeError, r"\['c'\] instead of params\['b'\]"),
        ({"a": np.ones(3)}, TypeError, "2 leaves, but has 1"),
    ],
)
def test_the_state_of_another_model_is_refused(rule, model, kind, text):
    """Where sizes added up, it was taken for the model's own."""
    params = {"a": np.ones(3), "b": np.ones(5)}
    with pytest.raises(kind, match=rf"state\['(first|velocity)'\].*{text}"):
        rule.update(rule.setup(model), params, params)
    with pytest.raises(kind, match=f"gradient.*{text}"):
        rule.update(rule.setup(params), params, model)


def test_the_state_of_another_optimizer_is_refused():
    rules = [Adam(0.1), SGD(0.1), SGD(0.1, 0.9)]
    for rule in rules:
        for other in rules:
            if rule is not other:
                with pytest.raises(TypeError, match="setup of the same optimizer.*but got a dict of .'"):
                    rule.update(other.setup(np.ones(2)), np.ones(2), np.ones(2))
        with pytest.raises(TypeError, match="but got NoneType None"):
            rule.update(None, np.ones(2), np.ones(2))


# Parameters after 200 steps of PyTorch 2's optimizers from w = (1, -2), b = 0.5 with these gradients (in groups: w and b
# with different rates and decays). The third one is a result for complex z = (1 + i, -2i).
H = np.array([[2.0, 0.3], [0.3, 0.5]])
AFTER_200_STEPS = [
    (SGD(0.05, weight_decay=0.1), [0.05820857139365656, 0.1820421944522391, -0.20937279762370237]),
    (SGD(0.02, 0.9, weight_decay=0.1), [0.05296477551422083, 0.4264802810719522, -0.44276710858526774]),
    (SGD(0.02, 0.9, True, 0.1), [-0.006612820348547264, 0.43948121665801154, -0.4379235444992175]),
    (Adam(0.03), [0.1922158799578297, -0.12668830734787087, -0.08214468708550395]),
    (AdamW(0.03, weight_decay=0.2), [0.148371969978965, 0.02558982379389251, -0.08831366595294793]),
    (
        ParameterGroups({"w": SGD(0.02, 0.9, weight_decay=0.1), "b": SGD(0.05, 0.9)}, lambda path: path[-3]),
        [0.05296477551422083, 0.4264802810719522, -0.8756968082714686],
    ),
    (
        ParameterGroups({"w": AdamW(0.03, weight_decay=0.3), "b": AdamW(0.01, weight_decay=0)}, lambda path: path[-3]),
        [0.13626163569177227, 0.050514993372075795, 0.025120410208101605],
    ),
    (
        ParameterGroups({"w": Adam(0.03), "b": None}, lambda path: path[-3]),
        [0.1922158799578297, -0.12668830734787087, 0.5],
    ),
]


@pytest.mark.parametrize("rule, expected", AFTER_200_STEPS)
def test_200_steps_are_those_of_pytorch(rule, expected):
    params = {"w": np.array([1.0, -2.0]), "b": np.array([0.5]), "name": "net"}
    state = rule.setup(params)
    for k in range(200):
        noise = np.random.default_rng(k).normal(size=3)
        g = {"w": H @ params["w"] - noise[:2], "b": np.sin(params["b"]) + noise[2:], "name": None}
        state, params = rule.update(state, params, g)
    np.testing.assert_allclose([*params["w"], *params["b"]], expected, rtol=1e-12)
    assert params["name"] == "net"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "rule, expected",
    [
        (
            SGD(0.02, 0.9, True, 0.1),
            [-0.006614030515973968 - 0.3080848002463902j, 0.4394868973358817 + 0.4746911501192747j],
        ),
        (Adam(0.03), [0.15786151792767517 - 0.09123244425382j, 0.03174247152781806 - 0.10433759674398943j]),
        (
            AdamW(0.03, weight_decay=0.2),
            [0.13863868881685634 - 0.10491414844666733j, 0.06208680794300431 - 0.01826576533482437j],
        ),
    ],
)
def test_200_steps_of_complex_parameters_are_those_of_pytorch(rule, expected, compiled):
    z, optimizer, fun = np.array([1.0 + 1j, -2.0j]), DistributedOptimizer(rule), jit(of_gradient)
    state = optimizer.setup(z)
    for k in range(200):
        noise = np.random.default_rng(k).normal(size=(2, 2))
        g = (H @ z).conj() - (noise[0] + 1j * noise[1])
        state, z = optimizer.step(state, z, fun, g, samples=one)[:2] if compiled else optimizer.update(state, z, g)
    np.testing.assert_allclose(z, expected, rtol=1e-12)


@pytest.mark.parametrize("returned", [None, -0.1, math.nan, math.inf, "fast", 1j, np.ones(2)])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_schedules_without_a_rate_are_refused(kind, returned):
    rule = kind(lambda updates: returned)
    with pytest.raises(ValueError, match=rf"{kind.__name__}: the schedule learning_rate\(0\) must return a finite number"):
        rule.update(rule.setup(np.ones(2)), np.ones(2), np.ones(2))


@pytest.mark.parametrize("decay", [-1e-3, math.inf, None])
def test_decays_that_are_no_numbers_are_refused(decay):
    for kind in (SGD, AdamW):
        with pytest.raises(ValueError, match=rf"{kind.__name__}: weight_decay must be a number in .*, but got {decay}"):
            kind(weight_decay=decay)


GROUPS = {"a": SGD(0.1), "b": None}
PARAMS = {"x": np.ones(2), "y": [1.0, 2]}


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: ParameterGroups({}, str), TypeError, "groups must be a dict of optimizers"),
        (lambda: ParameterGroups([SGD()], str), TypeError, "groups must be a dict of optimizers"),
        (lambda: ParameterGroups({"a": 0.1}, str), TypeError, r"groups\['a'\] must have setup.*float 0.1"),
        (lambda: ParameterGroups({"a": SGD}, str), TypeError, r"but got the class SGD. Pass an instance, SGD\(...\)"),
        (lambda: ParameterGroups(GROUPS, "a"), TypeError, "group_of must be a function"),
        (lambda: ParameterGroups(GROUPS, lambda path: "a").setup(PARAMS), ValueError, r"'b' contains no leaf .*\['x'\], "),
        (lambda: ParameterGroups(GROUPS, str).setup(PARAMS), ValueError, r"group_of\(.*\['x'\].*one of \['a', 'b'\]"),
        (lambda: ParameterGroups(GROUPS, lambda path: None).setup(PARAMS), ValueError, "but returned None"),
        (lambda: ParameterGroups(GROUPS, str).setup([1.0, object()]), TypeError, r"params\[1\] is object"),
    ],
)
def test_groups_that_cannot_be_used_are_refused(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


def test_groups_refuse_gradients_and_states_of_another_form():
    rule = ParameterGroups(GROUPS, lambda path: "a" if "x" in path else "b")
    state = rule.setup(PARAMS)
    assert rule.update(state, PARAMS, PARAMS)[1]["x"].tolist() == [0.9, 0.9]
    with pytest.raises(TypeError, match="structure of the parameters"):
        rule.update(state, PARAMS, {"x": np.ones(2)})
    with pytest.raises(ValueError, match=r"\['x'\].* must have the shape \(2,\)"):
        rule.update(state, PARAMS, {**PARAMS, "x": np.ones(3)})
    with pytest.raises(TypeError, match="setup of the same optimizer"):
        rule.update(SGD(0.1).setup(PARAMS), PARAMS, PARAMS)
