"""Trainings on several ranks against the one-process training with the same batches, written without the library."""

from dataclasses import dataclass

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad as plain_grad
from autograd.extend import defvjp, primitive
from mpi4py import MPI
from random_streams import generator

import mpiad
from mpiad.errors import ReplicationError
from mpiad.parallel import (
    SGD,
    Adam,
    AdamW,
    DistributedDataContainer,
    DistributedOptimizer,
    buckets,
    synchronize,
    value_and_grad,
)

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1
SAMPLES, BATCH, EPOCHS = 37, 10, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SAMPLES, 3))
Y = np.sin(X.sum(1))
START = {"w1": RNG.normal(size=(3, 5)), "b1": np.zeros(5), "w2": RNG.normal(size=5).astype(np.float32), "depth": 2}


def loss(p, x, y):
    return anp.mean((anp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] - y) ** 2)


def floats(p):
    return {key: value for key, value in p.items() if key != "depth"}


def in_one_process(rule, accumulate=1, clip=None):
    """Train with whole batches in the order of the container on one rank: NumPy and plain autograd only."""
    p, state, losses, held = START, rule.setup(START), [], []
    for epoch in range(EPOCHS):
        order = generator(4, epoch).permutation(SAMPLES)
        for k in range(0, SAMPLES, BATCH):
            x, y = X[order[k : k + BATCH]], Y[order[k : k + BATCH]]
            losses.append(loss(p, x, y))
            held.append((len(x), plain_grad(lambda q, p=p, x=x, y=y: loss({**p, **q}, x, y))(floats(p))))
            if len(held) < accumulate:
                continue
            total = sum(count for count, _ in held)
            g = {key: sum(count * part[key] for count, part in held) / total for key in floats(p)}
            g = {key: value.astype(START[key].dtype) for key, value in g.items()}
            norm = np.sqrt(sum(np.sum(value.astype(float) ** 2) for value in g.values()))
            if clip is not None and norm > clip:
                g = {key: (value * (clip / norm)).astype(value.dtype) for key, value in g.items()}
            state, p = rule.update(state, p, {**g, "depth": None})
            held = []
    return p, losses


def batches():
    data = DistributedDataContainer((X, Y), batch_size=BATCH, shuffle=True, rng=4)
    for epoch in range(EPOCHS):
        data.set_epoch(epoch)
        yield from data


def agrees(p, exact):
    np.testing.assert_allclose(p["w1"], exact["w1"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(p["w2"], exact["w2"], rtol=1e-5)
    assert p["w2"].dtype == np.float32
    assert p["depth"] == 2


RULES = [SGD(0.1, 0.9, nesterov=True), Adam(1e-2), AdamW(1e-2, weight_decay=0.1)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 60}, {"accumulate": 3, "clip_norm": 0.4}], ids=str)
def test_steps_follow_the_training_in_one_process(rule, options):
    optimizer, p = DistributedOptimizer(rule, **options), START
    state, losses = optimizer.setup(p), []
    for x, y in batches():
        state, p, mean = optimizer.step(state, p, loss, x, y)
        losses.append(mean)
    exact, expected = in_one_process(rule, options.get("accumulate", 1), options.get("clip_norm"))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    agrees(p, exact)
    for copies in (COMM.allgather(p["w1"].tobytes()), COMM.allgather(p["w2"].tobytes())):
        assert len(set(copies)) == 1  # the same bits everywhere


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "bucket_bytes": 60}], ids=str)
def test_updates_from_own_gradients_follow_it_too(options):
    rule = Adam(1e-2)
    optimizer, p = DistributedOptimizer(rule, **options), START
    state = optimizer.setup(p)
    for x, y in batches():
        own = None
        if len(x):
            own = {**plain_grad(lambda q, p=p, x=x, y=y: loss({**p, **q}, x, y))(floats(p)), "depth": None}
        state, p = optimizer.update(state, p, own, samples=len(x))
    agrees(p, in_one_process(rule, options.get("accumulate", 1))[0])


