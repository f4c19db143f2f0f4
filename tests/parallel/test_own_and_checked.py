"""Own leaves, frozen groups, skipped batches, comparisons of replicas and errors of trainings on several ranks."""

import math
from dataclasses import dataclass

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad as plain_grad
from mpi4py import MPI

import mpiad
from mpiad.errors import NotFiniteError, ReplicationError
from mpiad.parallel import (
    SGD,
    Adam,
    AdamW,
    DistributedDataContainer,
    DistributedOptimizer,
    ParameterGroups,
    load_checkpoint,
    save_checkpoint,
    value,
    value_and_grad,
)
from mpiad.pytrees import flatten, register

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1
CLIENTS = 4
RNG = np.random.default_rng(0)
X = [RNG.normal(size=(3 + client, 3)) for client in range(CLIENTS)]
Y = [np.sin(x.sum(1) + client) for client, x in enumerate(X)]
MINE = range(RANK, CLIENTS, SIZE)  # no client on some ranks, if there are more ranks than clients
TRUNK = {"w": RNG.normal(size=(3, 2)), "b": 0.1}
HEADS = [RNG.normal(size=2 + 0 * client) for client in range(CLIENTS)]


def squares(trunk, head, x, y):
    return anp.sum((anp.tanh(x @ trunk["w"] + trunk["b"]) @ head - y) ** 2)


def own(path):
    return path.startswith("params['heads']")


def mine(trunk=TRUNK):
    return {"trunk": trunk, "heads": {client: HEADS[client] for client in MINE}}


def loss(p, clients):
    count = sum(len(X[client]) for client in clients)
    return sum(squares(p["trunk"], p["heads"][client], X[client], Y[client]) for client in clients) / count


def samples(p, clients):
    return sum(len(X[client]) for client in clients)


def in_one_process(rule, steps, clip=None):
    """Train trunk and all heads by the mean over all samples, without the library's gradients."""
    p = {"trunk": TRUNK, "heads": dict(enumerate(HEADS))}
    state = rule.setup(p)
    for _ in range(steps):
        g = plain_grad(lambda q: sum(map(squares, [q["trunk"]] * CLIENTS, q["heads"].values(), X, Y)) / sum(map(len, X)))(p)
        norm = math.hypot(*(np.linalg.norm(leaf) for leaf in flatten(g)[0]))
        if clip is not None and norm > clip:
            leaves, build = flatten(g)
            g = build([leaf * (clip / norm) for leaf in leaves])
        state, p = rule.update(state, p, g)
    return p


