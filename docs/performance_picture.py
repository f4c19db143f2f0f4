"""Draw the ratios in the tables of performance.md into images/pages/performance.png."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
HEADER = "| workload | compared with | forward | gradient | file |"
FORWARD, GRADIENT = ("#1f6fb2", "o", "forward"), ("#d9722b", "D", "with gradient")


class Ratio(NamedTuple):
    """Times of mpiad divided by those of a library, from the least to the largest, if they vary."""

    library: str
    forward: tuple[float, ...]
    gradient: tuple[float, ...]


def ratios(page: str) -> list[Ratio]:
    """Return the ratios in the tables of a page, without those to mpiad itself."""
    found = []
    for table in page.split(HEADER)[1:]:
        rows = re.match(r"(?:\n\|.*)+", table)[0].split("\n")[2:]
        for _, library, forward, gradient, _ in (row.strip("|").split(" | ") for row in rows):
            found.append(Ratio(re.match(r"[\w-]+", library.strip())[0], numbers(forward), numbers(gradient)))
    return [ratio for ratio in found if ratio.library != "mpiad"]


def numbers(cell: str) -> tuple[float, ...]:
    """Return the numbers in a cell that aren't in parentheses."""
    return tuple(float(number) for number in re.findall(r"[\d.]+", re.sub(r"\(.*?\)", "", cell)))


def draw(rows: list[Ratio], path: Path) -> None:
    """Draw a line of ratios for each library, the library with the smallest one first."""
    from matplotlib.figure import Figure

    smallest: dict[str, float] = {}
    for row in rows:
        least = min((*row.forward, *row.gradient))
        smallest[row.library] = min(least, smallest.get(row.library, least))
    names = sorted(smallest, key=smallest.__getitem__, reverse=True)
    figure = Figure(figsize=(7, 0.34 * len(names) + 1.2), layout="constrained")
    axis = figure.subplots()
    for (color, marker, label), shift in ((FORWARD, 0.14), (GRADIENT, -0.14)):
        for row in rows:
            place, values = names.index(row.library) + shift, row.forward if label == "forward" else row.gradient
            axis.plot(values, [place] * len(values), color=color, marker=marker, markersize=6, alpha=0.75, linewidth=3)
        axis.plot([], [], color=color, marker=marker, linestyle="", label=label)
    axis.axvline(1.0, color="0.3")
    axis.set(xscale="log", xlabel="time of mpiad / time of the other library", ylim=(-0.6, len(names) - 0.4))
    axis.set_yticks(range(len(names)), names)
    axis.set_xticks([0.001, 0.01, 0.1, 1.0], ["0.001", "0.01", "0.1", "1"])
    axis.grid(color="0.88")
    axis.set_axisbelow(True)
    axis.text(0.94, len(names) - 0.35, "mpiad is faster  ", ha="right", va="bottom", color="0.3")
    axis.text(1.06, len(names) - 0.35, "  slower", ha="left", va="bottom", color="0.3")
    axis.legend(loc="lower left")
    figure.savefig(path, dpi=150)


def main() -> None:
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    draw(ratios(page), DOCS / "images" / "pages" / "performance.png")


if __name__ == "__main__":
    main()