@pytest.mark.parametrize("options", [{"accumulate": 3}, {"accumulate": 3, "bucket_bytes": 60}], ids=str)
def test_accumulated_steps_weigh_all_their_samples(options):
    """With plain descent, which a wrong factor changes; Adam's steps hardly depend on one."""
    rule = SGD(0.1)
    optimizer, p = DistributedOptimizer(rule, **options), START
    state = optimizer.setup(p)
    for x, y in batches():
        state, p, _ = optimizer.step(state, p, loss, x, y)
    agrees(p, in_one_process(rule, 3)[0])


def test_gradients_may_be_written_into_the_same_array_again():
    optimizer, p, g = DistributedOptimizer(SGD(1.0), accumulate=2), np.zeros(2), np.empty(2)
    state = optimizer.setup(p)
    for factor in (1.0, 10.0):
        g[:] = [factor, 2 * factor]
        state, p = optimizer.update(state, p, g)
    np.testing.assert_array_equal(p, [-5.5, -11.0])


@pytest.mark.parametrize("shape", [(2,), ()])
def test_accumulated_steps_of_parameters_in_another_byte_order(shape):
    found, optimizer = [], DistributedOptimizer(SGD(0.1), accumulate=2)
    for dtype in ("<f8", ">f8"):
        p = np.ones(shape, dtype)
        state = optimizer.setup(p)
        for _ in range(4):
            state, p, _ = optimizer.step(state, p, lambda p, x: anp.mean((p - x) ** 2), np.zeros((3, *shape)))
        found.append(p)
    np.testing.assert_array_equal(*found)
    assert not shape or p.dtype == ">f8"


def test_accumulated_steps_keep_no_memory_of_an_operator_s():
    work = np.empty(2)

    @primitive
    def scaled_sum(w, scale):
        return scale * np.sum(w)

    def gradient_in_the_same_place(ans, w, scale):
        def pull(g):
            work[:] = g * scale
            return work

        return pull

    defvjp(scaled_sum, gradient_in_the_same_place, None)
    optimizer, p = DistributedOptimizer(SGD(1.0), accumulate=3), np.zeros(2)
    state = optimizer.setup(p)
    for scale in (1.0, 2.0, 4.0):
        state, p, _ = optimizer.step(state, p, lambda w, x: scaled_sum(w, x[0]), np.array([scale]))
    np.testing.assert_allclose(p, -7.0 / 3.0, rtol=1e-15)


def test_gradients_whose_squares_are_too_large_are_clipped():
    for g in (np.array([3e25, 4e25], np.float32), np.array([3e200, 4e200])):
        optimizer, p = DistributedOptimizer(SGD(np.float32(0.5)), clip_norm=np.float64(1.0)), np.zeros_like(g)
        new = optimizer.update(optimizer.setup(p), p, g)[1]
        np.testing.assert_allclose(new, [-0.3, -0.4], rtol=1e-6)
        # A compiled update whose factor is a number of NumPy would have another dtype than the parameters.
        _, new, _ = optimizer.step(optimizer.setup(p), p, mpiad.jit(lambda w, g: anp.dot(w, g)), g)
        np.testing.assert_allclose(new, [-0.3, -0.4], rtol=1e-6)


def test_without_counts_ranks_weigh_alike():
    g = np.array([1.0, 10.0]) * (COMM.rank + 1)
    for reduction, factor in (("sum", 1.0), ("mean", 1 / COMM.size)):
        optimizer = DistributedOptimizer(SGD(1.0), reduction=reduction)
        _, x = optimizer.update(optimizer.setup(np.zeros(2)), np.zeros(2), g)
        np.testing.assert_allclose(x, -np.array([1.0, 10.0]) * factor * sum(range(1, COMM.size + 1)), rtol=1e-14)


