"""The tree of pages in the sidebar, made from the titles of pages alone.

Sphinx copies the titles of all sections for each page, and then drops those that aren't titles of pages. With some hundred
pages and sources this takes a third of the time of a build.
"""

from __future__ import annotations

from collections.abc import Callable

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def keep_titles(app: Sphinx, env: BuildEnvironment) -> None:
    """Store the contents of each page without its sections."""
    env.titles_of_pages = {page: without_sections(contents) for page, contents in env.tocs.items()}


def without_sections(contents: nodes.bullet_list) -> nodes.bullet_list:
    """Return a copy that keeps the title of a page and the trees of other pages below it."""
    titles = contents.deepcopy()
    for title in titles.children:
        if len(title) > 1:
            title[1][:] = list(title.findall(addnodes.toctree))
    return titles


def use_titles(app: Sphinx, page: str, template: str, context: dict, document: nodes.document | None) -> None:
    """Make the tree of pages from the stored contents."""
    tree: Callable[..., str] = context["toctree"]

    def tree_of_titles(**options: object) -> str:
        contents, app.env.tocs = app.env.tocs, app.env.titles_of_pages
        try:
            return tree(**options)
        finally:
            app.env.tocs = contents

    context["toctree"] = tree_of_titles


def setup(app: Sphinx) -> dict:
    """Register both, the second before the theme asks for the tree."""
    app.connect("env-updated", keep_titles)  # also if no page has changed
    app.connect("html-page-context", use_titles, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
