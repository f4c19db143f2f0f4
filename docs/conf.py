"""How the documentation is built: `make docs`; a warning is an error."""

import re
import sys
from configparser import ConfigParser
from pathlib import Path

from sphinx.util.inspect import TypeAliasForwardRef

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

_setup = ConfigParser()
_setup.read(Path(__file__).parents[1] / "setup.cfg")

project = "mpiad"
release = version = _setup["metadata"]["version"]
copyright = "the mpiad developers"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx-mathjax-offline",  # formulas without a network, as on a cluster
    "gallery",
    "linked_names",
    "navigation",
    "notebook_directive",
    "reference_pages",
    "section_lists",
]
exclude_patterns = ["_build"]
# Short inventories of what the pages name, kept here: pages are built, and are the same, without a network.
_REFERENCES = {
    "mpi4py": "https://mpi4py.readthedocs.io/en/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "scipy": "https://docs.scipy.org/doc/scipy/",
}
intersphinx_mapping = {name: (address, f"_inventories/{name}.inv") for name, address in _REFERENCES.items()}
default_role = "code"  # in docstrings, `x` is code

html_theme = "furo"
html_title = f"mpiad {version}"
html_favicon = "images/diagrams/favicon.svg"
html_copy_source = False
pygments_dark_style = "monokai"  # the theme's underlines names of modules, like links
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_js_files = ["pages.js"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

napoleon_google_docstring = False
napoleon_use_rtype = False
# Sections of ours in NumPy's form: who must call, and what flows back.
napoleon_custom_sections = ["Ranks", "Adjoint"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # `op=SUM`, not its representation
# Signatures show the names of aliases, not their definitions (Any). reference/types.md describes each of them.
_TYPES = (Path(__file__).parent / "reference" / "types.md").read_text(encoding="utf-8")
autodoc_type_aliases = {name: name for name in re.findall(r"^\.\. py:type:: (\w+)$", _TYPES, re.MULTILINE)}
autodoc_type_aliases["DTypeLike"] = "DTypeLike"

_LITERAL_OR_MARK = re.compile(r"^ *>>> .*?(?=\n *\n|\Z)|``.*?``|`.*?`|([*|])", re.DOTALL | re.MULTILINE)
_INITIAL = re.compile(r"^( *[A-Z])\. (?=[A-Z])", re.MULTILINE)


def take_literally(app, what, name, obj, options, lines):
    """Escape what docstrings mean literally: a shape `(..., *local_shape)`, the norm |u|, the initials of an author, which
    would be numbers of a list; examples are code anyway.
    """
    text = _LITERAL_OR_MARK.sub(lambda found: "\\" + found[1] if found[1] else found[0], "\n".join(lines))
    lines[:] = _INITIAL.sub(r"\1\\. ", text).split("\n")


def setup(app):
    """Register the above, before napoleon sees the docstrings; show an alias that is part of a union by its name."""
    TypeAliasForwardRef.__repr__ = lambda alias: alias.name
    app.connect("autodoc-process-docstring", take_literally, priority=100)