@pytest.mark.parametrize("count", [1, 3, 5, 12])
@pytest.mark.parametrize("where", ["even", "root", "first two"])
def test_gradients_of_integer_data_are_the_same_bits_however_the_samples_lie(count, where):
    """Ranks without a sample included: 3 samples on 4 ranks, or all on one."""
    x = np.random.default_rng(count).integers(-9, 9, (count, 4)).astype(float)
    y = np.random.default_rng(7).integers(-9, 9, count).astype(float)
    owner = {"even": np.arange(count) % COMM.size, "root": np.full(count, ROOT), "first two": np.arange(count) % 2}[where]
    owner = np.minimum(owner, COMM.size - 1)
    mine = owner == COMM.rank
    w, b = np.array([3.0, -1.0, 2.0, 5.0]), 4.0

    def squares(p, x, y):
        return anp.mean((x @ p[0] + p[1] - y) ** 2)

    mean, (by_w, by_b) = value_and_grad(squares)((w, b), x[mine], y[mine])
    rest = (x @ w + b - y).astype(int)
    assert by_w.tolist() == [int(2 * rest @ x[:, k].astype(int)) / count for k in range(4)]
    assert by_b == int(2 * rest.sum()) / count
    assert mean == pytest.approx(int(rest @ rest) / count, rel=1e-14)


def test_a_loss_is_not_called_without_samples():
    calls = []

    def fun(p, x):
        calls.append(len(x))
        return anp.mean(x) * p

    _, g = value_and_grad(fun)(2.0, np.full(COMM.rank, 3.0) if COMM.size > 1 else np.full(1, 3.0))
    assert g == 3.0
    assert calls == ([COMM.rank] if COMM.rank else [] if COMM.size > 1 else [1])


def test_samples_may_be_counted_by_a_function():
    def fun(p, items):
        return p * anp.mean(np.array([len(item) for item in items], float))

    items = ["a" * (COMM.rank + 1)] * (COMM.rank + 1)
    _, g = value_and_grad(fun, samples=lambda p, items: len(items))(1.0, items)
    sizes = [rank + 1 for rank in range(COMM.size) for _ in range(rank + 1)]
    assert g == pytest.approx(np.mean(sizes), rel=1e-14)


def test_a_loss_may_communicate():
    """The mean of a batch over all ranks inside the loss, as batch normalisation takes it."""
    x = np.random.default_rng(COMM.rank).normal(size=3 + COMM.rank)

    def fun(p, x):
        centre = mpiad.mpi_allreduce(anp.sum(anp.tanh(p * x))) / total
        return anp.mean((anp.tanh(p * x) - centre) ** 2)

    total = COMM.allreduce(len(x))
    every = np.concatenate(COMM.allgather(x))
    exact = plain_grad(lambda p: anp.mean((anp.tanh(p * every) - anp.mean(anp.tanh(p * every))) ** 2))(0.7)
    mean, g = value_and_grad(fun, bucket_bytes=1)(0.7, x)
    assert g == pytest.approx(exact, rel=1e-12)


def watch_messages(monkeypatch, note):
    """Have each message of sums noted: those that start early, and the last, which blocks."""
    for name in ("start_sum_in_place", "sum_in_place"):
        call = getattr(buckets, name)
        monkeypatch.setattr(buckets, name, lambda c, x, *comm, call=call: note(x) or call(c, x, *comm))


def test_sums_start_before_the_reverse_pass_has_ended(monkeypatch):
    """The last layer's gradient is under way while the first layer's is still computed."""
    from autograd.extend import defvjp, primitive

    events = []
    watch_messages(monkeypatch, lambda x: events.append(len(x)))

    @primitive
    def watched(x):
        return x * 1.0

    defvjp(watched, lambda ans, x: lambda g: (events.append("reverse pass goes on"), g)[1])

    def fun(p, x):
        return anp.mean((watched(x * p[0]) * p[1][0]) ** 2)

    value_and_grad(fun, bucket_bytes=8)((np.ones(1), np.ones(2)), np.arange(1.0, 5.0))
    assert events == [2, "reverse pass goes on", 1]


