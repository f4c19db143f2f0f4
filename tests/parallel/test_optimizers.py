"""Adam, AdamW and SGD against the formulas of their papers, number by number in plain Python."""

import math

import autograd.numpy as anp
import numpy as np
import pytest

from mpiad import grad
from mpiad.parallel import SGD, Adam, AdamW

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


@pytest.mark.parametrize("rule", [SGD(0.1), SGD(0.05, 0.5), SGD(0.05, 0.5, nesterov=True)])
def test_complex_parameters_descend_as_their_real_and_imaginary_parts(rule):
    z, pair = {"z": np.array([2.0 - 1j, 0.5j])}, np.array([[2.0, 0.0], [-1.0, 0.5]])
    state, of_pair = rule.setup(z), rule.setup(pair)
    for _ in range(5):
        state, z = rule.update(state, z, grad(lambda z: distance(z["z"]))(z))
        of_pair, pair = rule.update(of_pair, pair, 2 * (pair - np.array([[1.0], [2.0]])))
        np.testing.assert_allclose(z["z"], pair[0] + 1j * pair[1], rtol=1e-14)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_of_complex_parameters_goes_down_and_decays_them(kind):
    """The first step is as long as the rate, along the conjugate of autograd's gradient."""
    rule, start = kind(0.05, epsilon=0.0), np.array([2.0 - 1j])
    state, z = rule.update(rule.setup(start), start, grad(distance)(start))
    kept = start * (1 - 0.05 * rule.weight_decay) if kind is AdamW else start
    np.testing.assert_allclose(z, kept - 0.05 * (start - (1 + 2j)) / abs(start - (1 + 2j)), rtol=1e-14)
    rule = kind(0.05) if kind is Adam else kind(0.05, weight_decay=1e-6)
    state, z = rule.setup(start), start
    assert state["second"].dtype == np.float64
    for _ in range(600):
        state, z = rule.update(state, z, grad(distance)(z))
    assert abs(z[0] - (1 + 2j)) < 1e-3


def test_second_moments_of_complex_numbers_are_those_of_absolute_values():
    rule, g = Adam(0.1, 0.5, 0.75), np.array([3.0 + 4.0j])
    state, x = rule.update(rule.setup(np.zeros(1, complex)), np.zeros(1, complex), g)
    np.testing.assert_allclose(state["second"], [25 / 4], rtol=1e-15)
    np.testing.assert_allclose(x, -0.1 * g.conj() / 5, rtol=1e-7)


def test_single_precision_stays():
    for rule in (Adam(), AdamW(np.float64(0.1)), SGD(np.float64(0.1), 0.9, True)):
        x = np.ones(3, np.float32)
        state, x = rule.update(rule.setup(x), x, np.ones(3, np.float32))
        assert x.dtype == np.float32
        assert all(leaf.dtype == np.float32 for leaf in state.values() if hasattr(leaf, "dtype"))


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
        (lambda: Adam(beta1=1.0), r"beta1 must lie in \[0, 1\), but got 1.0"),
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


def test_second_moments_of_complex_parameters_are_real_ones():
    params = {"z": np.ones(3, np.complex64), "zz": 1j, "name": "net"}
    rule = Adam(0.1)
    state, _ = rule.update(rule.setup(params), params, params)
    with pytest.raises(ValueError, match=r"state\['second'\]\['z'\] must have the shape \(3,\) and dtype float32"):
        rule.update({**state, "second": state["first"]}, params, params)
