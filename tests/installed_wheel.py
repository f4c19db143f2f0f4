"""Build the distributions, check what an index would show of them, and run a gradient with the installed wheel.

    python tests/installed_wheel.py

All of it happens in a temporary folder. The tree is copied there, built by `python -m build`, looked at by `twine
check`, and the wheel, with its extras, is installed into an environment of its own, which starts two ranks outside of
the tree. It needs an index for the packages that these environments take, and exits with 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "_build")
RELATIVE_LINK = re.compile(r"\]\((?!https?://|#)[^)]*\)")

# J = Σ_r |x_r - x_(r+1)|²: on two ranks 2 |x_0 - x_1|², whose gradient is 4 (x_r - x_(1-r)).
PROGRAM = """
import sys
import autograd.numpy as np
import mpiad

assert mpiad.__file__.startswith(sys.prefix), mpiad.__file__
rank = mpiad.mpi_rank()

@mpiad.jit
def difference(x):
    return np.sum((x - mpiad.mpi_exchange(x, dest=1 - rank, source=1 - rank)) ** 2)

def loss(x):
    return mpiad.mpi_sum(difference(x))

x = np.arange(3.0) + 5 * rank
J, gradient = mpiad.value_and_grad(loss)(x)
assert mpiad.mpi_size() == 2 and J == 150.0, J
assert np.array_equal(gradient, 4.0 * (-5.0 if rank == 0 else 5.0) * np.ones(3)), gradient
"""


def run(*command: str | Path, cwd: Path, seconds: float = 900.0) -> str:
    """Run a command and return what it prints; exit with what it says where it fails.

    The programs beside it come first on PATH, as in an active environment: mpiexec looks for `python` there.
    """
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may lead to the tree
    here["PATH"] = os.pathsep.join([str(Path(command[0]).parent), here.get("PATH", os.defpath)])
    done = subprocess.run([*map(str, command)], cwd=cwd, env=here, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(folder: Path, *packages: str) -> Path:
    """Make an environment with these packages and return its folder of programs."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    install = ("-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(folder / "bin" / "python", *install, *packages, cwd=folder.parent)
    return folder / "bin"


def check_contents(wheel: Path) -> None:
    """Refuse a wheel that lacks the types' mark or brings more than the package, or whose page has links to nowhere."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    if "mpiad/py.typed" not in names:
        raise SystemExit(f"{wheel.name} has no mpiad/py.typed: type checkers would take the package for an untyped one")
    if others := sorted({name.split("/")[0] for name in names if not re.match(r"mpiad(-[^/]*\.dist-info)?/", name)}):
        raise SystemExit(f"{wheel.name} would install {others} beside mpiad")
    if nowhere := RELATIVE_LINK.findall(metadata.partition("\n\n")[2]):
        raise SystemExit(f"{wheel.name}: links of the README that an index can't follow: {nowhere}")


def commands_of_recipes() -> list[str]:
    """Return the test commands of the conda recipe and the Spack package."""
    recipe = yaml.safe_load((ROOT / "distribution" / "conda" / "recipe.yaml").read_text())
    tree = ast.parse((ROOT / "distribution" / "spack" / "package.py").read_text())
    (modules,) = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and node.targets[0].id == "import_modules"
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    commands = [f"python -c 'import {name}'" for name in ast.literal_eval(modules)]
    commands += [
        shlex.join(["python", *map(ast.literal_eval, c.args)]) for c in calls if getattr(c.func, "id", "") == "python"
    ]
    for test in recipe["tests"]:
        commands += [f"python -c 'import {name}'" for name in test.get("python", {}).get("imports", [])]
        commands += test.get("script", [])
    return list(dict.fromkeys(commands))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--extras", default="mpich", help="extras that are installed with the wheel")
    parser.add_argument("--dist", type=Path, help="a folder to which the distributions are copied")
    options = parser.parse_args()
    extras = options.extras
    with tempfile.TemporaryDirectory(prefix="mpiad-wheel-") as name:
        place = Path(name)
        shutil.copytree(ROOT, place / "tree", ignore=LEFT_OUT)
        tools = environment(place / "tools", "build", "twine")
        run(tools / "python", "-m", "build", "--outdir", place / "dist", cwd=place / "tree")
        built = sorted((place / "dist").iterdir())
        run(tools / "python", "-m", "twine", "check", "--strict", *built, cwd=place)
        (wheel,) = [path for path in built if path.suffix == ".whl"]
        (source,) = [path for path in built if path.name.endswith(".tar.gz")]
        check_contents(wheel)
        fresh = environment(place / "fresh", f"{wheel}[{extras}]")
        run(fresh / "mpiexec", "-n", "2", fresh / "python", "-m", "mpiad", cwd=place, seconds=120)
        (place / "gradient.py").write_text(PROGRAM)
        run(fresh / "mpiexec", "-n", "2", fresh / "python", "gradient.py", cwd=place, seconds=120)
        # What the conda recipe and the Spack package test, in an environment of the source distribution.
        from_source = environment(place / "source", f"{source}[{extras}]")
        for command in commands_of_recipes():
            program, *arguments = shlex.split(command)
            run(from_source / program, *arguments, cwd=place, seconds=120)
        if options.dist is not None:
            shutil.copytree(place / "dist", options.dist, dirs_exist_ok=True)
    print(f"built, checked and run: {', '.join(path.name for path in built)}")


if __name__ == "__main__":
    main()
