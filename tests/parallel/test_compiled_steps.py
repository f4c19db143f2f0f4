"""Training steps whose gradient, with its sums over the ranks, is one compiled program."""

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad as plain_grad
from autograd import value_and_grad as plain_value_and_grad
from autograd.extend import defvjp, primitive
from mpi4py import MPI
from random_streams import generator

import mpiad
import mpiad.debug
from mpiad.errors import NotFiniteError, ReplicationError, UnfinishedMessagesError
from mpiad.extend import custom_operator, defadjoint
from mpiad.parallel import (
    SGD,
    Adam,
    AdamW,
    DistributedDataContainer,
    DistributedOptimizer,
    ParameterGroups,
    buckets,
    value_and_grad,
)
from mpiad.parallel.adam import Rule
from mpiad.pytrees import flatten

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1
SAMPLES, BATCH, EPOCHS = 41, 10, 3  # the last batch of an epoch has one sample, and the other ranks have none
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SAMPLES, 3))
Y = np.sin(X.sum(1))
START = {"w1": RNG.normal(size=(3, 5)), "b1": np.zeros(5), "w2": [RNG.normal(size=5), 0.5], "depth": 2}
OWN = slice(COMM.rank, None, COMM.size)


def loss(p, x, y):
    return anp.mean((anp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"][0] + p["w2"][1] - y) ** 2)


def programs(jitted):
    """Return the numbers of programs of the functions derived from a jitted loss; fail if some call was interpreted."""
    for derived in jitted._derived.values():
        assert not derived.refused
        assert None not in derived._cache.entries.values()
    return [len(derived._cache.entries) for derived in jitted._derived.values()]


def floats(p):
    return {key: value for key, value in p.items() if key != "depth"}


def batches(count=1):
    data = DistributedDataContainer((X, Y), batch_size=BATCH, shuffle=True, rng=4)
    for epoch in range(count * EPOCHS):
        data.set_epoch(epoch)
        yield from data


def in_one_process(options):
    """Train with whole batches on one rank, by plain autograd; the optimizers have their own tests."""
    rule, p, losses, held = Adam(1e-2), START, [], []
    state = rule.setup(p)
    for epoch in range(EPOCHS):
        order = generator(4, epoch).permutation(SAMPLES)
        for k in range(0, SAMPLES, BATCH):
            x, y = X[order[k : k + BATCH]], Y[order[k : k + BATCH]]
            losses.append(loss(p, x, y))
            held.append((len(x), plain_grad(lambda q, p=p, x=x, y=y: loss({**p, **q}, x, y))(floats(p))))
            if len(held) < options.get("accumulate", 1):
                continue
            factor = sum(count for count, _ in held) if options.get("reduction") != "sum" else 1
            g: dict[str, Any] = {"depth": None}
            for key in ("w1", "b1"):
                g[key] = sum(count * part[key] for count, part in held) / factor
            g["w2"] = [sum(count * part["w2"][k] for count, part in held) / factor for k in range(2)]
            norm = np.sqrt(sum(np.sum(np.square(part)) for part in (g["w1"], g["b1"], *g["w2"])))
            scale = min(options.get("clip_norm", np.inf) / norm, 1.0)
            g = {"depth": None, "w1": scale * g["w1"], "b1": scale * g["b1"], "w2": [scale * part for part in g["w2"]]}
            state, p = rule.update(state, p, g)
            held = []
    return p, losses


def agrees(p, exact):
    for key in ("w1", "b1"):
        np.testing.assert_allclose(p[key], exact[key], rtol=1e-11, atol=1e-13)
    for part, expected in zip(p["w2"], exact["w2"]):
        np.testing.assert_allclose(part, expected, rtol=1e-11)
    assert p["depth"] == 2


def has_the_same_bits_on_all_ranks(p):
    return (
        len(set(COMM.allgather((p["w1"].tobytes(), p["b1"].tobytes(), *[np.asarray(x).tobytes() for x in p["w2"]])))) == 1
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 60, "clip_norm": 0.4}, {"reduction": "sum"}, {"accumulate": 3}], ids=str
)
def test_steps_with_a_compiled_loss_follow_the_training_in_one_process(options):
    """An epoch has four batches of ten samples and one of one, so that each rank has two numbers of samples."""
    jitted, optimizer, p = mpiad.jit(loss), DistributedOptimizer(Adam(1e-2), **options), START
    state, losses = optimizer.setup(p), []
    for x, y in batches():
        state, p, mean = optimizer.step(state, p, jitted, x, y)
        losses.append(mean)
    exact, expected = in_one_process(options)
    np.testing.assert_allclose(losses, expected, rtol=1e-11)
    agrees(p, exact)
    assert has_the_same_bits_on_all_ranks(p)
    # The number among the parameters is a float at first, and then NumPy's. With accumulated gradients, another program
    # makes the updates, and gets no batch.
    assert programs(jitted) == ([3, 2] if "accumulate" in options else [3])


