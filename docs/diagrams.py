"""Draw the diagrams of the pages: `python docs/diagrams.py` writes the SVG files of docs/images/diagrams.

Pages include the files as parts of their HTML. So the colors are those of the theme, light or dark, in `_static/wide.css`:
the classes of elements name what they show, such as `forward`, `backward` or `rank0`.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "images" / "diagrams"
WIDTH = 480  # as wide as a column of text, so that letters are legible on a phone


class Diagram:
    """Elements of an SVG picture, with coordinates in units of its width.

    Parameters
    ----------
    name : str
        Name of the file, without its ending.
    height : int
    description : str
        Text for readers who don't see the picture.
    """

    def __init__(self, name: str, height: int, description: str) -> None:
        self.name, self.height, self.description, self.elements = name, height, description, []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """Write a line of text whose middle, start or end is at x; y is the middle of its height."""
        self.elements.append(f'<text class="{kind}" x="{x:g}" y="{y + 5:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "") -> None:
        """Draw a rectangle around its center, with text in it."""
        corner = f'x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}"'
        self.elements.append(f'<rect class="box {kind}" {corner} rx="5"/>')
        if text:
            self.text(x, y, text)

    def cell(self, x: float, y: float, size: float, kind: str) -> None:
        """Draw a square cell with its upper left corner at (x, y)."""
        self.elements.append(f'<rect class="cell {kind}" x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """Draw the state between two steps."""
        self.elements.append(f'<circle class="dot {kind}" cx="{x:g}" cy="{y:g}" r="6"/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float], kind: str, bend: float = 0.0) -> None:
        """Draw an arrow; `bend` moves the middle of a curved one down."""
        (x0, y0), (x1, y1) = start, end
        middle = f"Q{(x0 + x1) / 2:g} {(y0 + y1) / 2 + 2 * bend:g} " if bend else "L"
        line = f"M{x0:g} {y0:g} {middle}{x1:g} {y1:g}"
        self.elements.append(f'<path class="arrow {kind}" d="{line}" marker-end="url(#{self.name}-{kind})"/>')

    def write(self, kinds: tuple[str, ...]) -> None:
        """Write the file, with heads for the kinds of arrows."""
        heads = "".join(
            f'<marker id="{self.name}-{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" '
            f'orient="auto"><path class="head {kind}" d="M0 0L8 4L0 8z"/></marker>'
            for kind in kinds
        )
        about = f'role="img" aria-label="{escape(self.description)}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" viewBox="0 0 {WIDTH} {self.height}" {about}>'
        text = "\n".join([start, f"<defs>{heads}</defs>", *self.elements, "</svg>", ""])
        (FOLDER / f"{self.name}.svg").write_text(text, encoding="utf-8")


def message() -> None:
    """Draw a message of the forward pass, and its cotangent in the reverse pass."""
    picture = Diagram(
        "message", 320,
        "Forward pass: rank 0 computes a from x0 and sends a to rank 1, which computes the objective J from a and x1. "
        "Reverse pass: rank 1 sends the derivative of J with respect to a to rank 0, which computes the derivative with "
        "respect to x0.",
    )  # fmt: skip
    for top, title in ((18, "Forward pass"), (188, "Reverse pass")):
        picture.text(0, top, title, "title", "start")
        for rank in (0, 1):
            picture.text(0, top + 42 + 62 * rank, f"rank {rank}", "", "start")
            picture.elements.append(f'<path class="lane" d="M60 {top + 42 + 62 * rank:g}H{WIDTH - 4}"/>')
    picture.box(100, 60, 50, 32, "x₀", "rank0")
    picture.box(220, 60, 90, 32, "a = f(x₀)", "rank0")
    picture.box(100, 122, 50, 32, "x₁", "rank1")
    picture.box(345, 122, 100, 32, "J = g(a, x₁)", "rank1")
    picture.arrow((125, 60), (173, 60), "forward")
    picture.arrow((125, 122), (293, 122), "forward")
    picture.arrow((266, 66), (330, 104), "forward")
    picture.text(320, 80, "message: a", "forward", "start")
    picture.box(110, 230, 70, 32, "∂J/∂x₀", "rank0")
    picture.box(230, 230, 70, 32, "ā", "rank0")
    picture.box(110, 292, 70, 32, "∂J/∂x₁", "rank1")
    picture.box(345, 292, 120, 32, "ā = ∂J/∂a", "rank1")
    picture.arrow((195, 230), (147, 230), "backward")
    picture.arrow((285, 292), (147, 292), "backward")
    picture.arrow((330, 274), (267, 236), "backward")
    picture.text(315, 246, "message: ā", "backward", "start")
    picture.write(("forward", "backward"))


def domain() -> None:
    """Draw the blocks of four ranks with their halos."""
    picture = Diagram(
        "domain", 330,
        "A grid of 8 by 8 cells, divided into 2 by 2 blocks. Each rank owns 4 by 4 cells, and its block is surrounded by a "
        "halo: copies of the neighbors' cells, or boundary values beyond the sides of the grid.",
    )  # fmt: skip
    cells, size, pitch, left, top = 4, 24, 180, 78, 4
    for rank in range(4):
        row, column = divmod(rank, 2)
        x, y = left + pitch * column, top + pitch * row
        picture.text(
            x + 6.5 * size if column else x - size / 2, y + 3 * size, f"rank {rank}", "", "start" if column else "end"
        )
        for i in range(-1, cells + 1):
            for j in range(-1, cells + 1):
                owner = (row * cells + i) // cells, (column * cells + j) // cells
                inside = all(0 <= each < 2 for each in owner)
                owned = 0 <= i < cells and 0 <= j < cells
                kind = f"rank{2 * owner[0] + owner[1]}" if inside else "outside"
                picture.cell(x + size * (j + 1), y + size * (i + 1), size, kind if owned else f"{kind} halo")
    middle = top + 2.5 * size
    first, second = left + 4.5 * size, left + pitch
    picture.arrow((first, middle), (second + 0.5 * size, middle), "forward")
    picture.arrow((second + 1.5 * size, middle + size), (left + 5.5 * size, middle + size), "forward")
    across = left + 2.5 * size
    picture.arrow((across, top + 4.5 * size), (across, top + pitch + 0.5 * size), "forward")
    picture.arrow((across + size, top + pitch + 1.5 * size), (across + size, top + 5.5 * size), "forward")
    picture.write(("forward",))


def optimizers() -> None:
    """Draw who holds and who updates the variable: on the root, on each rank a part, on each rank a copy."""
    picture = Diagram(
        "optimizers", 492,
        "Root-driven: the root has x and the optimizer, broadcasts x, and receives the sum of the gradients. Sharded: each "
        "rank has and updates its own part of x, and the ranks only sum a few numbers. Data-parallel: each rank has a copy "
        "of x and its own batch, and gets the mean of the gradients.",
    )  # fmt: skip
    places = (78, 240, 402)
    rows = (
        (
            "Root-driven: mpiad.minimize, mpiad.drive",
            ("x, optimizer", "model", "model"),
            "x to all ranks, sum of the gradients to the root",
        ),
        ("Sharded: domain.minimize", ("x₀, its update", "x₁, its update", "x₂, its update"), "sums of a few numbers"),
        ("Data-parallel: mpiad.parallel", [f"copy of x, batch {k}" for k in range(3)], "mean of the gradients"),
    )
    for row, (title, labels, communicated) in enumerate(rows):
        top = 12 + 170 * row
        picture.text(0, top, title, "title", "start")
        for rank, (place, label) in enumerate(zip(places, labels)):
            picture.box(place, top + 38, 150, 34, label, f"rank{rank}")
            down, up = ("forward", "backward") if row == 0 and rank == 0 else ("backward", "forward")
            picture.arrow((place - 14, top + 57), (place - 14, top + 101), down)
            picture.arrow((place + 14, top + 101), (place + 14, top + 57), up)
        picture.box(WIDTH / 2, top + 116, WIDTH - 6, 28, communicated, "collective")
    picture.write(("forward", "backward"))


def checkpoints() -> None:
    """Draw a loop of twelve steps of which three states are stored, and its reverse pass."""
    picture = Diagram(
        "checkpoints", 236,
        "Forward pass: twelve steps, of which the states 0, 4 and 8 are stored. Reverse pass: steps 9 to 12 run again from "
        "state 8, then their adjoints backward; then steps 5 to 8 from state 4, and steps 1 to 4 from state 0.",
    )  # fmt: skip
    steps, every, first, pitch = 12, 4, 100, 30.5
    rows = (("forward", 0, steps), ("steps 9–12", 8, 12), ("steps 5–8", 4, 8), ("steps 1–4", 0, 4))
    for row, (label, begin, end) in enumerate(rows):
        y = 46 + 54 * row
        picture.text(0, y, label, "", "start")
        for k in range(begin, end):
            picture.arrow((first + pitch * k + 8, y), (first + pitch * (k + 1) - 8, y), "forward")
            if row > 0:
                picture.arrow((first + pitch * (k + 1) - 4, y + 10), (first + pitch * k + 4, y + 10), "backward", 7)
        for k in range(begin, end + 1):
            stored = k % every == 0 and k < steps and (row == 0 or k == begin)
            picture.dot(first + pitch * k, y, "stored" if stored else "recorded" if row else "dropped")
    for k in range(0, steps + 1, every):
        picture.text(first + pitch * k, 22, f"u{'₀₄₈'[k // every] if k < steps else '₁₂'}")
    picture.write(("forward", "backward"))


def favicon() -> None:
    """Draw two ranks, a message and its cotangent, in colors that are visible on light and dark tabs."""
    ranks = (
        '<rect width="11" height="32" rx="3" fill="#3b82c4"/><rect x="21" width="11" height="32" rx="3" fill="#d9822b"/>'
    )
    message, cotangent = "M8 10H20M16 6L20 10L16 14", "M24 22H12M16 18L12 22L16 26"
    lines = f'<path d="{message}{cotangent}" fill="none" stroke="#888" stroke-width="2.5"/>'
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{ranks}{lines}</svg>\n'
    (FOLDER / "favicon.svg").write_text(picture, encoding="utf-8")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in (message, domain, optimizers, checkpoints, favicon):
        draw()


if __name__ == "__main__":
    main()
