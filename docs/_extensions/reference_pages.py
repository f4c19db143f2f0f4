"""The pages of the reference: a table of their contents, signatures as users write calls, and types that link rightly.

- Before the first description in a section or class with several, a table lists each name with the first paragraph of its
  docstring.
- Signatures leave out parameters of classes whose names begin with an underscore, which only the library fills in, and show
  the values of constants instead of their names.
- The words of a type in a docstring ("array, shape (n,)") become links only if they name a class or an alias of a type.
  Sphinx also takes an attribute with such a name, for example `DistributedMatrix.shape`.
"""

from __future__ import annotations

import re
import sys

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

FEWEST = 3  # names in a section that has a table
FEWEST_METHODS = 6  # methods of a class that has one
DEFAULT = re.compile(r"= (_?[A-Z][A-Z0-9_]+)$")  # a constant
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class TypesOnly(SphinxPostTransform):
    """Replace references from types to attributes by their text."""

    default_priority = 5  # before references are resolved

    def run(self, **_: object) -> None:
        """Go through the references of a page that stand for types."""
        domain = self.env.get_domain("py")
        for reference in list(self.document.findall(addnodes.pending_xref)):
            if reference.get("refdomain") != "py" or reference["reftype"] != "class" or "refspecific" not in reference:
                continue
            where = (self.env, reference.get("py:module"), reference.get("py:class"), reference["reftarget"])
            kinds = {entry.objtype for _, entry in domain.find_obj(*where, None, 1)}
            if kinds and not kinds & {"class", "exception", "type", "data"}:
                reference.replace_self(reference.children)


def as_users_write(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Leave private parameters of classes out of a signature, and show the values of constants of the library.

    A protocol, which has no instances, has no signature.
    """
    if getattr(obj, "_is_protocol", False):
        return "", returned
    if signature:
        each = _parameters(signature[1:-1])
        shown = [one for one in each if not (what == "class" and one.startswith("_"))]
        names = getattr(obj, "__globals__", None) or vars(sys.modules[getattr(obj, "__module__", None) or "mpiad"])
        text = ", ".join(DEFAULT.sub(lambda found: f"= {_value(found[1], names)}", one) for one in shown)
        signature = f"({re.sub(' *= *<factory>', ' = ...', text)})"
    return signature, returned


def _value(name: str, names: dict[str, object]) -> str:
    value = names.get(name)
    if isinstance(value, int):
        return repr(value)
    return f"{type(value).__name__}()" if name.startswith("_") and value is not None else name


def _parameters(text: str) -> list[str]:
    """Split the text between the parentheses of a signature at its outermost commas."""
    found, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += 0 if quote else BRACKETS.get(character, 0)
        if character == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += character
    return [each.strip() for each in found]


def add_tables(app: Sphinx, document: nodes.document) -> None:
    """Insert a table of the described names into each section of a page of the reference."""
    if not app.env.docname.startswith("reference/"):
        return
    for section in list(document.findall(nodes.section)):
        _insert_table(section, FEWEST)
    for content in list(document.findall(addnodes.desc_content)):
        _insert_table(content, FEWEST_METHODS)


def _insert_table(parent: nodes.Element, fewest: int) -> None:
    described = [child for child in parent.children if isinstance(child, addnodes.desc)]
    rows = [row for each in described if (row := _row(each))]
    if len(rows) >= fewest:
        first = parent.index(described[0])
        while first and isinstance(parent[first - 1], addnodes.index):
            first -= 1
        parent.insert(first, _table(rows))


def _row(described: addnodes.desc) -> tuple[nodes.Node, nodes.Node] | None:
    signature = described[0]
    if not signature["ids"] or described["objtype"] in {"type", "attribute"}:  # these descriptions are short
        return None
    name = signature["fullname"].rpartition(".")[2]
    link = nodes.reference("", "", nodes.literal(name, name), internal=True, refid=signature["ids"][0])
    docstring = next((child for child in described[-1].children if isinstance(child, nodes.paragraph)), None)
    summary = nodes.paragraph("", "", *([child.deepcopy() for child in docstring.children] if docstring else []))
    return nodes.paragraph("", "", link), summary


def _table(rows: list[tuple[nodes.Node, nodes.Node]]) -> nodes.table:
    body = nodes.tbody("", *(nodes.row("", *(nodes.entry("", cell) for cell in row)) for row in rows))
    columns = (nodes.colspec(colwidth=width) for width in (30, 70))
    return nodes.table("", nodes.tgroup("", *columns, body, cols=2), classes=["names"])


def setup(app: Sphinx) -> dict:
    """Register the above."""
    app.add_post_transform(TypesOnly)
    app.connect("autodoc-process-signature", as_users_write)
    app.connect("doctree-read", add_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
