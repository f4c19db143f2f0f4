"""Variational parameters on a device: draws, densities, fits and results of the host, and counted copies."""

from __future__ import annotations

import pickle
from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.stats
from device_double import DeviceArray, on_device, on_host, transfers
from mpi4py import MPI

import mpiad
from mpiad import vi
from mpiad.device import to_device
from mpiad.parallel import Adam
from mpiad.vi import (
    AffineCoupling,
    Flow,
    FullRankGaussian,
    LULinear,
    MeanFieldGaussian,
    Planar,
    SplineAutoregressive,
    SplineCoupling,
)

# All fits have the draws of one key, but for those to which a test gives another `rng`.
VI = partial(vi.VI, rng=0)

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1
_DATA = np.random.default_rng(1).normal(size=(50, 3)) + np.array([0.5, -1.0, 0.2])
_LAYERS = {
    "planar": [Planar(), Planar()],
    "coupling": [AffineCoupling(hidden=5), AffineCoupling(swap=True, hidden=5)],
    "splines": [SplineCoupling(bins=4, hidden=5), LULinear(), SplineCoupling(bins=4, swap=True, hidden=5)],
    "autoregressive": [SplineAutoregressive(bins=4, hidden=5)],
}
_FAMILIES = {
    "mean field": MeanFieldGaussian(3, 0.1, 0.5), "full rank": FullRankGaussian(3, 0.1, 0.5),
    **{name: Flow(3, layers, 0.1, 0.5) for name, layers in _LAYERS.items()},
}  # fmt: skip
_PRIORS = {
    "normal": ("norm", 0.1, 2.0),
    "joint": scipy.stats.multivariate_normal(np.array([0.1, 0.0, -0.2]), np.array([[2, 0.3, 0], [0.3, 1, 0], [0, 0, 3.0]])),
    "heavy tails": ("t", 3.0),
}


def there(params):
    return to_device(params, like=on_device(np.zeros(1)))


def moved(params, seed=3):
    """Return parameters away from the start, where some entries are zero; integers stay."""
    rng = np.random.default_rng(seed)

    def move(leaf):
        return leaf + 0.2 * rng.normal(size=np.shape(leaf)) if np.asarray(leaf).dtype.kind == "f" else leaf

    if isinstance(params, dict):
        return {name: moved(part, seed + k) for k, (name, part) in enumerate(params.items())}
    if isinstance(params, (list, tuple)):
        return type(params)(moved(part, seed + 7 * k) for k, part in enumerate(params))
    return move(params)


def leaves(tree):
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else None
    return [tree] if parts is None else [leaf for part in parts for leaf in leaves(part)]


@pytest.mark.serial
@pytest.mark.parametrize("name", _FAMILIES)
def test_draws_and_densities_with_their_gradients_are_those_of_the_host(name):
    posterior, rng = _FAMILIES[name], np.random.default_rng(2)
    params = moved(posterior.initial(rng))
    noise, points = rng.normal(size=(2, 6, 3))
    weights = rng.normal(size=(6, 3))

    def both(params, noise, points, weights):
        theta, log_q = posterior.draw(params, noise)
        return anp.sum(weights * theta) + anp.sum(log_q**2) + anp.sum(posterior.log_prob(params, points) ** 2)

    exact, slopes = mpiad.value_and_grad(both)(params, noise, points, weights)
    found, away = mpiad.value_and_grad(both)(there(params), *map(on_device, (noise, points, weights)))
    assert found == pytest.approx(exact, rel=1e-12)
    pairs = [pair for pair in zip(leaves(slopes), leaves(away)) if pair[0] is not None]
    assert len(pairs) > 1
    for one, other in pairs:
        assert type(other) is DeviceArray
        np.testing.assert_allclose(on_host(other), one, rtol=1e-9, atol=1e-11)


def loss(theta, data):
    return 0.5 * anp.sum((data - theta) ** 2)


def fitted(put, posterior="full rank", prior="normal", epochs=8, fun=loss, data=_DATA, **settings):
    posterior = _FAMILIES[posterior]
    vi = VI(fun, posterior, _PRIORS[prior], Adam(0.05), 1.0, 2 * COMM.size + 1, root=ROOT, **settings)
    start = put(posterior.initial(np.random.default_rng(4))) if COMM.rank == ROOT else None
    return vi.run(data, epochs, params=start, n_samples=20), vi


def require_same_fit(host, found):
    np.testing.assert_allclose(found.history["objective"], host.history["objective"], rtol=1e-9)
    for one, other in zip(leaves(host.best_params), leaves(found.best_params)):
        np.testing.assert_allclose(on_host(other), one, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.samples, host.samples, rtol=1e-6, atol=1e-9)
    assert type(found.samples) is np.ndarray


@pytest.mark.parametrize("name", _FAMILIES)
def test_a_fit_is_that_of_the_host(name):
    host, found = fitted(lambda x: x, name)[0], fitted(there, name)[0]
    require_same_fit(host, found)
    # The model ran on the host, so on other ranks than the root the result lies there.
    assert {type(leaf) is DeviceArray for leaf in leaves(found.params)} == {COMM.rank == ROOT}