def assert_close(p, exact):
    np.testing.assert_allclose(p["trunk"]["w"], exact["trunk"]["w"], rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(p["trunk"]["b"], exact["trunk"]["b"], rtol=1e-12)
    for client in MINE:
        np.testing.assert_allclose(p["heads"][client], exact["heads"][client], rtol=1e-12)


@pytest.mark.few(2)
@pytest.mark.each_value
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("bucket_bytes", [20, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05}, {"clip_norm": 0.05, "skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize("rule", [SGD(0.1, 0.9), AdamW(0.02)], ids=str)
def test_own_heads_on_a_shared_trunk_train_as_in_one_process(rule, options, bucket_bytes, is_compiled):
    optimizer, p = DistributedOptimizer(rule, own=own, bucket_bytes=bucket_bytes, **options), mine()
    state, jitted = optimizer.setup(p), mpiad.jit(lambda p, x: loss(p, MINE))
    for _ in range(6):
        if is_compiled:
            state, p, mean = optimizer.step(state, p, jitted, 0.0, samples=lambda p, x: samples(p, MINE))
            assert not any(program.refused for program in jitted._derived.values())
        else:
            state, p, mean = optimizer.step(state, p, loss, list(MINE), samples=samples)
    assert_close(p, in_one_process(rule, 6, options.get("clip_norm")))
    assert len(set(COMM.allgather(p["trunk"]["w"].tobytes()))) == 1
    assert len(set(COMM.allgather(mean))) == 1


def test_own_leaves_in_updates_and_accumulated_steps():
    rule = SGD(0.1)
    optimizer, p = DistributedOptimizer(rule, own=own, accumulate=2), mine()
    state = optimizer.setup(p)
    for k in range(4):
        if k % 2:
            state, p, _ = optimizer.step(state, p, loss, list(MINE), samples=samples)
        else:
            count = samples(p, MINE)
            g = plain_grad(loss)(p, MINE) if count else None
            state, p = optimizer.update(state, p, g, samples=count)
    assert_close(p, in_one_process(rule, 2))
    optimizer, p = (
        DistributedOptimizer(SGD(1.0), own=lambda path: True, reduction="sum"),
        {"a": 1.0, "b": np.ones(1 + RANK)},
    )
    _, p = optimizer.update(optimizer.setup(p), p, {"a": RANK + 0.5, "b": np.full(1 + RANK, 2.0)})
    assert p["a"] == 0.5 - RANK and p["b"].tolist() == [-1.0] * (1 + RANK)


def test_frozen_leaves_are_neither_changed_nor_summed_nor_clipped():
    def group_of(path):
        return "frozen" if path == "params['trunk']['b']" else "trained"

    rule = ParameterGroups({"trained": SGD(0.1), "frozen": None}, group_of)
    optimizer, p = DistributedOptimizer(rule, clip_norm=0.01), {"trunk": TRUNK, "heads": dict(enumerate(HEADS))}
    with pytest.raises(ValueError, match="DistributedOptimizer.step: all parameters are frozen"):
        all_frozen = ParameterGroups({"frozen": None}, lambda path: "frozen")
        DistributedOptimizer(all_frozen).step({"optimizer": {}}, p, loss, list(MINE), samples=samples)
    state = optimizer.setup(p)
    _, new, _ = optimizer.step(state, p, loss, list(MINE), samples=samples)
    assert new["trunk"]["b"] == 0.1
    changes = [new["trunk"]["w"] - TRUNK["w"], *(new["heads"][client] - HEADS[client] for client in range(CLIENTS))]
    assert math.hypot(*map(np.linalg.norm, changes)) == pytest.approx(0.1 * 0.01, rel=1e-12)


def quadratic(p, x):
    return anp.mean((p["w"] - x) ** 2)


def test_values_are_means_over_samples_also_with_empty_ranks():
    x = np.arange(5.0)
    part = x[RANK::SIZE] if SIZE < 3 else x[:2] if RANK == 0 else x[2:] if RANK == LAST else x[:0]
    calls = []

    def counted(p, x):
        calls.append(len(x))
        return quadratic(p, x)

    found = value(counted)({"w": 1.5}, part)
    assert found == pytest.approx(np.mean((1.5 - x) ** 2), rel=1e-15)
    assert 0 not in calls
    assert value(lambda p, x: float(x > 1), samples=lambda p, x: x)(None, RANK + 1) == pytest.approx(
        1 - 1 / sum(range(1, SIZE + 1))
    )
    assert math.isnan(value(lambda p: math.nan if RANK == LAST else 1.0)({}))
    with pytest.raises(TypeError, match=rf"one real number, but returned .*shape \(2,\).*on rank {LAST}"):
        value(lambda p, x: x if RANK == LAST else 0.0)({}, np.ones(2))
    with pytest.raises(ValueError, match="parallel.value: none of the .* has a sample"):
        value(quadratic)({"w": 1.0}, np.ones(0))
    with pytest.raises(TypeError, match="isn't differentiable"):
        mpiad.grad(lambda w: value(quadratic)({"w": w}, part), objective="sum")(1.0)


def skipping_batches(optimizer, p, bad):
    """Train with batches of which those in `bad` hold a NaN on the last rank."""
    state = optimizer.setup(p)
    for k in range(8):
        x = np.arange(3.0) + k + RANK
        if k in bad:
            if optimizer.skip_nonfinite is False:
                continue
            x[1] = math.nan if RANK == LAST else 1.0
        state, p, mean = optimizer.step(state, p, quadratic, x)
        assert math.isnan(mean) == (k in bad)
    return state, p


@pytest.mark.parametrize("accumulate, bad", [(1, {0, 3, 4}), (2, {1, 2}), (3, {2, 7})])
def test_batches_that_are_not_finite_are_skipped_and_counted(accumulate, bad):
    rule, p = Adam(0.1), {"w": np.array([1.0, 2.0, 3.0])}
    found = skipping_batches(DistributedOptimizer(rule, accumulate=accumulate, skip_nonfinite=True), p, bad)
    state, expected = skipping_batches(DistributedOptimizer(rule, accumulate=accumulate), p, bad)
    np.testing.assert_array_equal(found[1]["w"], expected["w"])
    assert found[0].pop("skipped") == len(bad)
    assert repr(found[0]) == repr(state)


def test_updates_with_a_gradient_that_is_not_finite_are_skipped():
    """The loss sqrt(w²) at w = 0 is finite, but its derivative isn't."""
    optimizer = DistributedOptimizer(SGD(0.1), skip_nonfinite=True, own=lambda path: path == "params[1]")
    params = [np.zeros(1), np.ones(1)]
    state = optimizer.setup(params)
    with np.errstate(all="ignore"):
        state, new, mean = optimizer.step(state, params, lambda p: anp.sum(anp.sqrt(p[0] ** 2)) + anp.sum(p[1]))
        assert (state["skipped"], mean) == (1, 1.0)
        assert new is params
        broken = [np.ones(1), np.full(1, math.inf if RANK == LAST else 1.0)]  # the gradient with respect to an own leaf
        state, new = optimizer.update(state, params, broken)
    assert state["skipped"] == 2
    assert new is params
    state, new = optimizer.update(state, params, [np.ones(1), np.ones(1)])
    assert state["skipped"] == 2
    np.testing.assert_allclose(new[1], 1 - 0.1 / SIZE)


@pytest.mark.unguarded
def test_a_loss_that_is_not_finite_names_rank_and_batch():
    data = DistributedDataContainer(np.arange(20.0), batch_size=5, shuffle=True, rng=1)
    data.set_epoch(3)
    optimizer, p = DistributedOptimizer(SGD(0.1)), {"w": 1.0}
    state = optimizer.setup(p)
    bad = lambda p, x: quadratic(p, x) * (math.inf if RANK == LAST else 1.0)  # noqa: E731
    with pytest.raises(NotFiniteError, match=rf"the loss is inf for batch 2 of epoch 3\..*on rank {LAST}"):
        optimizer.step(state, p, bad, data[2])
    with pytest.raises(NotFiniteError, match=r"the loss is nan for a batch of 2 sample\(s\)\..*on rank 0"):
        optimizer.step(state, p, quadratic, np.array([1.0, math.nan]))
    items = DistributedDataContainer([1.0] * (2 * SIZE), batch_size=SIZE)
    with pytest.raises(NotFiniteError, match="for batch 1 of epoch 0"):
        optimizer.step(state, p, lambda p, x: quadratic(p, anp.array(x)) * (math.nan if RANK == LAST else 1.0), items[1])
    assert optimizer.step(state, p, quadratic, np.ones(2))[1]["w"] == 1.0


@pytest.mark.mpi(min_size=2)
@pytest.mark.unguarded
def test_replicas_that_differ_are_found_in_the_first_and_every_kth_call():
    def params(change):
        return {"w": np.ones(3) + change * (RANK == LAST) * 1e-15, "heads": RANK, "own": float(RANK)}

    def step(optimizer, change):
        return optimizer.step(optimizer.setup(params(0)), params(change), quadratic, np.ones(3))

    text = r"(?s)all ranks must train the same parameters.*parallel.synchronize.*params\['w'\]"
    for own_leaf, call in ((lambda path: "own" in path, "step"), (lambda path: "own" in path, "update")):
        optimizer = DistributedOptimizer(SGD(0.1), own=own_leaf)
        with pytest.raises(ReplicationError, match=text):
            if call == "step":
                step(optimizer, 1)
            else:
                optimizer.update(optimizer.setup(params(0)), params(1), params(0))
        step(optimizer, 1)  # only the first call compares
        optimizer = DistributedOptimizer(SGD(0.1), own=own_leaf, check_every=3)
        for change in (0, 1, 1, 0, 1):
            step(optimizer, change)
        step(optimizer, 1)
        with pytest.raises(ReplicationError, match=text):
            step(optimizer, 1)
    with pytest.raises(ReplicationError, match=r"params\['own'\]"):
        step(DistributedOptimizer(SGD(0.1)), 0)


@pytest.mark.unguarded
def test_the_first_step_can_begin_with_the_parameters_of_rank_0():
    optimizer = DistributedOptimizer(SGD(0.5), synchronize=True, own=lambda path: "own" in path)
    params = {"w": np.array([1.0, 2.0]) + RANK, "own": np.full(1 + RANK, float(RANK)), "name": RANK}
    state = optimizer.setup(params)
    whole = lambda p, x: anp.sum((p["w"] - x) ** 2) + anp.sum(p["own"] ** 2)  # noqa: E731
    state, params, _ = optimizer.step(state, params, whole, np.zeros((1, 2)))
    np.testing.assert_array_equal(params["w"], [0.0, 0.0])
    np.testing.assert_allclose(params["own"], RANK * (1 - 1 / SIZE))
    assert params["name"] == RANK
    params["w"] = params["w"] + RANK  # only the first call broadcasts
    assert optimizer.step(state, params, whole, np.zeros((1, 2)))[1]["w"][0] == pytest.approx(RANK - (SIZE - 1) / 2)


@pytest.mark.unguarded
def test_after_an_error_of_one_rank_the_next_step_counts_as_the_first_on_all():
    optimizer = DistributedOptimizer(SGD(0.5), synchronize=True)
    params = {"w": np.array([1.0, 2.0]) + RANK}
    state = optimizer.setup(params)
    for wrong, batch, kind in ({} if LAST == RANK else state, 0.0, TypeError), (state, math.nan, NotFiniteError):
        with pytest.raises(kind):
            optimizer.step(wrong, params, quadratic, np.full((1, 2), batch))
    np.testing.assert_array_equal(optimizer.step(state, params, quadratic, np.zeros((1, 2)))[1]["w"], [0.5, 1.0])


@pytest.mark.mpi(min_size=2)
def test_errors_name_the_leaf_that_differs_not_own_or_frozen_ones():
    params = {"frozen": np.ones(2), "own": np.ones(1 + RANK), "w": np.ones(3 + (RANK == LAST))}
    rule = ParameterGroups({"frozen": None, "all": SGD(0.1)}, lambda path: "frozen" if "frozen" in path else "all")
    for options in {"own": lambda path: "own" in path}, {}:
        if not options:
            del params["own"]
        optimizer = DistributedOptimizer(rule, **options)
        for loss in quadratic, mpiad.jit(quadratic):
            with pytest.raises(ValueError, match=rf"rank {LAST} params\['w'\] has shape \(4,.*params\['w'\] has shape \(3"):
                optimizer.step(optimizer.setup(params), params, loss, np.zeros(params["w"].shape))


ONES = (np.ones(3),)


def step_with(p=None, loss=quadratic, batch=ONES, state=None, samples=None, changed=(), **options):
    p = {"w": np.ones(3)} if p is None else p
    optimizer = DistributedOptimizer(options.pop("rule", SGD(0.1)), **options)
    state = optimizer.setup({"w": np.ones(3)}) if state is None else state
    vars(optimizer).update(changed)
    return optimizer.step(state, p, loss, *batch, samples=samples)


class Unregistered(LookupError):
    pass


def raising(kind, found):
    """Return a function that raises an exception on the last rank only."""

    def function(*args):
        if RANK == LAST:
            raise kind("on purpose")
        return found

    return function


class Raising(SGD):
    """An optimizer of the user's, whose update raises on the last rank only."""

    def update(self, state, params, gradient):
        return raising(Unregistered, super().update(state, params, gradient))()


ONLY_LAST = RANK == LAST
WRONG = {
    "constant loss": (lambda: step_with(loss=lambda p, x: np.mean(x)), ValueError, "doesn't depend on the parameters"),
    "constant gradient": (
        lambda: value_and_grad(lambda p, x: np.mean(x))(1.0, np.ones(2)), ValueError, "doesn't depend on the parameters"
    ),
    "schedule": (lambda: step_with(rule=SGD(lambda k: None)), ValueError, r"learning_rate\(0\) must return .* None"),
    "class": (lambda: DistributedOptimizer(Adam), TypeError, r"but got the class Adam. Pass an instance, Adam\("),
    "own": (lambda: step_with(own=lambda path: False), ValueError, r"own\(path\) is true for no leaf .*params\['w'\]"),
    "own on one rank": (lambda: step_with(own=raising(KeyError, False)), KeyError, f"on purpose.*on rank {LAST}"),
    "own before synchronize": (
        lambda: step_with(own=raising(KeyError, False), synchronize=True), KeyError, f"on purpose|raised on rank {LAST}"
    ),
    "own of a frozen leaf": (
        lambda: step_with(
            {"w": np.ones(3), "v": 1.0}, state={"optimizer": {"w": {"updates": 0}}},
            rule=ParameterGroups({"w": SGD(0.1), "v": None}, lambda path: path[-3]),
            own=lambda path: raising(ArithmeticError, False)(path) if "v" in path else False,
        ), ArithmeticError, f"on purpose.*on rank {LAST}",
    ),
    "group of a leaf": (
        lambda: step_with(
            state={"optimizer": {"w": {"updates": 0}}}, rule=ParameterGroups({"w": SGD(0.1)}, raising(KeyError, "w"))
        ), KeyError, f"on purpose.*on rank {LAST}",
    ),
    "schedule on one rank": (
        lambda: step_with(rule=SGD(raising(ZeroDivisionError, 0.1))), ZeroDivisionError, f"on purpose.*on rank {LAST}"
    ),
    "class of the user's": (
        lambda: step_with(samples=lambda p, x: raising(Unregistered, 1)(x)), LookupError, f"on purpose.*on rank {LAST}"
    ),
    "schedule of a compiled step": (
        lambda: step_with(rule=Adam(lambda k: math.nan if ONLY_LAST else 0.1), loss=mpiad.jit(quadratic),
            state={"optimizer": Adam().setup({"w": np.ones(3)})}), ValueError,
        rf"Adam: the schedule learning_rate\(0\) must return a finite number.*nan.*on rank {LAST}",
    ),
    "schedule of a group": (
        lambda: step_with(
            state={"optimizer": {"w": {"updates": 0}}},
            rule=ParameterGroups({"w": SGD(lambda k: math.nan if ONLY_LAST else 0.1)}, lambda path: "w"),
        ), ValueError, rf"SGD: the schedule learning_rate\(0\) must.*nan.*on rank {LAST}",
    ),
    "schedule in update": (
        lambda: DistributedOptimizer(SGD(raising(KeyError, 0.1))).update({"optimizer": {"updates": 0}}, *[np.ones(2)] * 2),
        KeyError, f"on purpose.*on rank {LAST}",
    ),
    "own is no function": (lambda: step_with(own="head"), TypeError, "own must be a function of a leaf's path"),
    "check_every": (lambda: step_with(check_every=0), ValueError, "check_every"),
    "object on one rank": (
        lambda: step_with({"w": np.ones(3), "m": Unregistered() if ONLY_LAST else None}), TypeError,
        rf"params\['m'\] is Unregistered .*mpiad.pytrees.register.*on rank {LAST}",
    ),
    "state on one rank": (
        lambda: step_with(state={"optimizer": {"updates": 0}, **({"skipped": 0} if ONLY_LAST else {})}), TypeError,
        rf"the state must be a dict of.*on rank {LAST}",
    ),
    "inner state on one rank": (
        lambda: step_with(state={"optimizer": SGD(0.1, 0.9 * ONLY_LAST).setup({"w": np.ones(3)})}), TypeError,
        rf"SGD: the state must be a dict of \['updates'\].*on rank {LAST}",
    ),
    "inner state in update": (
        lambda: DistributedOptimizer(ParameterGroups({"a": Adam(0.1)}, lambda path: "a")).update(
            {"optimizer": {"a": Adam(0.1).setup({"params": np.ones(2 + ONLY_LAST)})}}, np.ones(2), np.ones(2)
        ), ValueError, rf"Adam: state\['first'\].* must have the shape \(2,\).*on rank {LAST}",
    ),
    "gradient in update": (
        lambda: DistributedOptimizer(SGD(0.1)).update({"optimizer": {"updates": 0}}, np.ones(2), np.ones(2 + ONLY_LAST)),
        ValueError, rf"gradient must have the shape \(2,\).*on rank {LAST}",
    ),
    "groups in setup": (
        lambda: DistributedOptimizer(
            ParameterGroups({"a": SGD(0.1), "b": SGD(0.1)}, lambda path: "a" if ONLY_LAST else path[-3])
        ).setup({"a": 1.0, "b": 2.0}), ValueError, "the group 'b' contains no leaf",
    ),
    "names of groups in setup": (
        lambda: DistributedOptimizer(
            ParameterGroups({"a": SGD(0.1)}, lambda path: {}["x"] if ONLY_LAST else "a")
        ).setup({"a": 1.0}), KeyError, "x",
    ),
    "unknown group": (
        lambda: step_with(rule=ParameterGroups({"a": SGD(0.1)}, lambda path: "c"), state={"optimizer": {"a": {}}}),
        ValueError, r"ParameterGroups: group_of\(.*\['w'\].*must return one of \['a'\], but returned 'c'.*on rank 0",
    ),
    "unknown group on one rank": (
        lambda: step_with(
            rule=ParameterGroups({"w": SGD(0.1)}, lambda path: None if ONLY_LAST else "w"),
            state={"optimizer": {"w": {"updates": 0}}},
        ), ValueError, rf"group_of\(.*must return one of \['w'\], but returned None.*on rank {LAST}",
    ),
    "unknown group of a compiled step": (
        lambda: step_with(
            rule=ParameterGroups({"w": SGD(0.1)}, lambda path: "v" if ONLY_LAST else "w"), loss=mpiad.jit(quadratic),
            state={"optimizer": {"w": {"updates": 0}}},
        ), ValueError, rf"group_of\(.*must return one of \['w'\], but returned 'v'.*on rank {LAST}",
    ),
    "unknown group in setup": (
        lambda: DistributedOptimizer(
            ParameterGroups({"a": SGD(0.1)}, lambda path: "b" if ONLY_LAST else "a")
        ).setup({"a": 1.0}), ValueError, r"group_of\(.*must return one of \['a'\], but returned 'b'",
    ),
    "unknown group in update": (
        lambda: DistributedOptimizer(ParameterGroups({"a": SGD(0.1)}, lambda path: "b" if ONLY_LAST else "a")).update(
            {"optimizer": {"a": {"updates": 0}}}, np.ones(2), np.ones(2)
        ), ValueError, rf"group_of\(.*must return one of \['a'\], but returned 'b'.*on rank {LAST}",
    ),
    "accumulation that begins later": (
        lambda: step_with(changed={"accumulate": 2}), TypeError,
        "the state must be a dict of .*'gradient', 'optimizer', 'samples', 'steps'.* got .*'optimizer'",
    ),
    "traced batch": (
        lambda: mpiad.grad(lambda x: value(quadratic)({"w": np.ones(3)}, x[: 3 * ONLY_LAST]), objective="sum")(np.ones(3)),
        TypeError, "parallel.value: got traced values",
    ),
    "samples on one rank": (
        lambda: step_with(samples=lambda p, x: "x" if ONLY_LAST else 1), ValueError, rf"invalid literal.*on rank {LAST}"
    ),
    "negative samples on one rank": (
        lambda: step_with(samples=lambda p, x: -2 if ONLY_LAST else 3), ValueError,
        rf"step: the number of samples must be an integer from 0, but got -2.*on rank {LAST}",
    ),
    "negative samples of a compiled step": (
        lambda: step_with(samples=lambda p, x: -2 if ONLY_LAST else 3, loss=mpiad.jit(quadratic)), ValueError,
        rf"step: the number of samples must be an integer from 0, but got -2.*on rank {LAST}",
    ),
    "a fraction of a sample": (
        lambda: value_and_grad(quadratic, samples=lambda p, x: np.float64(2.5 if ONLY_LAST else 2.0))(
            {"w": np.ones(3)}, np.ones(3)
        ), ValueError, rf"parallel.value_and_grad: the number of samples .* got .*2\.5.*on rank {LAST}",
    ),
    "negative samples in value": (
        lambda: value(quadratic, samples=lambda p, x: -1 if ONLY_LAST else 2)({"w": 1.0}, np.ones(1)), ValueError,
        rf"parallel.value: the number of samples .* got -1.*on rank {LAST}",
    ),
    "negative samples in update": (
        lambda: DistributedOptimizer(SGD(0.1)).update(
            {"optimizer": {"updates": 0}}, *[np.ones(2)] * 2, samples=-1 if ONLY_LAST else 2
        ), ValueError, rf"update: the number of samples must be an integer from 0, but got -1.*on rank {LAST}",
    ),
    "update of the user's": (
        lambda: step_with(rule=Raising(0.1)), LookupError, f"on purpose|raised on rank {LAST}"
    ),
    "update of the user's in a compiled step": (
        lambda: step_with(rule=Raising(0.1), loss=mpiad.jit(quadratic)), LookupError, f"on purpose|raised on rank {LAST}"
    ),
    "update of the user's in a group": (
        lambda: step_with(
            {"w": np.ones(3), "v": 1.0}, state={"optimizer": {"w": {"updates": 0}}}, clip_norm=1.0,
            rule=ParameterGroups({"w": Raising(0.1), "v": None}, lambda path: path[-3]), own=lambda path: "w" in path,
        ), LookupError, f"on purpose|raised on rank {LAST}",
    ),
    "update of the user's in update": (
        lambda: DistributedOptimizer(Raising(0.1)).update({"optimizer": {"updates": 0}}, *[np.ones(2)] * 2),
        LookupError, f"on purpose|raised on rank {LAST}",
    ),
    "state of another model": (
        lambda: step_with(rule=SGD(0.1, 0.9), state={"optimizer": SGD(0.1, 0.9).setup({"w": np.ones(2)})}), ValueError,
        r"state\['velocity'\]\['w'\] must have the shape \(3,\)",
    ),
    "loss in value": (
        lambda: value(lambda p, x: x)(1.0, np.ones(2)), TypeError, "parallel.value: loss must return one real number"
    ),
    "object in value": (
        lambda: value(quadratic)({"w": Unregistered() if ONLY_LAST else 1.0}, np.ones(1)), TypeError,
        rf"parallel.value: tree\['w'\] is Unregistered.*on rank {LAST}",
    ),
}  # fmt: skip


@pytest.mark.unguarded
@pytest.mark.parametrize("case", WRONG)
def test_bad_input_raises_one_error_on_all_ranks(case):
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()
    assert mpiad.mpi_allreduce(1.0) == SIZE
    np.testing.assert_allclose(step_with(batch=(np.zeros(3),))[1]["w"], 1 - 0.2 / 3)


@register
@dataclass
class Model:
    trunk: dict
    head: np.ndarray
    name: str = "model"


def trained(path=None, stop=None):
    """Train for two epochs, or until a batch; from the checkpoint, if there is one, in the middle of an epoch."""

    def fit(model, x):
        return anp.mean((x @ model.trunk["w"] @ model.head) ** 2) + anp.sum(model.head**2)

    groups = {"trunk": AdamW(0.02), "head": SGD(0.05, 0.9, weight_decay=0.1), "fixed": None}
    rule = ParameterGroups(groups, lambda path: "fixed" if path.endswith("['b']") else path.split(".")[1][:5].rstrip("["))
    optimizer = DistributedOptimizer(rule, own=lambda path: path == "params.head", skip_nonfinite=True, accumulate=2)
    model = Model(TRUNK, HEADS[0] + RANK)
    state, first, data = optimizer.setup(model), 0, DistributedDataContainer(X[3], batch_size=2, shuffle=True, rng=5)
    found = None if path is None else load_checkpoint(path, like=model)
    if found is not None:
        model, state, first = *found.own, found.tree
    for k in range(first, 6 if stop is None else stop):
        data.set_epoch(k // len(data))
        state, model, _ = optimizer.step(state, model, fit, data[k % len(data)] * (math.nan if k == 1 else 1.0))
    if stop is not None:
        save_checkpoint(path, stop, own=(model, state))
    return model, state


def test_a_training_goes_on_in_the_middle_of_an_epoch_bit_for_bit(tmp_path):
    path = COMM.bcast(tmp_path) / "run.npz"
    whole = trained()
    for stop in (2, 4):
        trained(path, stop)
        again = trained(path)
        assert type(again[0]) is Model and again[1]["skipped"] == 1
        for one, other in zip(*(flatten(tree)[0] for tree in (whole, again)), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    with pytest.raises(ValueError, match=r"own\[0\].head must have the shape \(3,\)"):
        load_checkpoint(path, like=Model(TRUNK, np.ones(3)))
