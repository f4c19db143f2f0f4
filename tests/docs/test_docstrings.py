"""The examples in docstrings do what stands below them, on any number of ranks."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import autograd.numpy as np
import pytest

import mpiad
from mpiad.transport.watch import switch, watch_settings

ROOT = Path(__file__).parents[2]
MODULES = (
    "mpiad", "mpiad.debug", "mpiad.device", "mpiad.differentiation", "mpiad.ensemble", "mpiad.errors", "mpiad.extend",
    "mpiad.fft", "mpiad.inverse", "mpiad.linalg", "mpiad.optimize", "mpiad.parallel", "mpiad.programs",
    "mpiad.pytrees", "mpiad.redistribution", "mpiad.tasks", "mpiad.testing", "mpiad.timestepping", "mpiad.vi",
)  # fmt: skip
if find_spec("jax") and find_spec("torch"):  # in the environment of `make recipes`
    MODULES += ("mpiad.interop",)
WITHOUT = {
    "mpiad.mpi_finalize": "ends MPI for all tests that follow",
    "mpiad.mpi_print": "writes what all ranks say to the standard output of the root",
    "mpiad.debug.Environment": "is shown by `environment`, which takes a second",
    "mpiad.device.ArrayModule": "is written once for each kind of device arrays",
    "mpiad.device.register_arrays": "takes such a module",
    "mpiad.device.select": "needs a GPU",
    "mpiad.device.to_device": "needs a GPU",
    "mpiad.ensemble.EnsembleGPU": "needs a GPU",
    "mpiad.errors.CommunicationMismatchError": "needs MPIAD_DEBUG=1 and several ranks; docs/faults.md shows it",
    "mpiad.errors.DeadlockError": "needs MPIAD_TIMEOUT and several ranks; docs/faults.md shows it",
    "mpiad.errors.MessageMismatchError": "needs MPIAD_DEBUG=1 and several ranks; docs/faults.md shows it",
    "mpiad.errors.RemoteError": "needs another rank that fails; docs/faults.md shows it",
    "mpiad.errors.UnfinishedMessagesError": "needs messages that are left under way; docs/sharp_bits.md shows it",
    "mpiad.extend.Argument": "is the common part of `Input`, `Output` and others",
    "mpiad.extend.Communicator": "needs a library that communicates; docs/howto/fortran_c.md shows it",
    "mpiad.extend.Cotangent": "needs a library with an adjoint; docs/howto/fortran_c.md shows it",
    "mpiad.extend.InOut": "is shown by docs/howto/fortran_c.md",
    "mpiad.extend.InPlace": "is what compiled programs ask of the library's own halo exchange",
    "mpiad.extend.Input": "is shown by docs/howto/fortran_c.md",
    "mpiad.extend.Library": "is shown by `library`",
    "mpiad.extend.LibraryFunction": "is shown by `library`",
    "mpiad.extend.Output": "is shown by `library`",
    "mpiad.extend.Tangent": "needs a library with a tangent; docs/howto/fortran_c.md shows it",
    "mpiad.extend.Value": "is shown by `library`",
}


def public() -> Iterator[tuple[str, object]]:
    """Yield the public functions, classes and methods, by name."""
    for place in map(import_module, MODULES):
        for name in place.__all__:
            thing = getattr(place, name)
            if callable(thing):
                yield f"{place.__name__}.{name}", thing
            if inspect.isclass(thing):
                for method, value in inspect.getmembers(thing, inspect.isfunction):
                    yield f"{place.__name__}.{name}.{method}", value


PUBLIC = dict(public())
EXAMPLES = {name: thing for name, thing in PUBLIC.items() if ">>>" in (inspect.getdoc(thing) or "")}
# Under one name each: what two modules offer, and what a class has from another, is run once.
ONCE = {id(thing): name for name, thing in reversed(EXAMPLES.items())}


@pytest.mark.parametrize("name", sorted(ONCE.values()))
def test_an_example_does_what_it_shows(name):
    names = {"np": np, "mpiad": mpiad}
    text = inspect.getdoc(EXAMPLES[name]) or ""
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    said, before = [], watch_settings.present()
    failed = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=said.append).failed
    switch.restore(before)  # `mpiad.debug.watch` lasts until the end of a program
    assert not failed, "".join(said)


@pytest.mark.serial
def test_public_names_have_an_example_or_a_reason():
    """Methods are shown by their classes."""
    names = {name for name in PUBLIC if name.rpartition(".")[0] in MODULES}
    assert sorted(names - set(EXAMPLES)) == sorted(WITHOUT)
    for name, reason in WITHOUT.items():
        for page in re.findall(r"docs/[\w/]+\.md", reason):
            assert name.rpartition(".")[2] in (ROOT / page).read_text(), f"{page} doesn't show {name}"
