"""Kernels' texts as templates, from which those of one form are generated.

A template is the text of a kernel, in the kernel language or in C, with these placeholders:

- ``@name``, alone on a line: the lines of this name.
- ``{name}``: a text or a number; ``{name+other}``, ``{name-1}`` a sum of numbers.
- ``each name:``: the text that follows on the line, or the more indented lines below it, for each value of `name`.
- ``when name:``, ``when not name:``: the text that follows likewise, under this condition.

``$name``, ``$name[0, 1]`` are fields of lanes, whose places are filled in last: see `Fields.placed`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.jumps import LEAST, UNRESOLVED
from mpiad.ensemble.outcome import ReturnCode

if TYPE_CHECKING:
    from mpiad.ensemble.compiled.kernel_form import Form
    from mpiad.ensemble.compiled.step_text import Steps

_NAME = re.compile(r"\{(\w+)(?:([+-])(\w+))?\}")


def names_of(form: Form, steps: Steps) -> dict[str, Any]:
    """Return the names that templates of all kernels use: the fields of the form, and these."""
    return {
        **form._asdict(), **{code.name: code.code for code in ReturnCode}, "least_error": LEAST_ERROR,
        "real": form.dtype.name,
        # Components of states, parameters per trajectory and shared, those with respect to which an adjoint is taken.
        "c": range(form.d), "p": range(form.varying), "s": range(form.shared),
        "own": range(form.wanted_varying), "common": range(form.wanted_shared),
        # Directions of tangents, events, stages; the numbers of the first two.
        "j": range(len(form.directions)), "e": range(len(form.events)), "i": range(form.stages + 1),
        "m": len(form.directions), "count": len(form.events), "last": form.stages, "used": steps.used(),
        "tolerance": range(len(form.numbers) if form.tolerances else 1), "room": steps.room,
        "adaptive": form.tableau.error is not None, "remembers": form.remembers, "acts": form.acts,
        "affected": form.affects is not None, "least_value": LEAST, "unresolved": UNRESOLVED,
    }  # fmt: skip


def filled(template: str, names: Mapping[str, Any]) -> list[str]:
    """Return the lines of a template."""
    return _filled(textwrap.dedent(template).strip("\n").splitlines(), names)


def _filled(lines: list[str], names: Mapping[str, Any]) -> list[str]:
    made, n = [], 0
    while n < len(lines):
        line, depth = lines[n], _depth(lines[n])
        word, _, rest = line.strip().partition(" ")
        n += 1
        if word in ("each", "when"):
            name, _, same = rest.partition(":")
            body = [" " * depth + same.strip()] if same else []
            while line.endswith(":") and n < len(lines) and _depth(lines[n]) > depth:
                body.append(lines[n] if same else lines[n][4:])
                n += 1
            if word == "each":
                made += [one for value in names[name] for one in _filled(body, {**names, name: value})]
            elif bool(names[name.removeprefix("not ")]) != name.startswith("not "):
                made += _filled(body, names)
        elif word.startswith("@"):
            made += [" " * depth + one for one in names[word[1:]]]
        else:
            made.append(_NAME.sub(lambda found: _value(found, names), line) if "{" in line else line)
    return made


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _value(found: re.Match[str], names: Mapping[str, Any]) -> str:
    value, sign, other = names[found[1]], found[2], found[3]
    if sign:
        other = int(other) if other.isdigit() else names[other]
        value = value + other if sign == "+" else value - other
    return str(value)
