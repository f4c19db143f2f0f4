"""Mutation tests: change one place of the library at a time, and see which test fails.

    python tests/mutants.py --mutants 60 --seed 46 --report mutants.json

The mutants are drawn with a seed, in proportion to the packages' lines of code, at least one for each package with more
than 100. A mutant changes a sign, a bound, an index, a comparison, a constant or an operator in the text of a kernel,
or drops a statement; the rest of its file stays as it is. The tests run in copies of the checkout, which itself is
never changed.

First the whole suite runs once on 1, 2 and 3 ranks with a mark at each of the places, which notes the tests that
execute it. Then each mutant meets only these tests, until one fails: those on fewer ranks first, and those of
its own package first. If none fails, or if the place is executed by an import or can't be marked, the mutant meets all
tests of its package: what a test uses may have been computed before it. A test that exceeds its time limit has failed.
At the end, the tests that failed run again without mutants; a mutant counts as killed only if they pass.

The survivors that `tests/mutants.md` explains are equivalent to the original. The exit status is 1 if others survive.

Why a script: mutmut and cosmic-ray draw no sample, and start the tests without mpiexec; mutmut keeps all mutants of a
file in one module, which changes the lines and the source that the library reads.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).parent
PYTEST = ["-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "-q", "-rfE", "--tb=no", "--rootdir=."]
MANY_LINES = 100  # of code, from which on a package has a mutant at least
SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
TURNED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
TURNED_TEXT = {"+": "-", "-": "+", "*": "/", "/": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
KERNEL_TEXT = re.compile(r"[\w})\]] (=|[+*/-]=) [\w{(-]|\breturn ")
KERNEL_OPERATOR = re.compile(r"(?<=[\w})\]] )([<>]=?|[-+*/])(?= [\w{(-])")
# Where the first test that failed is named: by the launcher, and by pytest.
FAILED = (r"^____ (\S.*) \(\w+\) ____$", r"^the run broke off in (.+)$", r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$")
PASSED = (0, 5)  # pytest's exit status; 5: no test was left to run
IMPORT = "import"
COMPILED = b"functions_of(__name__"  # a file whose loops are compiled from its text, in which a mark is no operation
# What a marked place calls. A test is known by this variable of pytest's, in the programs that it starts too.
PROBES = """import os
seen = set()
def mark(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "import ()").rpartition(" ")[0]
    if (number, test) not in seen:
        seen.add((number, test))
        with open(os.environ["MUTANT_NOTES"], "a") as notes:
            notes.write(f"{number} {test}\\n")
