"""Models whose data are on devices: the fit of the host, and of each draw its values alone copied."""

from __future__ import annotations

from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, transfers

import mpiad
from mpiad import vi
from mpiad.parallel import Adam
from mpiad.vi import MeanFieldGaussian

# All fits have the draws of one key, but for those to which a test gives another `rng`.
VI = partial(vi.VI, rng=0)

_DATA = np.random.default_rng(1).normal(size=(200, 2)) + np.array([0.5, -1.0])


def loss(theta, data):
    return 0.5 * anp.sum((data["x"] - theta) ** 2)


def _fitted(put, gradient="pathwise", schedule="even"):
    settings = {"n_samples_per_epoch": 6, "gradient": gradient, "schedule": schedule}
    vi = VI(loss, MeanFieldGaussian(2), ("norm", 0.0, 2.0), Adam(0.1), **settings)
    return vi, vi.run({"x": put(_DATA), "name": "data"}, n_epochs=15)


@pytest.mark.parametrize("gradient", ["pathwise", "score"])
def test_a_fit_is_that_of_the_host(gradient):
    host, found = _fitted(np.asarray, gradient)[1], _fitted(on_device, gradient)[1]
    np.testing.assert_allclose(found.history["objective"], host.history["objective"], rtol=1e-9)
    np.testing.assert_allclose(found.best_params["mean"], host.best_params["mean"], rtol=1e-8)
    assert sum(found.history["dropped"]) == 0


@pytest.mark.mpi(min_size=2)
def test_draws_that_are_handed_out():
    host, found = _fitted(np.asarray, schedule="dynamic")[1], _fitted(on_device, schedule="dynamic")[1]
    np.testing.assert_allclose(found.best_params["mean"], host.best_params["mean"], rtol=1e-8)


@pytest.mark.serial
def test_a_draw_copies_itself_its_value_and_its_gradient():
    seen = []

    def watched(theta, data):
        seen.append(type(mpiad.stop_gradient(theta)))
        return loss(theta, data)

    data = {"x": on_device(_DATA)}
    vi = VI(watched, MeanFieldGaussian(2), ("norm", 0.0, 2.0), Adam(0.1), n_samples_per_epoch=4)
    transfers.reset()
    vi.run(data, n_epochs=3)
    assert set(seen) == {DeviceArray} and len(seen) == 12
    assert transfers.h2d == 12 and transfers.d2h == 24
