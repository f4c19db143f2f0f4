"""How a condition leaves its root after an affect, in a lane of a kernel: the lines of `root_departure`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpiad.compiling.source import indented
from mpiad.ensemble.outcome import ReturnCode
from mpiad.ensemble.root_departure import AHEAD, AHEAD_OF_SHORT, AT_ONCE, AT_ROOT, LEAST_AHEAD, OF_WAY, SHORT_PIECE

if TYPE_CHECKING:
    from mpiad.ensemble.compiled.lane_output import LaneOutput


def distance_ahead() -> list[str]:
    """Return lines on how far `ahead` to look, by how long the last event is ago, `gone`, and how long tspan is, `span`."""
    return [
        f"ahead = {LEAST_AHEAD!r} * span",
        "if gone > 0.0:",
        f"    ahead = min({AHEAD_OF_SHORT!r} * gone, max({AHEAD!r} * gone, ahead))",
    ]


def departure(output: LaneOutput, e: int) -> list[str]:
    """Return lines on how condition e, which was `was` before the affect, goes on from the state u at the time t.

    They shorten the next step, keep the side on which the condition is `left`, and make the `code` of what is back at once.
    """
    at, form, steps = output.at, output.form, output.steps
    components, direction = range(form.d), form.events[e][1]

    returns = f"side * bend < 0.0{f' and side * {direction}.0 < 0.0' if direction else ''}"
    at_root = [
        "side = 1.0 if rise > 0.0 else (-1.0 if rise < 0.0 else (-1.0 if bend > 0.0 else (1.0 if bend < 0.0 else 0.0)))",
        *([f"left{e} = side"] if e in form.sided else []),
        f"if {returns}:",
        "    back = -ahead * rise / bend",
        # Of fixed steps each is as long as all are.
        *([f"    {at('next')} = min({at('next')}, 0.25 * back)"] if output.error is not None else []),
        f"    if back <= {AT_ONCE!r} * span and (rise == 0.0 or gone <= {SHORT_PIECE!r} * span):",
        f"        code = {ReturnCode.Zeno.code}",
    ]
    return [
        steps.called(steps.state("k0"), "f", "u", "t"),
        "later = t + sign * ahead",
        *[f"k0_{c} = sign * k0_{c}" for c in components],
        *[f"y_{c} = u_{c} + ahead * k0_{c}" for c in components],
        steps.condition(e, "now_", "u", "t"),
        steps.condition(e, "then", "y", "later"),
        steps.called(steps.state("k1"), "f", "y", "later"),
        *[f"y_{c} = u_{c} + 0.5 * ahead * (k0_{c} + sign * k1_{c})" for c in components],
        steps.condition(e, "there", "y", "later"),
        "rise = then - now_",
        "bend = there - then",
        f"if abs(now_) <= max({AT_ROOT!r} * abs(was), {OF_WAY!r} * abs(rise * gone / ahead)):",
        *indented(at_root),
    ]