"""


@dataclass
class Mutant:
    """A change of the text of one file. Offsets count bytes, as the columns of `ast` do."""

    kind: str
    file: str
    line: int
    start: int
    end: int
    after: str
    before: str = ""
    statement: str = ""
    # The part that a mark is put before or around.
    place: tuple[int, int] = (0, 0)
    number: int = 0
    outcome: str = ""  # killed, survived, not executed
    killer: str = ""
    ranks: int = 0
    tests: int = 0  # that execute the place
    seconds: float = 0.0
    explained: bool = False

    @property
    def description(self) -> str:
        """The file and the change, which later checkouts know it by, whatever its line."""
        return f"`{self.file}`: `{self.statement}`: `{self.before}` → `{self.after}`"


class Source:
    """A file, and its mutants."""

    def __init__(self, root: Path, path: Path) -> None:
        self.name, self.bytes = path.relative_to(root).as_posix(), path.read_bytes()
        self.tree = ast.parse(self.bytes)
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends."""
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    @cached_property
    def documentation(self) -> set[ast.AST]:
        """Docstrings, and other strings that are statements."""
        return {n.value for n in ast.walk(self.tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}

    @cached_property
    def code_lines(self) -> int:
        """The number of lines with code, but docstrings and imports."""
        kept, skipped = set(), (ast.Import, ast.ImportFrom)
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.stmt, ast.expr)) and not isinstance(node, skipped) and node not in self.documentation:
                if isinstance(node, ast.Expr) and node.value in self.documentation:
                    continue
                kept |= {node.lineno, node.end_lineno}
        return len(kept)

    def mutants(self) -> Iterator[Mutant]:
        """Yield all mutants."""
        for node, statement in self.nodes():
            for kind, (start, end), after, place in self.changes(node):
                before = self.bytes[start:end].decode()
                mutant = Mutant(kind, self.name, bisect.bisect_right(self.starts, start), start, end, after, before)
                mutant.place = place
                text = self.bytes[slice(*self.span(statement))].decode().split("\n")[0]
                mutant.statement = text if len(text) < 80 else f"{text[:77]}..."
                yield mutant

    def is_valid(self, mutant: Mutant) -> bool:
        """Return whether the mutant, and the text with a mark at its place, are programs."""
        try:
            ast.parse(self.changed(mutant))
            ast.parse(marked(self.bytes, [mutant]))
        except SyntaxError:
            return False
        return True

    def nodes(self) -> Iterator[tuple[ast.AST, ast.stmt]]:
        """Yield nodes and their statements, without annotations, the insides of f-strings, and blocks for type checkers."""

        def inside(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.stmt]]:
            yield node, statement
            if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)):
                return
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                return
            for name, value in ast.iter_fields(node):
                if name in ("annotation", "returns", "type_params"):
                    continue
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from inside(child, child if isinstance(child, ast.stmt) else statement)

        for statement in self.tree.body:
            yield from inside(statement, statement)

    def changes(self, node: ast.AST) -> Iterator[tuple[str, tuple[int, int], str, tuple[int, int]]]:
        """Yield the kinds of change at a node: what is replaced, by what, and what a mark is put at."""
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS and not any(map(is_text, (node.left, node.right))):
            yield from self.operator("sign", node.left, node.right, SIGNS[type(node.op)], self.span(node))
        elif isinstance(node, ast.AugAssign) and type(node.op) in SIGNS and not is_text(node.value):
            yield from self.operator("sign", node.target, node.value, SIGNS[type(node.op)], self.span(node)[:1] * 2)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
            start, end = self.span(node)
            inner = self.bytes[start:end].decode().removeprefix("-").removeprefix("not ")
            yield "sign" if isinstance(node.op, ast.USub) else "comparison", (start, end), inner, (start, end)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self.operator(
                "comparison", node.left, node.comparators[0], TURNED[type(node.ops[0])], self.span(node)
            )
        elif isinstance(node, ast.BoolOp):
            yield from self.operator("comparison", *node.values[:2], TURNED[type(node.op)], self.span(node))
        elif isinstance(node, ast.Subscript):
            for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
                yield from self.index(index)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
            bound = self.span(node.args[-1 if len(node.args) == 1 else 1])
            yield "bound", bound, f"{self.bytes[slice(*bound)].decode()} - 1", bound
        elif isinstance(node, ast.Constant) and node not in self.documentation:
            yield from self.constant(node)
        elif isinstance(node, ast.JoinedStr):
            yield from self.text(node)
        elif is_step(node):
            yield "statement", self.span(node), "pass", self.span(node)[:1] * 2

    def operator(self, kind, left, right, turned, place):
        """Yield the change of the operator between two nodes."""
        start, end = self.span(left)[1], self.span(right)[0]
        word = rf"(?<![\w+*/<>=-]){re.escape(turned[0])}(?!\w)" if turned[0].isalpha() else re.escape(turned[0])
        found = re.search(word.encode().replace(rb"is\ not", rb"is\s+not"), self.bytes[start:end])
        if found and b"#" not in self.bytes[start:end]:
            yield kind, (start + found.start(), start + found.end()), turned[1], place

    def index(self, node):
        """Yield the changes of an index, or of the bounds of a slice."""
        if isinstance(node, ast.Slice):
            for bound in filter(None, (node.lower, node.upper)):
                span = self.span(bound)
                yield "bound", span, f"{self.bytes[slice(*span)].decode()} + 1", span
        elif isinstance(node, (ast.Name, ast.BinOp)) or number(node) is not None:
            span, value = self.span(node), number(node)
            yield "index", span, str(value + 1) if value is not None else f"{self.bytes[slice(*span)].decode()} - 1", span

    def constant(self, node):
        """Yield the changes of a number, a truth value, or the text of a kernel."""
        if isinstance(node.value, bool):
            yield "constant", self.span(node), str(not node.value), self.span(node)
        elif isinstance(node.value, int):
            yield "constant", self.span(node), str(node.value + 1), self.span(node)
        elif isinstance(node.value, float):
            yield "constant", self.span(node), repr(node.value * 2 or 1.0), self.span(node)
        elif isinstance(node.value, str):
            yield from self.text(node)

    def text(self, node):
        """Yield the changes of operators in a string that is a kernel's text."""
        start, end = self.span(node)
        text = self.bytes[start:end].decode()
        if KERNEL_TEXT.search(text) and text.isascii():
            for found in KERNEL_OPERATOR.finditer(text):
                span = (start + found.start(), start + found.end())
                yield "kernel", span, TURNED_TEXT[found[0]], (start, end)

    def changed(self, mutant: Mutant) -> bytes:
        """Return the text of a mutant."""
        return self.bytes[: mutant.start] + mutant.after.encode() + self.bytes[mutant.end :]


