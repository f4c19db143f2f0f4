"""Write the mesh of a valley with a broken dam and a town, valley_mesh.npz, with J. R. Shewchuk's program Triangle.

    pip install triangle && python examples/data/valley_mesh.py

`points` are coordinates in meters, `triangles` the indices of three points each, counterclockwise. The dam and the town's
blocks are holes.
"""

from pathlib import Path

import numpy
import triangle

SIZE = 2000.0, 1000.0
# Of the dam's two parts and of the blocks: west, east, south, north.
HOLES = [(390, 420, 0, 440), (390, 420, 560, 1000)]
HOLES += [(x, x + 90, y, y + 60) for x in (1180, 1320) for y in (610, 720, 830)]
COARSEST, FINE = 1500.0, 450.0  # areas of triangles in square meters, in general and near the breach and the town


def outline():
    """Return the corners and the segments of the border."""
    south, north = HOLES[:2]
    ring = [(0, 0), *((south[k], y) for k, y in ((0, 0), (0, south[3]), (1, south[3]), (1, 0)))]
    ring += [(SIZE[0], 0), SIZE, *((north[k], y) for k, y in ((1, 1000), (1, north[2]), (0, north[2]), (0, 1000)))]
    rings = [[*ring, (0, SIZE[1])]]
    rings += [[(west, south), (east, south), (east, north), (west, north)] for west, east, south, north in HOLES[2:]]
    starts = numpy.cumsum([0] + [len(ring) for ring in rings])
    segments = [(start + k, start + (k + 1) % len(ring)) for start, ring in zip(starts, rings) for k in range(len(ring))]
    return numpy.concatenate(rings).astype(float), numpy.array(segments)


def main():
    corners, segments = outline()
    middles = [((west + east) / 2, (south + north) / 2) for west, east, south, north in HOLES[2:]]
    border = {"vertices": corners, "segments": segments, "holes": middles}
    coarse = triangle.triangulate(border, f"pq30a{COARSEST}")
    centers = coarse["vertices"][coarse["triangles"]].mean(axis=1)
    near = [
        (abs(centers[:, 0] - x) < a) & (abs(centers[:, 1] - y) < b)
        for x, y, a, b in ((405, 500, 150, 150), (1295, 750, 190, 210))
    ]
    coarse["triangle_max_area"] = numpy.where(near[0] | near[1], FINE, COARSEST)[:, None]
    mesh = triangle.triangulate({**coarse, "holes": middles}, "rpq32a")
    path = Path(__file__).with_suffix(".npz")
    numpy.savez_compressed(path, points=mesh["vertices"].astype("f4"), triangles=mesh["triangles"].astype("u2"))
    print(f"{path}: {len(mesh['triangles'])} triangles")


if __name__ == "__main__":
    main()
