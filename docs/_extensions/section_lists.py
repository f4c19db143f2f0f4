"""Lists of sections: a long page begins with links to its sections and to the parts of these.

The theme shows the sections beside the text, but not on small screens.
"""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx

LONGEST = 16_000  # characters of a page without a list
FEWEST = 4  # sections of a page with one, their parts included


def add_list(app: Sphinx, document: nodes.document) -> None:
    """Insert links to the sections of a long page before the first of them."""
    page = next(document.findall(nodes.section), None)
    if page is None or len(document.astext()) <= LONGEST:
        return
    sections = sections_of(page)
    if sum(1 + len(sections_of(section)) for section in sections) >= FEWEST:
        page.insert(page.index(sections[0]), list_of(page, 2))


def sections_of(parent: nodes.section) -> list[nodes.section]:
    return [child for child in parent.children if isinstance(child, nodes.section)]


def list_of(parent: nodes.section, levels: int) -> nodes.bullet_list:
    """Return links to the sections of a page or section, down to a level."""
    links = nodes.bullet_list("", classes=["sections"])
    for section in sections_of(parent):
        item = nodes.list_item("", nodes.paragraph("", "", link_to(section)))
        if levels > 1 and sections_of(section):
            item += list_of(section, levels - 1)
        links += item
    return links


def link_to(section: nodes.section) -> nodes.reference:
    """Return a link to a section with the text of its title, which may contain code."""
    text = [child.deepcopy() for child in section[0].children]
    return nodes.reference("", "", *text, internal=True, refid=section["ids"][0])


def setup(app: Sphinx) -> dict:
    """Register the list."""
    app.connect("doctree-read", add_list)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
