"""Programs as pages show them: which are run, on how many ranks, and what they must print.

    ```python
    # mpiexec -n 4 python name.py
    ...
    ```
    ```text
    what it prints
    ```

Where the program is wrong, the second block ends with the error's last line, broken into lines as the page likes, or it
is `(never ends)`. Every other block of Python has the word `snippet` beside its language, and is compiled only. A snippet
that saves a picture of the page is run, too, at the end of the program before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

SAVED = re.compile(r"^ *figure\.savefig\(\"(\w+\.png)\"", re.MULTILINE)
NEVER_ENDS = "(never ends)"
FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1 *$", re.MULTILINE | re.DOTALL)
HEADER = re.compile(r"# mpiexec -n (\d+) python (\w+\.py)\n")
ERROR = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit)\b.*", re.MULTILINE)


class PageError(ValueError):
    """Report a page that shows Python that nobody runs."""


@dataclass
class Program:
    """A program of a page, and what the page says that it does."""

    page: str
    name: str
    ranks: int
    text: str
    stdout: str
    error: str = ""
    ends: bool = True


def one_line(text: str) -> str:
    """Return a text with its line breaks and runs of blanks as single blanks."""
    return " ".join(text.split())


def programs_of(text: str, page: str) -> tuple[list[Program], list[str]]:
    """Return the programs and the snippets of a page; a PageError where a block of Python is neither."""
    programs, snippets = [], []
    blocks = list(FENCE.finditer(text))
    for block, after in zip(blocks, [*blocks, None][1:]):
        language, _, mark = block[2].strip().partition(" ")
        if language not in ("python", "py", "python3", "{code-block}", "{testcode}"):
            continue
        if (language, mark) == ("python", "snippet"):
            snippets.append(block[3])
            continue
        header = HEADER.match(block[3])
        line = text.count("\n", 0, block.start()) + 1
        if language != "python" or mark or not header:
            raise PageError(f"{page}:{line}: a block of Python without `# mpiexec -n ... python ...`, not marked `snippet`")
        if after is None or after[2].strip() != "text" or text[block.end() : after.start()].strip():
            raise PageError(f"{page}:{line}: {header[2]} isn't followed at once by a block of text, what it prints")
        programs.append(_program(page, header, block[3], after[3]))
    return programs, snippets


def pictures_of(text: str, page: str) -> list[tuple[Program, str]]:
    """Return the programs with the snippets that save the page's pictures, and the files' names."""
    pictures, program = [], None
    for block in FENCE.finditer(text):
        language, header, saved = block[2].strip(), HEADER.match(block[3]), SAVED.search(block[3])
        if language == "python" and header:
            program = _program(page, header, block[3], "")
        elif language == "python snippet" and program and saved and f"/images/pages/{saved[1]})" in text:
            pictures.append((replace(program, text=program.text + block[3]), saved[1]))
    return pictures


def _program(page: str, header: re.Match, text: str, shown: str) -> Program:
    if shown.strip() == NEVER_ENDS:
        return Program(page, header[2], int(header[1]), text, "", ends=False)
    error = ERROR.search(shown)
    stdout, last = (shown[: error.start()], one_line(shown[error.start() :])) if error else (shown, "")
    return Program(page, header[2], int(header[1]), text, stdout, last)


def errors_in(stderr: str) -> list[str]:
    """Return the last lines of the tracebacks that ranks left behind."""
    return [one_line(line[0]) for line in ERROR.finditer(stderr)]
