"""The directive `{notebook}`, which links to the page as a Jupyter notebook."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from notebooks import notebook
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.osutil import relative_uri

FOLDER = "_notebooks"


class Notebook(SphinxDirective):
    """Write the page as a notebook, and link to it."""

    def run(self) -> list[nodes.Node]:
        """Return a paragraph with the link."""
        name = self.env.docname
        file = Path(self.env.app.outdir, FOLDER, f"{Path(name).name}.ipynb")
        file.parent.mkdir(exist_ok=True)
        file.write_text(notebook(Path(self.env.doc2path(name)).read_text(encoding="utf-8")), encoding="utf-8")
        address = relative_uri(self.env.app.builder.get_target_uri(name), f"{FOLDER}/{file.name}")
        link = nodes.reference("", "Download this page as a notebook", refuri=address, internal=False)
        return [nodes.paragraph("", "", link)]


def setup(app: Sphinx) -> dict:
    """Register the directive."""
    app.add_directive("notebook", Notebook)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
