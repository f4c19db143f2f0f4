"""The lock file of a checkout's environment holds what setup.cfg asks for, on each Python and for each choice of MPI."""

import configparser
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[1]
LOCK = ROOT / ".ci" / "requirements.lock"
LOCKED = ("mpich", "openmpi", "plot", "test", "dev", "docs")  # not CuPy
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def entries(text):
    """The pinned requirements in a lock file's text, each with the number of its hashes."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    pinned = [line.split(" --hash=") for line in lines if line and not line.lstrip().startswith("#")]
    return [(Requirement(requirement.strip()), len(hashes)) for requirement, *hashes in pinned]


def required():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split()
    for extra in LOCKED:
        lines += setup["options.extras_require"][extra].split()
    lines += ["setuptools>=64", "cython>=3"]  # build mpiad, and mpi4py for a system's MPI
    return [requirement for requirement in map(Requirement, lines) if requirement.name != "mpiad"]


def the_environment():
    found = importlib.util.spec_from_file_location("environment", ROOT / ".ci" / "environment.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("python", PYTHONS)
def test_each_requirement_has_one_version_with_hashes(python, platform):
    here = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.4",
        "sys_platform": platform,
    }
    locked = entries(LOCK.read_text())
    for wanted in required():
        found = [
            (requirement, hashes)
            for requirement, hashes in locked
            if requirement.name == canonicalize_name(wanted.name)
            and (requirement.marker is None or requirement.marker.evaluate(here))
        ]
        assert len(found) == 1, (wanted, found)
        ((requirement, hashes),) = found
        (pin,) = requirement.specifier
        assert pin.operator == "==" and wanted.specifier.contains(pin.version), (wanted, requirement)
        assert hashes, requirement


def test_it_names_no_index():
    text = LOCK.read_text()
    assert all(re.match(r"[a-z0-9]|#| +#| +--hash=sha256:[0-9a-f]{64}( \\)?$", line) for line in text.splitlines())
    assert "://" not in text


@pytest.mark.parametrize("extras", [("plot",), ("test",), ("dev",), ("docs",)], ids="-".join)
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_an_environment_takes_what_its_packages_need_and_one_mpi(extras, mpi):
    """Compared with what the installed packages say that they need."""
    environment = the_environment()
    text = environment.locked(environment.requirements(extras).keys() | {mpi})
    names = {requirement.name for requirement, _ in entries(text)}
    assert names & {"mpich", "openmpi"} == {mpi}
    assert ("pytest" in names) == (extras in [("test",), ("dev",)])
    looked_at = 0
    for name in names:
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = [need for need in map(Requirement, needs) if need.marker is None or need.marker.evaluate({"extra": ""})]
        assert {canonicalize_name(need.name) for need in needs} <= names, name
        looked_at += 1
    assert looked_at >= 10


def test_a_package_that_the_lock_file_lacks_is_named():
    with pytest.raises(SystemExit, match="lacks no-such-package: `make lock`"):
        the_environment().locked({"numpy", "no-such-package"})


def test_the_oldest_versions_are_the_lower_bounds_of_setup_cfg():
    environment = the_environment()
    stated = environment.requirements(["mpich", "openmpi", "amg", "fft", "arviz", "plot", "test"])
    lines = environment.in_versions(stated, "oldest").split()
    assert len(lines) == len(stated) >= 15 and {"mpi4py", "numpy", "scipy", "autograd", "llvmlite"} <= stated.keys()
    for line in lines:
        oldest = Requirement(line)
        (pin,) = oldest.specifier
        bounds = Requirement(stated[oldest.name]).specifier
        (lowest,) = [bound.version for bound in bounds if bound.operator == ">="]
        assert pin.operator == "==" and pin.version == lowest and bounds.contains(pin.version)