@pytest.mark.parametrize("form", ["jit of the gradient", "gradient of jit", "in a step of the user's"])
def test_gradients_of_all_samples_are_compiled(form):
    jitted = mpiad.jit(loss)
    options = {"bucket_bytes": 60, "samples": lambda p, x, y: len(y)}
    both = value_and_grad(jitted if form == "gradient of jit" else loss, **options)

    def step(p, x, y):
        mean, g = both(p, x, y)
        return mean, {"w1": p["w1"] - 0.1 * g["w1"], "b1": p["b1"] - 0.1 * g["b1"], "w2": g["w2"], "depth": g["depth"]}

    call = {"jit of the gradient": mpiad.jit(both), "gradient of jit": both, "in a step of the user's": mpiad.jit(step)}[
        form
    ]
    exact, by_p = plain_value_and_grad(lambda q: loss({**START, **q}, X, Y))(floats(START))
    by_p["depth"] = None
    if form == "in a step of the user's":
        by_p |= {key: START[key] - 0.1 * by_p[key] for key in ("w1", "b1")}
    for _ in range(3):
        mean, g = call(START, X[OWN], Y[OWN])
        assert mean == pytest.approx(exact, rel=1e-13)
        agrees({**g, "depth": 2}, by_p)
    assert g["depth"] is None
    assert isinstance(g["w2"][1], np.float64)
    assert programs(jitted) == [1] if form == "gradient of jit" else not call.refused


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_parameters_of_other_dtypes(dtype):
    w = (np.arange(1, 5) + 0.5j).astype(dtype) if dtype == np.complex128 else np.arange(1, 5, dtype=dtype)
    x = (
        np.random.default_rng(COMM.rank)
        .normal(size=(3 + COMM.rank, 4))
        .astype(np.float32 if dtype == np.float32 else float)
    )
    loss = lambda w, x: anp.mean(anp.abs(anp.sin(x @ w)) ** 2)  # noqa: E731
    every = np.concatenate(COMM.allgather(x))
    exact, by_w = plain_value_and_grad(lambda w: loss(w, every))(w)
    call = value_and_grad(mpiad.jit(loss))
    for _ in range(2):
        mean, g = call(w, x)
        assert g.dtype == dtype
        np.testing.assert_allclose(mean, exact, rtol=1e-6 if dtype == np.float32 else 1e-13)
        np.testing.assert_allclose(
            g, by_w, rtol=1e-5 if dtype == np.float32 else 1e-12, atol=1e-6 if dtype == np.float32 else 0
        )


def test_sums_start_between_the_parts_of_the_adjoint(monkeypatch):
    """The sum of the second layer's gradient starts before the first layer's is computed, in each run."""
    sizes = []
    for name in ("start_sum_in_place", "sum_in_place"):
        call = getattr(buckets, name)
        monkeypatch.setattr(buckets, name, lambda c, x, *comm, call=call: sizes.append(len(x)) or call(c, x, *comm))
    compiled = mpiad.jit(value_and_grad(loss, bucket_bytes=48))
    for _ in range(2):
        compiled(START, X[OWN], Y[OWN])
    assert sizes == 2 * [6, 15, 5]
    order = [line.split()[0] for line in compiled.program(START, X[OWN], Y[OWN]).loops.splitlines()]
    first = order.index("_start")
    assert order.index("summed") < first < order.index("_start", first + 1) < order.index("_reduce")
    assert "dot" in order[first : order.index("_start", first + 1)]


def test_a_large_gradient_is_compiled_before_it_runs(capsys):
    x = np.linspace(0, 1, 20_000)
    mean, g = value_and_grad(mpiad.jit(lambda w, x: print(type(w).__name__) or anp.mean(anp.sin(x * w))))(2.0, x)
    assert capsys.readouterr().out == "DeviceBox\n"  # of traced arrays
    np.testing.assert_allclose([mean, g], [np.mean(np.sin(2 * x)), np.mean(x * np.cos(2 * x))], rtol=1e-13)


