"""Pages as Jupyter notebooks: programs become cells of code, and the text around them cells of text.

Outputs are left out, and so are links to other pages. `notebook_directive` writes the notebooks when the pages are built.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1 *\n", re.MULTILINE | re.DOTALL)
PICTURE, LINK = re.compile(r"!\[[^\]]*\]\([^)]*\)\n?"), re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")
LABEL = re.compile(r"^\([\w-]+\)=\n", re.MULTILINE)
COMMAND = re.compile(r"# mpiexec .*\n")
INTRODUCTION = """The programs of this page, for one MPI rank: `mpiexec` runs them on several. They need
`pip install "mpiad[mpich]" matplotlib`."""
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


class Cell(NamedTuple):
    """A cell of a notebook."""

    kind: str  # "code" or "markdown"
    text: str


def notebook(page: str) -> str:
    """Return a notebook, as JSON, with the text and the programs of a page."""
    cells = []
    for cell in [Cell("markdown", INTRODUCTION), *cells_of(page)]:
        code = {"execution_count": None, "outputs": []} if cell.kind == "code" else {}
        cells.append({"cell_type": cell.kind, "metadata": {}, "source": cell.text.splitlines(keepends=True), **code})
    return json.dumps({"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 4}, indent=1)


def cells_of(page: str) -> list[Cell]:
    """Return the cells of a page: its programs and the text between them."""
    cells, text, position = [], "", 0
    for block in FENCE.finditer(page):
        text += page[position : block.start()]
        position = block.end()
        language = block[2].strip()
        if language in ("python", "python snippet"):
            cells += [Cell("markdown", plain(text)), Cell("code", COMMAND.sub("", block[3]).rstrip("\n"))]
            text = ""
        elif language != "text" and not language.startswith("{"):
            text += block[0]
    cells.append(Cell("markdown", plain(text + page[position:])))
    return [cell for cell in cells if cell.text]


def plain(text: str) -> str:
    """Return text without pictures, labels and links to other pages."""
    return LINK.sub(r"\1", LABEL.sub("", PICTURE.sub("", text))).strip("\n")
