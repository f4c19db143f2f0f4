"""Smaller programs than one that fails, to be tried in this order.

All that are smaller by one change are run in one job, up to the first that fails too; from there it begins again.
"""

PLAINER = {"isend": "send", "irecv": "recv", "any": "rank", "none": "all", "constant": "all", "MIN": "SUM", "MAX": "SUM"}
PLAINER |= {"learned": "equal", "given": "equal"}


def simpler(program):
    """Return programs that are smaller by one change, the smallest first; before them those of one step, all else plain."""
    plain = {
        "losses": ("all",) * program.size, "complex_registers": (False,) * 3, "complex_input": False, "single": False,
        "shared": False, "waitall": False, "second": "hvp", "objective": "sum", "seed": 0,
        "compiled": "none",
    }  # fmt: skip
    # Mostly one step matters, or else the steps alone: one job finds that, in place of one for each change.
    found = [program._replace(**plain, steps=(plainest(step),)) for step in program.steps]
    found += [program._replace(steps=steps) for steps in shorter(program.steps)]
    found.append(program._replace(**plain, steps=tuple(map(plainest, program.steps))))
    found.append(program._replace(**plain))
    found += [program._replace(**{name: value}) for name, value in plain.items()]
    for place, step in enumerate(program.steps):
        for plainer in plainer_steps(step):
            found.append(program._replace(steps=(*program.steps[:place], plainer, *program.steps[place + 1 :])))
    return [candidate for candidate in dict.fromkeys(found) if candidate != program]


def shorter(steps):
    """Return the lists without a stretch of steps, the longest stretches first."""
    length = len(steps)
    while length:
        for start in range(0, len(steps), length):
            yield steps[:start] + steps[start + length :]
        length //= 2


def plainer_steps(step):
    """Yield the step with one of its fields at its simplest."""
    for name, value in zip(step._fields, plainest(step)):
        if value != getattr(step, name):
            yield step._replace(**{name: value})


def plainest(step):
    """Return the step with all of its fields at their simplest."""
    found = step._replace(**{name: simplest(value) for name, value in zip(step._fields, step)})
    if "part" in step._fields:
        found = found._replace(part=3)
    if getattr(step, "lengths", None) is not None:
        found = found._replace(lengths=(2,) * len(step.lengths))
    return found


def simplest(value):
    if isinstance(value, tuple):
        return tuple(map(simplest, value))
    if isinstance(value, str):
        return PLAINER.get(value, value)
    return type(value)() if isinstance(value, (bool, int)) else value