@pytest.mark.parametrize("prior", _PRIORS)
@pytest.mark.parametrize("gradient, divergence", [("pathwise", "path"), ("score", "auto"), ("pathwise", "draws")])
def test_every_estimator_is_that_of_the_host(prior, gradient, divergence):
    settings = {"prior": prior, "gradient": gradient, "divergence": divergence}
    require_same_fit(fitted(lambda x: x, **settings)[0], fitted(there, **settings)[0])


def test_beside_a_model_on_devices_the_result_lies_there_on_all_ranks():
    found = fitted(there, "mean field", data=on_device(_DATA))[0]
    assert {type(leaf) for leaf in leaves(found.best_params)} == {DeviceArray}
    require_same_fit(fitted(lambda x: x, "mean field")[0], found)


def test_draws_that_fail_are_dropped():
    def fragile(theta, data):
        if mpiad.stop_gradient(theta)[0] > 0.6:
            raise mpiad.errors.ConvergenceError("outside")
        return loss(theta, data)

    host, found = fitted(lambda x: x, fun=fragile)[0], fitted(there, fun=fragile)[0]
    assert found.history["dropped"] == host.history["dropped"] and sum(host.history["dropped"]) > 0
    require_same_fit(host, found)


def test_an_epoch_copies_noise_draws_gradients_a_number_and_flags():
    def copies(epochs):
        posterior = _FAMILIES["mean field"]
        vi = VI(loss, posterior, _PRIORS["normal"], Adam(0.05), 1.0, 2 * COMM.size, root=ROOT)
        start = there(posterior.initial(np.random.default_rng(4))) if COMM.rank == ROOT else None
        transfers.reset()
        vi.run(_DATA, epochs, params=start, n_samples=5)
        return np.array([transfers.h2d, transfers.d2h, transfers.h2d_bytes, transfers.d2h_bytes])

    count = 2 * COMM.size
    # There noise and gradients; back the draws, KL, and a byte for each of two arrays of parameters: whether it is finite.
    each = [2, 3, 2 * 8 * 3 * count, 8 * 3 * count + 8 + 2] if COMM.rank == ROOT else [0, 0, 0, 0]
    np.testing.assert_array_equal(copies(5) - copies(3), 2 * np.array(each))
    # The prior's mean and inverse covariance once; at the end the parameters, the last and the best.
    assert copies(1)[0] - each[0] == (2 if COMM.rank == ROOT else 0)
    assert copies(1)[1] - each[1] == (4 if COMM.rank == ROOT else 0)


def test_parameters_in_two_places_are_refused_on_all_ranks():
    def mixed(params):
        return {**params, "mean": on_device(params["mean"])}

    with pytest.raises(TypeError, match="must all be on the host or on one device.*to_device or mpiad.device.to_host"):
        fitted(mixed, "mean field")


def test_another_device_than_the_roots_is_refused_on_all_ranks(monkeypatch):
    monkeypatch.setattr("mpiad.vi.inference.select", lambda number: number)
    with pytest.raises(ValueError, match="are on device 0, but the root's device in devices= is cuda:3"):
        fitted(there, "mean field", devices=["cuda:3"] * COMM.size)


def test_results_take_points_on_either_side():
    host, (found, vi) = fitted(lambda x: x)[0], fitted(there)
    points = np.random.default_rng(5).normal(size=(4, 3))
    np.testing.assert_allclose(found.log_prob(points), host.log_prob(points), rtol=1e-7)
    np.testing.assert_allclose(on_host(found.log_prob(on_device(points))), host.log_prob(points), rtol=1e-7)
    np.testing.assert_allclose(found.draw(3, rng=1), host.draw(3, rng=1), rtol=1e-6)
    assert vi.elbo(found.params, _DATA, 9) == pytest.approx(vi.elbo(host.params, _DATA, 9), rel=1e-7)


def test_what_was_copied_to_a_device_isnt_pickled():
    vi = fitted(there)[1]
    again = pickle.loads(pickle.dumps(vi.prior))
    np.testing.assert_array_equal(again.log_prob(_DATA[:4]), vi.prior.log_prob(_DATA[:4]))
    assert [home.device for home in vi.prior.inverse._copies] == ([0] if COMM.rank == ROOT else [])
    assert not again.inverse._copies


def test_parameters_that_arent_finite_any_more_end_the_run():
    class Wild:
        def setup(self, params):
            return None

        def update(self, state, params, gradient):
            return None, {name: value / 0.0 for name, value in params.items()}

    posterior = _FAMILIES["mean field"]
    vi = VI(loss, posterior, _PRIORS["normal"], Wild(), root=ROOT)
    start = there(posterior.initial(np.random.default_rng(4))) if COMM.rank == ROOT else None
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="after epoch 0 variational parameters"):
        vi.run(_DATA, 3, params=start)
