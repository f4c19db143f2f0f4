"""Wrong programs, what each must say, and whether it does.

A program's header, the comments at its top, says how it is run and what its user must see:

    # One sentence: the mistake.
    # ranks: 2                                          2, where there is no such line
    # environment: MPIAD_DEBUG=1 MPIAD_TIMEOUT=2        none
    # arguments: -m pytest                              of the interpreter, before the program's name
    # within: 20                                        seconds, from start to end; 20
    # raises: CommunicationMismatchError                     the last error of a rank; there may be none
    # says: rank 1.*mpi_bcast.*{here}                   a regular expression, in standard error; one or more
    # says on Open MPI: signal 9                        where the launcher speaks, and each its own language
    # prints: 1 failed                                  the same, in standard output
    # together: yes                                     no rank waits for one that raises: it runs with others in one job
    # thorough: yes                                     it takes long, and runs where everything is run

`{here}` stands for `program.py:12` and `program.py", line 12`, the line that ends in the comment `# here`; any other word
in braces likewise. All programs must end by themselves, within their time, with another exit than 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import launch
from mpi4py import MPI

HEADER = re.compile(r"# ([a-z ]+?)(?: on (Open MPI|MPICH))?: (.*)")
MARK = re.compile(r"# (\w+)$")
WORDS = ("ranks", "environment", "arguments", "within", "raises", "says", "prints", "together", "thorough")
TOGETHER = 15  # programs of one job


class HeaderError(ValueError):
    """Report a program whose header can't be read."""


@dataclass
class WrongProgram:
    """A wrong program and its header."""

    path: Path
    ranks: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    within: float = 20.0
    raises: str = ""
    says: list[str] = field(default_factory=list)
    prints: list[str] = field(default_factory=list)
    together: bool = False
    thorough: bool = False


def read(path: Path) -> WrongProgram:
    """Return a program with what its header says."""
    program, lines = WrongProgram(path), path.read_text().split("\n")
    places = {
        mark[1]: rf"{re.escape(path.name)}(?::|\", line ){number}\b"
        for number, line in enumerate(lines, start=1)
        if not line.startswith("#") and (mark := MARK.search(line))
    }
    vendor = MPI.get_vendor()[0]
    for line in lines[1:]:
        if not line.startswith("# "):
            break
        entry = HEADER.fullmatch(line)
        if entry is None or entry[1] not in WORDS:
            raise HeaderError(f"{path.name}: {line!r} is none of {', '.join(WORDS)}")
        if entry[2] in (None, vendor):
            _enter(program, entry[1], re.sub(r"\{([a-z]\w*)\}", lambda word: places[word[1]], entry[3]))
    if not lines[0].startswith("# ") or not (program.says or program.prints or program.raises):
        raise HeaderError(f"{path.name} says neither what its mistake is nor what its user must see")
    return program


def _enter(program: WrongProgram, word: str, value: str) -> None:
    if word == "environment":
        program.environment = dict(pair.split("=") for pair in value.split())
    elif word == "arguments":
        program.arguments = value.split()
    elif word in ("together", "thorough"):
        setattr(program, word, value == "yes")
    elif word in ("says", "prints"):
        getattr(program, word).append(value)
    else:
        setattr(program, word, type(getattr(program, word))(value))


def complaints(program: WrongProgram) -> list[str]:
    """Run a program and return what is wrong with its end; nothing, where it ends as it must."""
    arguments = [*program.arguments, str(program.path)]
    job = launch.run_captured(program.ranks, arguments, limit=program.within, env=program.environment, mpiexec=True)
    return missing(program, job)


def jobs(programs: list[WrongProgram]) -> list[list[WrongProgram]]:
    """Divide the programs that run together into jobs, those of a job with the same environment on as many ranks."""
    alike: dict[tuple, list[WrongProgram]] = {}
    for program in programs:
        if program.together:
            alike.setdefault((program.ranks, *program.environment.items()), []).append(program)
    return [group[i : i + TOGETHER] for group in alike.values() for i in range(0, len(group), TOGETHER)]


def complaints_in_turn(programs: list[WrongProgram], folder: Path) -> list[str]:
    """Run the programs of a job one after the other in copies, and return what is wrong with what they raise."""
    paths = [folder / program.path.stem / program.path.name for program in programs]
    for program, path in zip(programs, paths):
        path.parent.mkdir()
        path.write_bytes(program.path.read_bytes())
    first, arguments = programs[0], ["tests/run_in_turn.py", "--raising", *map(str, paths)]
    job = launch.run_captured(first.ranks, arguments, limit=60, env=first.environment, mpiexec=True)
    found = []
    for program, path in zip(programs, paths):
        wrote = {kind: Path(f"{path}.{kind}") for kind in ("stdout", "stderr")}
        texts = {kind: file.read_text() if file.exists() else "(not begun)" for kind, file in wrote.items()}
        missed = missing(program, launch.Outcome(1, "", job.seconds, **texts))
        found += [f"{program.path.name}:", *missed] if missed else []
    if job.returncode:
        found.append(f"the job ended with exit {job.returncode}: {job.reports}\n{job.stdout}\n{job.stderr}")
    return found


def missing(program: WrongProgram, job: launch.Outcome) -> list[str]:
    found = []
    if job.returncode == launch.EXPIRED and job.reports:
        found.append(f"it didn't end within {program.within:g} s:\n{job.reports}")
    elif job.returncode == 0:
        found.append("it ended with exit 0")
    if program.raises and not re.search(rf"^(\w+\.)*{program.raises}\b", job.stderr, re.MULTILINE):
        found.append(f"it didn't raise {program.raises}")
    for name, text, expected in (("say", job.stderr, program.says), ("print", job.stdout, program.prints)):
        found += [f"it didn't {name} {wish}" for wish in expected if not re.search(wish, text, re.DOTALL)]
    if found:
        found.append(f"-- exit {job.returncode} after {job.seconds:.1f} s\n-- stdout --\n{job.stdout}")
        found.append(f"-- stderr --\n{job.stderr}")
    return found