def test_compiled_and_interpreted_ranks_train_together():
    """Ranks without samples and ranks whose loss can't be compiled are among the others."""
    optimizer, p = DistributedOptimizer(Adam(1e-2), bucket_bytes=60), START
    losses = [mpiad.jit(loss), loss, mpiad.jit(lambda p, x, y: loss(p, x, y) if p["b1"][0] < 9 else 0.0)]
    state = optimizer.setup(p)
    for x, y in batches():
        state, p, _ = optimizer.step(state, p, losses[COMM.rank % 3], x, y)
    agrees(p, in_one_process({})[0])
    assert has_the_same_bits_on_all_ranks(p)


@pytest.mark.thorough
def test_programs_of_many_optimizers_are_not_kept():
    jitted, (x, y) = mpiad.jit(loss), next(batches())
    for k in range(20):
        optimizer = DistributedOptimizer(Adam(1e-3 * (k + 1), epsilon=1e-5))
        optimizer.step(optimizer.setup(START), START, jitted, x, y)
    assert len(jitted._derived) == 16


SINGLE = np.linspace(-1, 1, 9, dtype=np.float32)
MIXED = {"single": SINGLE, "z": (1 + 2j) * np.ones((2, 3)), "long": np.linspace(-1, 1, 9_000), "n": 3, "number": 0.5}


def linear(p, gradients):
    """Return a loss whose gradient is given, so that compiled and interpreted steps sum equal gradients."""
    return sum([anp.sum(anp.real(p[key] * g)) for key, g in gradients.items()])


def samples(p, gradients):
    return 1 + COMM.rank


def given_gradients(k):
    rng = np.random.default_rng([k, COMM.rank])
    draw = {key: rng.normal(size=np.shape(MIXED[key])) for key in ("single", "z", "long", "number")}
    return {**draw, "single": draw["single"].astype(np.float32), "z": draw["z"] * (0.3 - 1j)}


GROUPS = ParameterGroups(
    {"a": AdamW(0.1, weight_decay=0.3), "b": SGD(lambda k: 0.1 / (1 + k), 0.9, True), "frozen": None},
    lambda path: {"z": "b", "n": "b", "l": "frozen"}.get(path[8], "a"),
)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Adam(lambda k: 1e-2 / (1 + k)), {}),
        (AdamW(0.1), {"clip_norm": 0.7, "skip_nonfinite": True}),
        (SGD(0.1, 0.5, True, 0.2), {"reduction": "sum", "bucket_bytes": 64}),
        (GROUPS, {"clip_norm": 3.0, "own": lambda path: "single" in path or "z" in path, "check_every": 2}),
        (Adam(0.1), {"clip_norm": 0.7, "accumulate": 2, "own": lambda path: "z" in path}),
        (SGD(0.1), {"reduction": "sum", "own": lambda path: "long" in path}),
    ],
    ids=["schedule", "clipped", "sum", "groups and own", "accumulated", "own"],
)
def test_compiled_steps_have_the_bits_of_interpreted_ones(rule, options):
    results = []
    for fun in (linear, mpiad.jit(linear)):
        optimizer, p = DistributedOptimizer(rule, **options), MIXED
        state, means = optimizer.setup(p), []
        for k in range(6):
            state, p, mean = optimizer.step(state, p, fun, given_gradients(k), samples=samples)
            means.append(mean)
        results.append((p, state, means))
    (one, one_state, one_means), (two, two_state, two_means) = results
    np.testing.assert_allclose(one_means, two_means, rtol=1e-6)  # a part of the loss is in single precision
    for expected, found in zip(*[flatten(part)[0] for part in ((one, one_state), (two, two_state))], strict=True):
        assert np.shape(found) == np.shape(expected)
        if isinstance(expected, (float, np.ndarray)):
            assert found.dtype == expected.dtype
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    assert (two["long"] is MIXED["long"]) == (rule is GROUPS) and two["n"] == 3
    assert len(programs(fun)) == (2 if "accumulate" in options else 1)