def is_text(node: ast.expr) -> bool:
    """Return whether an operand shows that `+` joins sequences."""
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple)) or isinstance(getattr(node, "value", None), str)


def is_step(node: ast.AST) -> bool:
    """Return whether a statement can be dropped so that its file can still be imported."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, (ast.Raise, ast.Continue))


def number(node: ast.expr) -> int | None:
    """Return the value of an integer literal."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


def marked(text: bytes, mutants: list[Mutant]) -> bytes:
    """Return a text with a mark at each mutant's place: around an expression, or before a statement."""
    marks = []
    for mutant in mutants:
        call, (start, end) = f'__import__("mutant_probes").mark({mutant.number})', mutant.place
        # Marks of one place are nested: those that end later begin earlier.
        marks += [(start, -end, f"({call} or (" if end > start else f"{call}; ")] + [(end, start, "))")] * (end > start)
    for at, _, mark in sorted(marks, reverse=True):
        text = text[:at] + mark.encode() + text[at:]
    return text


def package_of(file: str) -> str:
    """Return the package that a file belongs to: a folder in the library, or the library for files directly in it."""
    return "/".join(file.split("/")[:2] if file.count("/") > 1 else file.split("/")[:1])


def draw(files: dict[str, Source], count: int, seed: int) -> list[Mutant]:
    """Return mutants, in proportion to the packages' code; each kind of change is as likely as another."""
    lines: dict[str, int] = defaultdict(int)
    kinds: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for source in files.values():
        lines[package_of(source.name)] += source.code_lines
        for mutant in source.mutants():
            kinds[package_of(source.name)][mutant.kind].append(mutant)
    numbers = {package: int(some > MANY_LINES) for package, some in lines.items()}
    while sum(numbers.values()) < count:
        numbers[max(lines, key=lambda package: lines[package] / (numbers[package] + 0.5))] += 1
    drawn = []
    for package in sorted(lines):
        rng, left = random.Random(f"{seed} {package}"), kinds[package]
        while numbers[package]:
            kind = rng.choice(sorted(kind for kind in left if left[kind]))
            mutant = left[kind].pop(rng.randrange(len(left[kind])))
            if files[mutant.file].is_valid(mutant):
                drawn.append(mutant)
                numbers[package] -= 1
    for k, mutant in enumerate(drawn):
        mutant.number = k
    return drawn


