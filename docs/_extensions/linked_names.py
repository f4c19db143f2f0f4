"""Link names that stand as code in the text to their reference: `mpiad.minimize`, `domain.exchange`, `numpy.pad`.

Pages and docstrings write names as plain code. After a page is read, each piece of code that is the whole name of
something public becomes a link to where it is described: ours in these pages, those of NumPy, SciPy and mpi4py where
intersphinx's inventories say (autograd publishes none). Code that names nothing stays as it is, and so does code that the
role `other` marks as a name of another library: {other}`Event(cond_fn)`. A page whose metadata has
`other_names` links none.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxRole
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?", re.DOTALL)
# What pages call things by, and where they are.
PREFIXES = ["", "mpiad.", "mpiad.linalg.", "mpiad.ensemble.", "mpiad.timestepping.", "mpiad.testing.", "mpiad.debug.",
            "mpiad.errors.", "mpiad.extend.", "mpiad.parallel.", "mpiad.vi.", "mpiad.optimize.", "scipy.optimize.",
            "scipy.integrate."]  # fmt: skip
OBJECTS = {"domain.": "mpiad.Domain.", "Domain.": "mpiad.Domain.", "np.": "numpy.", "MPI.": "mpi4py.MPI.",
           "mpi4py.MPI.COMM_WORLD.": "mpi4py.MPI.Comm."}  # fmt: skip
AUTOGRAD = "https://github.com/HIPS/autograd/blob/master/docs/tutorial.md"
TOO_COMMON = {"solve", "scan", "reset", "value", "step", "traced", "report", "array"}


class LinkedNames(SphinxPostTransform):
    """Make code that is a public name a link to its description."""

    default_priority = 20

    def run(self, **_: object) -> None:
        """Go through the code of a page that isn't part of a link or a heading already."""
        if "other_names" in self.env.metadata[self.env.current_document.docname]:
            return
        for literal in list(self.document.findall(nodes.literal)):
            is_link = any(isinstance(parent, (nodes.reference, nodes.title)) for parent in _ancestors(literal))
            if not is_link and "other" not in literal["classes"]:
                link = self._link(literal)
                if link is not None:
                    literal.replace_self(link)

    def _link(self, literal: nodes.literal) -> nodes.reference | None:
        found = NAME.fullmatch(literal.astext())
        if found is None or found[1] in TOO_COMMON:
            return None
        name = found[1]
        for short, long in OBJECTS.items():
            if name.startswith(short):
                name = long + name.removeprefix(short)
        described = self.env.get_domain("py").data["objects"]
        inventories = InventoryAdapter(self.env).main_inventory.values()
        for long in (prefix + name for prefix in PREFIXES):
            entry = described.get(long)
            if entry is not None:
                page = self.env.current_document.docname
                return make_refnode(self.app.builder, page, entry.docname, entry.node_id, literal.deepcopy(), long)
            for inventory in inventories:
                if long in inventory:
                    return _link_outside(literal, inventory[long].uri)
        return _link_outside(literal, AUTOGRAD) if name in {"autograd", "autograd.grad", "autograd.numpy"} else None


def _link_outside(literal: nodes.literal, address: str) -> nodes.reference:
    return nodes.reference("", "", literal.deepcopy(), internal=False, refuri=address, reftitle=literal.astext())


def _ancestors(node: nodes.Node) -> list[nodes.Node]:
    found = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


class OtherName(SphinxRole):
    """Code that isn't linked."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the code."""
        return [nodes.literal(self.rawtext, self.text, classes=["other"])], []


def setup(app: Sphinx) -> dict:
    """Register the transform and the role."""
    app.add_post_transform(LinkedNames)
    app.add_role("other", OtherName())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