@pytest.mark.parametrize("limit, lengths", [(24, [3, 2]), (23, [2, 2, 1]), (16, [2, 2, 1]), (15, [1] * 5)])
def test_buckets_are_filled_to_their_size(monkeypatch, limit, lengths):
    sizes = []
    watch_messages(monkeypatch, lambda x: sizes.append(len(x)))
    params = [np.ones(1)] * 3 + [np.ones(2)] if limit > 15 else [np.ones(1)] * 5  # the last go first
    optimizer = DistributedOptimizer(SGD(0.1), bucket_bytes=limit)
    optimizer.update(optimizer.setup(params), params, params)
    assert sizes == lengths


@pytest.mark.parametrize("count", [1, 200])
def test_small_arrays_travel_in_one_message_for_each_dtype(monkeypatch, count):
    sizes = []
    watch_messages(monkeypatch, lambda x: sizes.append((x.dtype.char, len(x))))
    params = [np.ones(3)] * count + [np.ones((2, 2), np.float32)] * count
    optimizer = DistributedOptimizer(SGD(0.1))
    optimizer.update(optimizer.setup(params), params, params)
    assert sorted(sizes) == [("d", 3 * count), ("f", 4 * count)]


def test_synchronize_gives_all_ranks_the_roots_floats():
    rng = np.random.default_rng(COMM.rank)
    pair = [np.float32(COMM.rank), 1j * COMM.rank]
    tree = {"a": rng.normal(size=(2, 3)), "b": pair, "n": COMM.rank, "s": f"r{COMM.rank}"}
    found = synchronize(tree, ROOT)
    np.testing.assert_array_equal(found["a"], np.random.default_rng(ROOT).normal(size=(2, 3)))
    assert found["b"] == [np.float32(ROOT), 1j * ROOT]
    assert found["b"][0].dtype == np.float32
    assert (found["n"], found["s"]) == (COMM.rank, f"r{COMM.rank}")
    found["a"][0, 0] = 5.0  # may be written to


@pytest.mark.skipif(COMM.size < 2, reason="needs two ranks")
@pytest.mark.parametrize(
    "tree, text",
    [
        (
            {"a": np.ones(2 + (COMM.rank == 0)), "b": 1.0},
            r"on rank 0 tree\['a'\] has shape \(3,\) .* on the root.* tree\['a'\] has shape \(2,\)",
        ),
        (
            [np.ones(1)] * (1 + (COMM.rank == 0)),
            r"on rank 0 tree\[1\] has .*, and on the root, rank \d, there is no further leaf",
        ),
        ({"a" if COMM.rank else "z": 1.0}, r"on rank 0 tree\['z'\] has .*, and on the root, rank \d, tree\['a'\] has"),
        ([1.0 if COMM.rank else "one"], r"on rank 0 tree\[0\] has str, "),
    ],
)
def test_synchronize_says_which_leaf_differs_on_which_rank(tree, text):
    with pytest.raises(ValueError, match=text):
        synchronize(tree, ROOT)


def test_no_samples_at_all_raise_on_all_ranks():
    with pytest.raises(ValueError, match=f"none of the {COMM.size} rank"):
        value_and_grad(lambda p, x: anp.mean(p * x))(1.0, np.ones(0))
    optimizer = DistributedOptimizer(SGD(0.1))
    with pytest.raises(ValueError, match=f"none of the {COMM.size} rank"):
        optimizer.update(optimizer.setup(1.0), 1.0, 0.0, samples=0)
    assert value_and_grad(lambda p, x: anp.mean(p * x))(1.0, np.ones(2))[0] == 1.0  # and goes on


def test_a_wrong_loss_on_one_rank_raises_on_all():
    with pytest.raises(TypeError, match="one real number"):
        value_and_grad(lambda p, x: p * x if COMM.rank == ROOT else anp.mean(p * x))(1.0, np.ones(2))