class Copy:
    """A copy of the checkout."""

    def __init__(self, root: Path, folder: Path) -> None:
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "_build", ".hypothesis")
        self.folder = Path(shutil.copytree(root, folder, ignore=ignored)).resolve()
        (self.folder / "mutant_probes.py").write_text(PROBES)

    def write(self, name: str, text: bytes) -> None:
        """Write a file, and remove what Python has compiled: it compares only the seconds of files' times."""
        path = self.folder / name
        path.write_bytes(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


@dataclass
class Campaign:
    """Mutants of a package, and the tests that they meet."""

    root: Path
    package: str
    ranks: list[int]
    limit: float
    prefix: list[str]
    processes: str
    report: Path
    temporary: Path

    def __post_init__(self) -> None:
        files = sorted((self.root / self.package).rglob("*.py"))
        self.sources = {source.name: source for source in (Source(self.root, file) for file in files)}
        explanations = self.root / "tests" / "mutants.md"
        self.explanations = explanations.read_text() if explanations.exists() else ""
        self.mutants: list[Mutant] = []
        self.reached: dict[str, list[list[str]]] = {}  # by numbers of ranks: by mutants, the tests that execute it
        self.lock, self.own = threading.Lock(), threading.local()

    def pytest(self, copy: Copy, ranks: int, tests: list[str], *flags: str, notes: str = "") -> tuple[int, str]:
        """Run tests; return the exit status, and the first that failed."""
        (copy.folder / "chosen_tests").write_text("\n".join(tests))
        limit = self.limit + len(tests)
        command = [
            *self.prefix,
            sys.executable,
            str(HERE / "launch.py"),
            "--ranks",
            str(ranks),
            "--limit",
            str(limit),
            "--",
        ]
        path = os.pathsep.join(filter(None, [str(copy.folder), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [*command, *PYTEST, *flags, "@chosen_tests"], cwd=copy.folder, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": path, "MUTANT_NOTES": notes},
        )  # fmt: skip
        output = done.stdout + done.stderr
        failed = [found[1] for found in (re.search(form, output, re.MULTILINE) for form in FAILED) if found]
        return done.returncode, failed[0] if failed else "the start of the tests"

    def reach(self) -> None:
        """Find the tests that execute each mutant's place, by one run of the whole suite with marks."""
        copy = Copy(self.root, self.temporary / "marked")
        for name in {mutant.file for mutant in self.mutants}:
            here = [mutant for mutant in self.mutants if mutant.file == name]
            if COMPILED not in self.sources[name].bytes:
                copy.write(name, marked(self.sources[name].bytes, here))
        for ranks in self.ranks:
            notes = self.temporary / f"notes-{ranks}"
            notes.touch()
            flags = ["-n", self.processes, "--dist", "loadfile", "--no-loadscope-reorder"] if ranks == 1 else []
            self.pytest(copy, ranks, ["tests"], *flags, notes=str(notes))
            tests: list[dict[str, None]] = [{} for _ in self.mutants]
            for line in notes.read_text().splitlines():
                number, _, test = line.partition(" ")
                tests[int(number)][test] = None
            self.reached[str(ranks)] = [list(some) for some in tests]

    def runs(self, mutant: Mutant) -> Iterator[tuple[int, list[str]]]:
        """Yield the numbers of ranks and the tests that a mutant meets, those that probably notice it first."""
        own = self.tests_of(mutant)
        imported = any(IMPORT in reached[mutant.number] for reached in self.reached.values())
        for ranks in self.ranks:
            tests = [test for test in self.reached[str(ranks)][mutant.number] if test != IMPORT]
            near = [test for test in tests if test.startswith(own)]
            if near and not imported:
                yield ranks, near
            far = [test for test in tests if not test.startswith(own)]
            if far and not imported:
                yield ranks, far
        yield from ((ranks, [own]) for ranks in self.ranks)
        if imported:
            yield from ((ranks, ["tests"]) for ranks in self.ranks if own != "tests")

    def tests_of(self, mutant: Mutant) -> str:
        """Return the folder of the tests of a mutant's package."""
        folder = Path("tests", *Path(mutant.file).parts[1:2])
        return folder.as_posix() if (self.root / folder).is_dir() else "tests"

    def meet(self, mutant: Mutant) -> None:
        """Run a mutant against the tests that execute it, until one fails."""
        if not hasattr(self.own, "copy"):
            self.own.copy = Copy(self.root, self.temporary / threading.current_thread().name)
        copy, source, begin = self.own.copy, self.sources[mutant.file], time.monotonic()
        mutant.tests = len({test for reached in self.reached.values() for test in reached[mutant.number]})
        copy.write(mutant.file, source.changed(mutant))
        mutant.outcome = "survived" if mutant.tests or COMPILED in source.bytes else "not executed"
        for ranks, tests in self.runs(mutant):
            status, failed = self.pytest(copy, ranks, tests, "-x")
            if status not in PASSED:
                mutant.outcome, mutant.killer, mutant.ranks = "killed", failed, ranks
                break
        copy.write(mutant.file, source.bytes)
        mutant.seconds = round(time.monotonic() - begin, 1)
        with self.lock:
            self.save()
            print(line(mutant), flush=True)

    def confirm(self) -> None:
        """Run the tests that failed without mutants, too: those that fail show nothing."""
        copy = Copy(self.root, self.temporary / "unchanged")
        for ranks in self.ranks:
            killed = [mutant for mutant in self.mutants if mutant.ranks == ranks and "::" in mutant.killer]
            while killed:
                status, failed = self.pytest(copy, ranks, sorted({mutant.killer for mutant in killed}), "-x")
                if status in PASSED:
                    break
                # A test that has been renamed or removed since keeps all from running.
                doubtful = [mutant for mutant in killed if mutant.killer == failed] or killed
                for mutant in doubtful:
                    mutant.outcome = "unclear"
                killed = [mutant for mutant in killed if mutant not in doubtful]

    def run(self, count: int, seed: int, jobs: int) -> None:
        """Draw the mutants and run them; a report of the same ones that isn't complete is continued."""
        self.mutants = draw(self.sources, count, seed)
        self.key = [seed, count, hashlib.sha256(b"".join(s.bytes for s in self.sources.values())).hexdigest()]
        if self.report.exists() and (known := json.loads(self.report.read_text()))["key"] == self.key:
            self.mutants, self.reached = [Mutant(**values) for values in known["mutants"]], known["reached"]
        else:
            self.reach()
            self.save()
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self.meet, [mutant for mutant in self.mutants if not mutant.outcome]))
        self.confirm()
        for mutant in self.mutants:
            mutant.explained = mutant.description in self.explanations
        self.save()

    def save(self) -> None:
        values = {"key": self.key, "mutants": [asdict(mutant) for mutant in self.mutants], "reached": self.reached}
        self.report.write_text(json.dumps(values, indent=1))


def line(mutant: Mutant) -> str:
    """Return a mutant's line of the table."""
    outcome = f"{mutant.outcome}, explained" if mutant.explained and mutant.outcome != "killed" else mutant.outcome
    killer = f" by {mutant.killer} ({mutant.ranks} ranks)" if mutant.killer else ""
    place = f"{mutant.number:3} {mutant.kind:10} {mutant.file}:{mutant.line}"
    change = f"{mutant.statement}: {mutant.before} → {mutant.after}"
    return f"{place}: {change}\n    {outcome}{killer}; executed by {mutant.tests} tests, {mutant.seconds:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutants", type=int, default=60, help="the number of mutants")
    parser.add_argument("--seed", type=int, default=46, help="what they are drawn from")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--processes", default="auto", help="of the run with marks on one rank, as -n of pytest-xdist")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a run, and one more for each test")
    parser.add_argument("--prefix", default="", help="a command that starts each run, such as nice")
    parser.add_argument("--report", type=Path, default=Path("mutants.json"), help="a file that a later run continues")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the folder with the package and its tests")
    parser.add_argument("--package", default="mpiad")
    parser.add_argument("--list", action="store_true", help="only show the mutants")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        campaign = Campaign(
            options.root, options.package, options.ranks, options.limit, options.prefix.split(), options.processes,
            options.report, Path(temporary),
        )  # fmt: skip
        if options.list:
            print(*map(line, draw(campaign.sources, options.mutants, options.seed)), sep="\n")
            return 0
        campaign.run(options.mutants, options.seed, options.jobs)
    print("\n==== all ====", *map(line, campaign.mutants), sep="\n")
    outcomes = Counter(mutant.outcome for mutant in campaign.mutants)
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())))
    return int(any(mutant.outcome != "killed" and not mutant.explained for mutant in campaign.mutants))


if __name__ == "__main__":
    sys.exit(main())