@pytest.mark.unguarded
def test_a_step_is_one_program_and_learning_rates_are_numbers_of_it():
    rates, p, fun = iter(np.linspace(0.1, 0.9, 6)), np.ones(3), mpiad.jit(lambda w, x: anp.mean((w - x) ** 2))
    optimizer = DistributedOptimizer(Adam(lambda k: next(rates)), clip_norm=0.1)
    state = optimizer.setup(p)
    for _ in range(4):
        state, p, _ = optimizer.step(state, p, fun, np.zeros(3))
    (program,) = fun._derived.values()
    first, second = (state["optimizer"][name] for name in ("first", "second"))
    loops = program.program(p, first, second, 0.1, 0.2, np.zeros(3)).loops
    assert programs(fun) == [1]
    order = [line.split()[0] for line in loops.splitlines()]
    assert [name for name in order if name != "loop"] == ["summed", "_reduce", "_finish", "clipped"]
    assert order[-1] == "loop"
    for rate in (0.5, 0.25):  # of another optimizer
        optimizer.optimizer = Adam(rate)
        state, p, _ = optimizer.step(state, p, fun, np.zeros(3))
    assert programs(fun) == [1]


@pytest.mark.parametrize(
    "change",
    [{"reduction": "sum"}, {"clip_norm": 0.01}, {"own": lambda path: "b" in path}, {"optimizer": SGD(0.1, 0.5)}],
    ids=lambda change: next(iter(change)),
)
def test_changed_settings_of_an_optimizer_are_those_of_the_next_compiled_step(change):
    results = []
    for fun in (loss, mpiad.jit(loss)):
        optimizer, p, (x, y) = DistributedOptimizer(SGD(0.1, 0.9), clip_norm=0.5), START, next(batches())
        state = optimizer.setup(p)
        for k in range(4):
            state, p, _ = optimizer.step(state, p, fun, x, y)
            if k == 1:
                vars(optimizer).update(change)
        results.append(p)
    agrees(results[1], results[0])


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}], ids=str)
@pytest.mark.parametrize("sizes", [(1, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("dtypes", [(float, np.float32), (np.float32, float)], ids=str)
def test_own_parameters_may_change_shape_and_dtype_between_compiled_steps(sizes, dtypes, options):
    jitted = mpiad.jit(lambda p, x: anp.mean((p["w"] - x) ** 2) + anp.sum(p["head"] ** 2))
    pair = [DistributedOptimizer(SGD(0.25), own=lambda path: "head" in path, **options) for _ in range(2)]
    for size, dtype in zip(sizes, dtypes):
        p = {"w": np.ones(50_000), "head": np.arange(1, size + 1, dtype=dtype)}  # large, so compiled before the first run
        for _ in range(2):
            found, exact = [
                optimizer.step(optimizer.setup(p), p, fun, np.zeros(50_000))[1]
                for optimizer, fun in zip(pair, (jitted, jitted.fun))
            ]
            assert found["head"].dtype == dtype
            np.testing.assert_allclose(found["head"], exact["head"], rtol=1e-6)
    programs(jitted)


@pytest.mark.parametrize("dtype", [np.float16, np.longdouble])
def test_gradients_without_kernels_for_their_dtype_are_clipped(dtype):
    optimizer, jitted = DistributedOptimizer(SGD(0.5), clip_norm=1.0), mpiad.jit(lambda w, x: anp.sum((w - x) ** 2))
    w = np.full(4, 2, dtype)
    for _ in range(3):  # each step has the length 0.5
        _, w, _ = optimizer.step(optimizer.setup(w), w, jitted, np.zeros(4, dtype))
        assert w.dtype == dtype
    np.testing.assert_allclose(w, np.full(4, 1.25), rtol=1e-6)


def test_a_step_with_finite_loss_and_norm_is_not_skipped_if_their_sum_overflows():
    optimizer, p, huge = DistributedOptimizer(SGD(1e-308), skip_nonfinite=True), np.ones(1), np.full(1, 1e308 / COMM.size)
    for fun in (lambda w, x: anp.sum(w * x), mpiad.jit(lambda w, x: anp.sum(w * x))):
        state, w, _ = optimizer.step(optimizer.setup(p), p, fun, huge)
        assert state["skipped"] == 0
        assert w[0] < 1.0


class SignDescent(Rule):
    """A rule of the user, whose class isn't followed by `jit`."""

    moments = ()

    def formula(self, x, g, *others, out):
        return (np.subtract(x, others[0] * np.sign(g), out=out[0]),)


def test_a_rule_of_the_user_is_interpreted_and_its_gradient_compiled():
    optimizer, fun = DistributedOptimizer(SignDescent(0.25)), mpiad.jit(lambda w, x: anp.sum(w * w * x))
    p = np.array([1.0, -1.0])
    state = optimizer.setup(p)
    for _ in range(3):
        state, p, _ = optimizer.step(state, p, fun, np.ones(2))
    assert p.tolist() == [0.25, -0.25]
    assert programs(fun) == [1]


@primitive
def decides_backwards(x):
    return 1.0 * x


defvjp(decides_backwards, lambda ans, x: lambda g: 1.0 * g if anp.sum(g) < 1e6 else 0.0 * g)


@pytest.mark.parametrize("here", [True, False])
def test_a_reverse_pass_that_cannot_be_compiled_goes_on_with_the_sums_that_have_started(here):
    """On all ranks or on one, while the others run programs."""
    decides = decides_backwards if here or COMM.rank == ROOT else lambda x: 1.0 * x
    call = value_and_grad(mpiad.jit(lambda p, x: anp.mean((decides(x * p[0]) * p[1] * p[2]) ** 2)), bucket_bytes=8)
    every = np.arange(1.0, 5.0 + COMM.size)
    exact = [2 * np.mean((every * 6) ** 2) / p for p in (1.0, 2.0, 3.0)]
    for _ in range(3):
        np.testing.assert_allclose(call((1.0, 2.0, 3.0), every[OWN])[1], exact, rtol=1e-13)


def test_a_compiled_loss_may_communicate():
    x = np.random.default_rng(COMM.rank).normal(size=3 + COMM.rank)

    def fun(p, x):
        centre = mpiad.mpi_allreduce(anp.sum(anp.tanh(p[0] * x))) / total
        return anp.mean((anp.tanh(p[0] * x) - p[1] * centre) ** 2)

    total = COMM.allreduce(len(x))
    every = np.concatenate(COMM.allgather(x))
    exact = plain_grad(lambda p: anp.mean((anp.tanh(p[0] * every) - p[1] * anp.mean(anp.tanh(p[0] * every))) ** 2))(
        (0.7, 0.9)
    )
    call = value_and_grad(mpiad.jit(fun), bucket_bytes=1)
    for _ in range(3):
        np.testing.assert_allclose(call((0.7, 0.9), x)[1], exact, rtol=1e-12)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.unguarded
def test_what_is_wrong_on_one_rank_raises_on_all(large):
    x = np.ones(20_000 if large else 2)
    here = COMM.rank == ROOT
    good = value_and_grad(mpiad.jit(lambda p, x: anp.mean(p * x)))
    wrong = value_and_grad(mpiad.jit(lambda p, x: p * x if here else anp.mean(p * x)))
    optimizer = DistributedOptimizer(SGD(0.1))
    state = optimizer.setup(1.0)
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"one real number.*shape .* on rank {ROOT}"):
            wrong(1.0, x)
        with pytest.raises(ValueError, match=f"DistributedOptimizer.step: none of the {COMM.size} rank"):
            optimizer.step(state, 1.0, mpiad.jit(lambda p, x: anp.mean(p * x)), x[:0])
        with pytest.raises(TypeError, match="floats to train, but got str"):
            good("weights", x)
        assert good(2.0, x)[0] == 2.0
    assert np.isnan(good(np.nan if here else 1.0, x)[0])
    assert good(2.0, x) == (2.0, 1.0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.unguarded
def test_parameters_that_differ_are_refused_on_all_ranks():
    loss = mpiad.jit(lambda p, x: anp.sum(p["w"]) * anp.mean(x))
    optimizer = DistributedOptimizer(SGD(0.1))
    for length in (3, 3, 2):
        params = {"n": 1, "w": np.ones(length if COMM.rank == ROOT else 2)}
        if length == 2:
            optimizer.step(optimizer.setup(params), params, loss, np.ones(4))
            continue
        with pytest.raises(ValueError, match=rf"DistributedOptimizer.step: .* on rank {ROOT} params\['w'\] has shape \(3"):
            optimizer.step(optimizer.setup(params), params, loss, np.ones(4))


def test_checks_of_compiled_steps_are_those_of_interpreted_ones():
    jitted, x = mpiad.jit(lambda p, x: anp.mean((p["w"] - x) ** 2) + 0 * p["b"]), np.zeros(4)
    bad = np.full(4, np.nan if COMM.rank == ROOT else 0.0)
    plain, skipping = DistributedOptimizer(SGD(0.1)), DistributedOptimizer(SGD(0.1), skip_nonfinite=True)
    p = {"w": 1.0, "b": 0.0}
    state = plain.setup(p)
    for k in range(1, 4):
        with pytest.raises(NotFiniteError, match=rf"the loss is nan for .*Nothing was updated.* on rank {ROOT}"):
            plain.step(state, p, jitted, bad)
        state, p, _ = plain.step(state, p, jitted, x)
        assert p["w"] == pytest.approx(0.8**k)
    p = {"w": 1.0, "b": 0.0}
    state = skipping.setup(p)
    for k in range(1, 4):
        state, p, mean = skipping.step(state, p, jitted, bad)
        assert np.isnan(mean) and state["skipped"] == k
        state, p, _ = skipping.step(state, p, jitted, x)
        assert p["w"] == pytest.approx(0.8**k)
    frozen = DistributedOptimizer(
        ParameterGroups({"all": SGD(0.1), "frozen": None}, lambda path: "all" if "w" in path else "frozen")
    )
    p = {"w": 1.0, "b": 3.0}
    state = frozen.setup(p)
    for k in range(1, 4):
        state, p, _ = frozen.step(state, p, jitted, x)
        assert (p["w"], p["b"]) == (pytest.approx(0.8**k), 3.0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.unguarded
def test_replicas_are_compared_in_every_second_compiled_step():
    jitted, optimizer = mpiad.jit(lambda w, x: anp.mean((w - x) ** 2)), DistributedOptimizer(SGD(0.1), check_every=2)
    p, state = 1.0, optimizer.setup(1.0)
    for _ in range(3):
        state, p, _ = optimizer.step(state, p, jitted, np.zeros(2))
    p = p + (COMM.rank == ROOT) * 1e-15
    state, p, _ = optimizer.step(state, p, jitted, np.zeros(2))
    with pytest.raises(ReplicationError, match=r"(?s)DistributedOptimizer.step: .*params"):
        optimizer.step(state, p, jitted, np.zeros(2))


@pytest.mark.mpi(min_size=2)
def test_replicas_that_differ_are_found_in_debug_mode():
    call = value_and_grad(mpiad.jit(lambda w, x: anp.mean((w - x) ** 2)))
    assert call(3.0, np.zeros(2)) == (9.0, 6.0)
    with mpiad.debug.checked():
        assert call(3.0, np.zeros(2)) == (9.0, 6.0)
        with pytest.raises(ReplicationError, match=r"(?s)parallel.value_and_grad: .*params"):
            call(3.0 + (COMM.rank == ROOT), np.zeros(2))
    assert call(3.0, np.zeros(2)) == (9.0, 6.0)


@pytest.mark.parametrize("layers", [(0, 1), (2, 0), (2, 2)])
def test_an_exception_among_sums_of_a_program_asks_for_a_reset(layers):
    """The ranks have started different numbers of sums, some perhaps none."""
    raising = []

    def layer(number):
        made = custom_operator(lambda x: 1.0 * x)

        def adjoint(g):
            if number in raising:
                raise KeyError("in the reverse pass")
            return 1.0 * g

        defadjoint(made, custom_operator(adjoint))
        return made

    first, second, third = map(layer, range(3))
    comm = COMM.Dup()
    compiled = mpiad.jit(lambda p, x: anp.mean(third(second(first(x * p[0]) * p[1]) * p[2]) ** 2))
    call = value_and_grad(compiled, bucket_bytes=8, comm=comm)
    given = (np.ones(1), np.ones(1), np.ones(1)), np.arange(1.0, 4.0) + comm.rank
    exact = call(*given)[1]
    np.testing.assert_allclose(call(*given)[1], exact, rtol=1e-14)
    raising.append(layers[0] if comm.rank == ROOT else layers[1])
    with pytest.raises(KeyError):
        call(*given)
    raising.clear()
    if min(layers[: COMM.size]) < 2:  # otherwise no rank has started a sum
        with pytest.raises(UnfinishedMessagesError, match=r"an exception ended a gradient whose sums .* mpiad.reset"):
            call(*given)
        mpiad.reset(comm)
    np.testing.assert_allclose(call(*given)[1], exact, rtol=1e-14)
    comm.Free()


def test_a_step_in_another_compiled_function_is_interpreted(caplog):
    optimizer = DistributedOptimizer(SGD(0.1))
    state = optimizer.setup(np.ones(2))
    step = mpiad.jit(lambda w, x: optimizer.step(state, w, lambda w, x: anp.mean((w - x) ** 2), x)[1])
    np.testing.assert_allclose(step(np.ones(2), np.zeros((3, 2))), 0.9)
    assert "it calls DistributedOptimizer.step" in caplog.text or COMM.rank
