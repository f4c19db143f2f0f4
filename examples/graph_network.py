"""Train a graph neural network on a graph that is divided among the ranks.

    mpiexec -n 4 python examples/graph_network.py
    mpiexec -n 4 python examples/graph_network.py --picture graph_network.png

Points are drawn in a square, and near ones are joined by an edge. A quantity at the nodes obeys

    du_i/dt = Σ_j (u_j - u_i) + 4 (u_i - u_i³),   the sum over the neighbors j of node i,

so that it tends to 1 in some regions and to -1 in others. A network learns its value after some time from the one at the
start: in each of three layers, a node gets from each neighbor a message, a perceptron of both nodes' features and their
distance, and from the sum of its messages another perceptron updates its features. Training fields are given at all
nodes; the error is that for other fields.

A rank owns nodes, in any order, and the edges that end there. It fetches the features at the other ends (`GhostExchange`),
and adds messages to its nodes (`segment_sum`). All ranks have the parameters, and L-BFGS updates them. Every number of
ranks, and every other division, gives the same answer but for rounding.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
from autograd.misc import flatten
from scipy.spatial import cKDTree

import mpiad

parser = argparse.ArgumentParser(description="Train a graph neural network on a divided graph.")
parser.add_argument("--nodes", type=int, default=400)
parser.add_argument("--fields", type=int, default=8, help="fields for training")
parser.add_argument("--features", type=int, default=12, help="features of a node, and of a message")
parser.add_argument("--iterations", type=int, default=200, help="the most iterations of L-BFGS")
parser.add_argument("--most", type=float, default=0.1, help="fail if the relative error for other fields is larger")
parser.add_argument("--progress", action="store_true", help="show the progress of the training")
parser.add_argument("--picture", type=Path, help="draw the losses and a prediction into this file")

LAYERS, NEIGHBORS, SEED = 3, 8, 3
TIME, STEP, TESTED = 0.5, 0.01, 4  # of the evolution to learn; fields for the test


class Graph:
    """Points in the unit square with edges in both directions, from `source` to `target`, over less than a radius."""

    def __init__(self, count, neighbors):
        rng = numpy.random.default_rng(SEED)
        self.points = rng.uniform(size=(count, 2))
        self.radius = (neighbors / (numpy.pi * count)) ** 0.5
        pairs = cKDTree(self.points).query_pairs(self.radius, output_type="ndarray")
        self.source, self.target = numpy.concatenate([pairs, pairs[:, ::-1]]).T
        self.distance = numpy.hypot(*(self.points[self.source] - self.points[self.target]).T) / self.radius

    def fields(self, count, seed):
        """Return smooth random fields (nodes, count)."""
        rng = numpy.random.default_rng(seed)
        waves = rng.normal(scale=6, size=(2, 10, count))
        phases, sizes = rng.uniform(0, 2 * numpy.pi, (10, count)), rng.normal(scale=0.4, size=(10, count))
        return numpy.sum(sizes * numpy.cos(numpy.tensordot(self.points, waves, 1) + phases), axis=1)

    def evolved(self, fields):
        """Return the fields after the time."""
        for _ in range(round(TIME / STEP)):
            differences = fields[self.source] - fields[self.target]
            fields = fields + STEP * (mpiad.segment_sum(differences, self.target, len(fields)) + 4 * (fields - fields**3))
        return fields


class Part:
    """This rank's nodes, in the order in which their numbers are given, and the edges that end there."""

    def __init__(self, graph, nodes, comm=None):
        self.nodes = nodes
        place = numpy.full(len(graph.points), -1)
        place[nodes] = numpy.arange(len(nodes))
        edges = numpy.flatnonzero(place[graph.target] >= 0)
        self.target, self.distance = place[graph.target[edges]], graph.distance[edges]
        self.ghosts = mpiad.GhostExchange(graph.source[edges], nodes, comm)

    def layer(self, features, weights):
        """Return the features (nodes, fields, features) after a layer."""
        at_source = self.ghosts.fetch(features @ weights["source"])
        at_target = (features @ weights["target"])[self.target]
        messages = np.tanh(at_source + at_target + self.distance[:, None, None] * weights["distance"] + weights["shift"])
        total = mpiad.segment_sum(messages, self.target, len(self.nodes))
        hidden = np.tanh(features @ weights["own"] + total @ weights["sum"] + weights["bias"])
        return features + hidden @ weights["out"]

    def predicted(self, params, fields):
        """Return the fields (nodes, fields) at the end, for those at the start."""
        features = np.tanh(fields[:, :, None] * params["encoder"][0] + params["encoder"][1])
        for weights in params["layers"]:
            features = self.layer(features, weights)
        return fields + features @ params["decoder"]


