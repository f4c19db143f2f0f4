"""NumPyro's side: `SVI` with a multivariate normal guide; the steps are a `lax.scan`, and all draws one `vmap`."""

from __future__ import annotations

import time

import epidemic
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.initialization import init_to_value

jax.config.update("jax_enable_x64", True)
options = epidemic.arguments()
y = jnp.asarray(epidemic.measured())


def infected(theta):
    """Return the fractions of infected people at the times of measurement."""
    beta, gamma = jnp.exp(theta[0]), jnp.exp(theta[1])

    def step(state, _):
        s, i = state
        new, ended = epidemic.STEP * beta * s * i, epidemic.STEP * gamma * i
        state = s - new, i + new - ended
        return state, state[1]

    start = jnp.asarray(epidemic.SUSCEPTIBLE), jnp.asarray(epidemic.INFECTED)
    return jax.lax.scan(step, start, length=epidemic.STEPS)[1][:: epidemic.EVERY]


def model(y):
    """Draw the parameters and the measurements."""
    theta = numpyro.sample("theta", dist.Normal(jnp.asarray(epidemic.START), 1.0).to_event(1))
    numpyro.sample("y", dist.Normal(infected(theta), epidemic.NOISE).to_event(1), obs=y)


begin = time.perf_counter()
start = init_to_value(values={"theta": jnp.asarray(epidemic.START)})
guide = AutoMultivariateNormal(model, init_loc_fn=start, init_scale=epidemic.WIDTH)
optimizer = numpyro.optim.Adam(lambda k: epidemic.rate(k, options.epochs, jnp.cos))
svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=options.draws))
params = svi.run(jax.random.PRNGKey(0), options.epochs, y, progress_bar=False).params
factor = jax.block_until_ready(params["auto_scale_tril"])
epidemic.show(time.perf_counter() - begin, params["auto_loc"], jnp.sqrt(jnp.sum(factor**2, axis=1)))