@pytest.mark.serial
@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: DistributedOptimizer("adam"), TypeError, "str 'adam'"),
        (lambda: DistributedOptimizer(SGD(1.0), reduction="max"), ValueError, "'max'"),
        (lambda: DistributedOptimizer(SGD(1.0), accumulate=0), ValueError, "accumulate.*0"),
        (lambda: DistributedOptimizer(SGD(1.0), clip_norm=0.0), ValueError, "clip_norm.*0.0"),
        (
            lambda: mpiad.grad(lambda x: value_and_grad(lambda p: p**2)(x)[0])(1.0),
            TypeError,
            "a training step isn't differentiable",
        ),
        (lambda: value_and_grad(lambda p: 1.0)("weights"), TypeError, "floats to train, but got str"),
    ],
)
def test_what_cannot_be_used_is_refused(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_of_another_form_on_one_rank_raises_on_all(accumulate, rank, size):
    optimizer = DistributedOptimizer(SGD(0.1), accumulate=accumulate)
    params = {"w": np.ones(3), "b": np.zeros(2)}
    wrong = {"w": np.ones(4), "b": np.zeros(2)}
    state = optimizer.setup(params)
    for _ in range(accumulate - 1):
        state, params = optimizer.update(state, params, params)
    with pytest.raises(ValueError, match=rf"gradient.*w.*shape \(3,\).*\(4,\).*on rank {size - 1}"):
        optimizer.update(state, params, wrong if rank == size - 1 else params)
    # No sum was started, so the next update is right.
    state = optimizer.setup(params)
    for _ in range(accumulate):
        state, params = optimizer.update(state, params, {"w": np.full(3, rank + 1.0), "b": np.zeros(2)})
    np.testing.assert_allclose(params["w"], 1 - 0.1 * (size + 1) / 2)


@dataclass
class Layer:
    w: object


def test_an_object_among_the_parameters_is_refused_by_its_path():
    """Its numbers stayed as they were, and those beside it were trained."""
    loss = lambda p, x: anp.mean((p["m"].w - x) ** 2) + p["c"] ** 2  # noqa: E731
    params, x = {"m": Layer(np.ones(2)), "c": 3.0}, np.zeros((3, 2))
    optimizer = DistributedOptimizer(SGD(0.1))
    state = optimizer.setup({"c": 3.0})
    for call in (
        lambda: optimizer.step(state, params, loss, x), lambda: optimizer.update(state, params, params),
        lambda: value_and_grad(loss)(params, x), lambda: SGD(0.1).setup(params), lambda: Adam(0.1).setup(params),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"params\['m'\] is Layer .*dataclasses.asdict"):
            call()
    with pytest.raises(TypeError, match=r"parallel.synchronize: tree\['m'\] is Layer "):
        synchronize(params)


def test_gradients_accumulated_of_another_model_are_refused_on_all_ranks(rank, size):
    optimizer, other = DistributedOptimizer(SGD(0.1), accumulate=2), DistributedOptimizer(SGD(0.1))
    square = lambda p, x: anp.sum(p["w"] ** 2) + 0 * anp.sum(x)  # noqa: E731
    params, theirs = {"w": np.ones(3)}, {"w": np.ones(1)}
    held, _, _ = optimizer.step(optimizer.setup(theirs), theirs, square, np.ones(1))
    mine, _, _ = optimizer.step(optimizer.setup(params), params, square, np.ones(1))
    text = rf"gradients must match the parameters, shape \(3,\).*but the state has shape \(1,\).*on rank {size - 1}"
    for call in (
        lambda state: optimizer.step(state, params, square, np.ones(1)),
        lambda state: optimizer.update(state, params, params),
    ):
        with pytest.raises(ValueError, match=text):
            call(held if rank == size - 1 else mine)
    for made, given in ((optimizer, other), (other, optimizer)):
        with pytest.raises(TypeError, match="DistributedOptimizer.step: the state must be a dict of"):
            made.step(given.setup(params), params, square, np.ones(1))
    np.testing.assert_allclose(optimizer.step(mine, params, square, np.ones(1))[1]["w"], 1 - 0.1 * 2)


def replica(last, **given):
    """What a rank trains with; the last rank with something else, if it is given."""
    kept = {
        "w": 1.0, "rate": 0.1, "schedule": 1.0, "momentum": 0.9, "reduction": "mean", "clip": None, "seed": 3, "epoch": 1,
        "velocity": 0.0, "own": 0,
    }  # fmt: skip
    kept |= given if last else {}
    rule = SGD(lambda updates: kept["rate"] * kept["schedule"], kept["momentum"])
    optimizer = DistributedOptimizer(rule, reduction=kept["reduction"], clip_norm=kept["clip"], accumulate=2)
    params = {"w": np.full(3, kept["w"]), "own": kept["own"]}
    state = optimizer.setup(params)
    state["optimizer"]["velocity"]["w"][1] += kept["velocity"]
    data = DistributedDataContainer(X, batch_size=BATCH, shuffle=True, rng=kept["seed"])
    data.set_epoch(kept["epoch"])
    return optimizer, state, params, data


@pytest.mark.skipif(COMM.size < 2, reason="needs two ranks")
@pytest.mark.parametrize(
    "given, path",
    [
        ({"w": 1 + 1e-15}, r"params\['w'\]"), ({"velocity": 1e-9}, r"state\['optimizer'\]\['velocity'\]\['w'\]"),
        ({"rate": 0.2}, r"optimizer\['learning_rate'\]"), ({"momentum": 0.8}, r"optimizer\['momentum'\]"),
        ({"reduction": "sum"}, r"optimizer\['reduction'\]"), ({"clip": 1.0}, "clip_norm"),
        ({"seed": 4}, r"data\['key of rng'\]"), ({"epoch": 2}, r"data\['epoch'\]"),
    ],
)  # fmt: skip
def test_replicas_that_differ_are_found_in_debug_mode(given, path, rank, size):
    last = rank == size - 1
    square = lambda p, x: anp.mean((p["w"] - x) ** 2)  # noqa: E731
    with mpiad.debug.checked():
        optimizer, state, params, data = replica(last, **given)
        batch = data[0]
        with pytest.raises(ReplicationError, match=rf"(?s)DistributedOptimizer.step: .*same rng, rate.*{path}"):
            optimizer.step(state, params, square, batch)
        if "w" in given:
            with pytest.raises(ReplicationError, match=r"(?s)parallel.value_and_grad: .*params\['w'\]"):
                value_and_grad(square)(params, batch)
        kept, _ = optimizer.update(state, params, params)  # accumulated on this rank: nothing is compared
        with pytest.raises(ReplicationError, match=rf"(?s)DistributedOptimizer.update: .*{path}"):
            optimizer.update(kept, params, params)


@pytest.mark.parametrize("given", [{}, {"own": 7}])
def test_equal_replicas_train_in_debug_mode_as_without(given, rank, size):
    """What isn't trained is each rank's own, and so is what is accumulated."""
    square = lambda p, x: anp.mean((p["w"] - x) ** 2)  # noqa: E731

    def trained():
        optimizer, state, params, data = replica(rank == size - 1, **given)
        for batch in data:
            state, params, _ = optimizer.step(state, params, square, batch)
        value_and_grad(square)(params, data[0])
        return params["w"]

    without = trained()
    with mpiad.debug.checked():
        np.testing.assert_array_equal(trained(), without)
        # A container of one rank's own has an order of its own.
        own = DistributedDataContainer(X[rank::size], batch_size=3, shuffle=True, rng=rank, comm=MPI.COMM_SELF)
        value_and_grad(square)({"w": np.ones(3)}, own[0])
