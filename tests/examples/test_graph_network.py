"""A graph network: one loss and gradient for every division of the graph, and other fields are predicted."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.misc import flatten
from mpi4py import MPI

import mpiad

Run = Callable[..., CompletedProcess]
PROGRAM = "examples/graph_network.py"
SMALL = ("--nodes", 60, "--fields", 3, "--features", 5, "--most", 9)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(request.config.rootpath / "examples")
    return importlib.import_module("graph_network")


def drawn_nodes(rng: np.random.Generator, nodes: int, ranks: int) -> list[np.ndarray]:
    """Return every rank's nodes, in any order; the last of several ranks has none."""
    owner = rng.choice(ranks, nodes, p=rng.dirichlet(np.ones(ranks)))
    if ranks > 1:
        owner[owner == ranks - 1] = 0
    order = rng.permutation(nodes)
    return [order[owner[order] == rank] for rank in range(ranks)]


def by_loops(params: dict, graph, fields: np.ndarray) -> np.ndarray:
    """Return the prediction of one field, node by node and edge by edge."""
    features = [np.tanh(u * params["encoder"][0] + params["encoder"][1]) for u in fields]
    for weights in params["layers"]:
        totals = [0 * u for u in features]
        for j, i, distance in zip(graph.source, graph.target, graph.distance):
            both = features[j] @ weights["source"] + features[i] @ weights["target"]
            totals[i] = totals[i] + np.tanh(both + distance * weights["distance"] + weights["shift"])
        hidden = [
            np.tanh(u @ weights["own"] + total @ weights["sum"] + weights["bias"]) for u, total in zip(features, totals)
        ]
        features = [u + h @ weights["out"] for u, h in zip(features, hidden)]
    return fields + np.array([u @ params["decoder"] for u in features])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_divisions_have_one_answer(example: ModuleType, rank: int, size: int, seed: int) -> None:
    graph, params = example.Graph(40, 6), example.initial(4)
    starts = graph.fields(2, seed)
    ends = graph.evolved(starts)

    def loss_and_gradient(nodes: np.ndarray, comm: MPI.Comm | None) -> tuple[float, np.ndarray]:
        part = example.Part(graph, nodes, comm)

        @mpiad.jit
        def loss(params: dict) -> float:
            return anp.sum((part.predicted(params, starts[nodes]) - ends[nodes]) ** 2)

        value, gradient = mpiad.value_and_grad(loss, objective="sum", shared=True, comm=comm)(params)
        return value, flatten(gradient)[0]

    value, gradient = loss_and_gradient(drawn_nodes(np.random.default_rng([seed, size]), 40, size)[rank], None)
    expected, whole = loss_and_gradient(np.arange(40), MPI.COMM_SELF)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(gradient, whole, rtol=1e-12, atol=1e-12 * np.abs(whole).max())


@pytest.mark.one_rank
def test_against_loops(example: ModuleType) -> None:
    graph, params = example.Graph(30, 5), example.initial(3)
    fields = graph.fields(1, 0)
    part = example.Part(graph, np.arange(30), MPI.COMM_SELF)
    np.testing.assert_allclose(part.predicted(params, fields)[:, 0], by_loops(params, graph, fields[:, 0]), rtol=1e-12)


@pytest.mark.one_rank
def test_graph(example: ModuleType) -> None:
    """Edges join all near nodes in both directions, and the evolution tends to 1 and -1."""
    graph = example.Graph(50, 6)
    apart = np.hypot(*(graph.points[:, None] - graph.points).transpose(2, 0, 1))
    edges = {(int(j), int(i)) for j, i in zip(graph.source, graph.target)}
    assert edges == {(j, i) for j, i in np.argwhere(apart <= graph.radius).tolist() if i != j}
    assert np.abs(graph.evolved(np.array([[0.5, -0.5]] * 50)) - [1, -1]).max() < 0.2


@pytest.mark.launches
@pytest.mark.thorough
def test_ranks_have_one_training(mpirun: Run, rank_counts: tuple) -> None:
    numbers = []
    for n in rank_counts:
        done = mpirun(n, PROGRAM, *SMALL, "--iterations", 5, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "isn't compiled" not in done.stderr
        numbers.append([float(x) for x in re.findall(r"\d\.\d{12}e[+-]\d\d", done.stdout)])
        assert len(numbers[-1]) == 2
        np.testing.assert_allclose(numbers[-1], numbers[0], rtol=1e-12)


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.limit(200)
def test_other_fields_are_predicted(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(2, PROGRAM, "--picture", tmp_path / "graph.png", timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    done = mpirun(1, PROGRAM, *SMALL[:-2], "--iterations", 1, timeout=60)
    assert done.returncode != 0 and "not learned" in done.stderr
