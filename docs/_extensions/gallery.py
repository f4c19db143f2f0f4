"""The gallery: excerpts of programs in `examples/`, the programs themselves, and pictures that link to their full size.

    ```{example} shallow_water
    Ocean.step
    main.objective
    main.result
    ```

shows definitions of `examples/shallow_water.py`, in this order, and below them the whole program, collapsed, with a link to
download it. A name is that of a function, a class or a variable, after those of the functions and classes around it. A
variable stands for the statement that first assigns it.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.osutil import relative_uri

PROGRAMS = Path(__file__).parents[2] / "examples"
TEXT = """```python
{excerpt}
```

:::{{dropdown}} The program `{file}`, {lines} lines
{{download}}`Download {file} </../examples/{file}>`
```{{literalinclude}} /../examples/{file}
:language: python
```
:::
"""


class Example(SphinxDirective):
    """Show definitions of a program, and the program in a collapsed block."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the excerpt and of the program."""
        path = PROGRAMS / f"{self.arguments[0]}.py"
        self.env.note_dependency(str(path))
        source = path.read_text(encoding="utf-8")
        excerpt = excerpt_of(source, list(self.content))
        text = TEXT.format(excerpt=excerpt, file=path.name, lines=len(source.splitlines()))
        return self.parse_text_to_nodes(text)


def excerpt_of(source: str, names: list[str]) -> str:
    """Return definitions of a program, with an empty line before and after functions and classes."""
    tree, lines, excerpt = ast.parse(source), source.splitlines(), []
    statements = [definition(tree, name) for name in names]
    for before, statement in zip([None, *statements], statements):
        if before is not None and (hasattr(before, "body") or hasattr(statement, "body")):
            excerpt.append("")
        first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", [])))
        excerpt.append(textwrap.dedent("\n".join(lines[first - 1 : statement.end_lineno])))
    return "\n".join(excerpt)


def definition(tree: ast.Module, name: str) -> ast.stmt:
    """Return the statement that defines a name in the bodies of the functions and classes before its points."""
    body, statement = tree.body, None
    for part in name.split("."):
        statement = next((each for each in body if part in names_of(each)), None)
        if statement is None:
            raise ExtensionError(f"no definition of {name}")
        body = getattr(statement, "body", [])
    return statement


def names_of(statement: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


class FullSizePictures(SphinxPostTransform):
    """Link each picture of a page to its file, unless it is part of a link or a card."""

    default_priority = 20
    formats = ("html",)

    def run(self, **_: object) -> None:
        """Go through the pictures of a page."""
        builder = self.app.builder
        for picture in list(self.document.findall(nodes.image)):
            is_linked = isinstance(picture.parent, nodes.reference) or any("card" in name for name in picture["classes"])
            if is_linked or picture["uri"] not in self.env.images:
                continue
            file = f"{builder.imagedir}/{self.env.images[picture['uri']][1]}"
            address = relative_uri(builder.get_target_uri(self.env.current_document.docname), file)
            picture.replace_self(nodes.reference("", "", picture.deepcopy(), refuri=address, internal=False))


def setup(app: Sphinx) -> dict:
    """Register the directive and the transform."""
    app.add_directive("example", Example)
    app.add_post_transform(FullSizePictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