def initial(features):
    """Return random parameters, the same on all ranks."""
    rng = numpy.random.default_rng(SEED)

    def matrix():
        return rng.normal(scale=features**-0.5, size=(features, features))

    layers = [
        {
            **{name: matrix() for name in ("source", "target", "own", "out")},
            "sum": matrix() / NEIGHBORS,
            **{name: 0.1 * rng.normal(size=features) for name in ("distance", "shift", "bias")},
        }
        for _ in range(LAYERS)
    ]
    return {"encoder": rng.normal(size=(2, features)), "layers": layers, "decoder": rng.normal(size=features) / features}


def draw_picture(path, graph, losses, title, fields):
    """Draw the loss of each iteration, and fields on the graph."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.collections import LineCollection

    figure, grid = pyplot.subplots(2, 2, figsize=(9, 7.5), layout="constrained")  # of the loss and three fields
    axes = grid.ravel()
    axes[0].semilogy(losses)
    axes[0].set(xlabel="iteration", ylabel="mean squared error / variance", title=title)
    for axis, (name, field) in zip(axes[1:], fields.items()):
        axis.add_collection(
            LineCollection(graph.points[numpy.stack([graph.source, graph.target], 1)], colors="0.8", lw=0.3)
        )
        image = axis.scatter(*graph.points.T, c=field, cmap="coolwarm", vmin=-1.2, vmax=1.2, s=22, zorder=2)
        axis.set(title=name, aspect="equal", xticks=[], yticks=[])
    figure.colorbar(image, ax=axes[1:], shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main():
    options = parser.parse_args()
    rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    graph = Graph(options.nodes, NEIGHBORS)
    starts = graph.fields(options.fields + TESTED, SEED + 1)
    ends = graph.evolved(starts)
    variance = numpy.mean((ends - ends.mean()) ** 2)
    # Strips with as many nodes each, which are in the order of their x there.
    part = Part(graph, numpy.array_split(numpy.argsort(graph.points[:, 0]), size)[rank])
    start, end = starts[part.nodes], ends[part.nodes]

    def loss(params):
        """Return this rank's part of the mean squared error of the training fields."""
        errors = part.predicted(params, start[:, TESTED:]) - end[:, TESTED:]
        return np.sum(errors**2) / (options.nodes * options.fields * variance)

    params = initial(options.features)
    value, gradient = mpiad.value_and_grad(loss, objective="sum", shared=True)(params)
    result = mpiad.minimize(
        loss, params, method="L-BFGS-B", objective="sum", progress=options.progress,
        options={"maxiter": options.iterations, "ftol": 0, "maxcor": 20},
    )  # fmt: skip
    found = part.predicted(result.x, start[:, :TESTED])
    squares = [mpiad.mpi_allreduce(numpy.sum((x - end[:, :TESTED]) ** 2)) for x in (found, start[:, :TESTED])]
    error, before = numpy.sqrt(numpy.array(squares) / numpy.sum((ends[:, :TESTED] - ends.mean()) ** 2))
    nodes, predictions = (mpiad.mpi_gather(x, axis=0) for x in (part.nodes, found))
    if rank == 0:
        print(f"{options.nodes} nodes, {len(graph.source)} directed edges, {options.fields} fields")
        print(f"loss at first {value:.12e}, norm of its gradient {numpy.linalg.norm(flatten(gradient)[0]):.12e}")
        print(f"{result.nit} iterations: loss {result.fun:.2e}")
        print(f"relative error for {TESTED} other fields: {error:.4f}; {before:.4f} if nothing changed")
        if options.picture:
            whole = numpy.empty(options.nodes)
            whole[nodes] = predictions[:, 0]
            shown = {"another field at the start": starts[:, 0], "at the end": ends[:, 0], "prediction": whole}
            draw_picture(options.picture, graph, result.history.loss, "training", shown)
            print(f"written: {options.picture}")
    if not error <= options.most:
        raise SystemExit(f"not learned: the relative error, {error:.3f}, is above {options.most:g}")


if __name__ == "__main__":
    main()
