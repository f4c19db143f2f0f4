"""Draw random programs with Hypothesis.

A list of programs is drawn in one process and then run on all ranks: no rank may draw while others wait for it. The same
seed and count always give the same list. A program that fails is made smaller in `simplifying`: Hypothesis would start
the ranks anew for each program that it tries.
"""

import hypothesis
from hypothesis import strategies as st
from programs import steps
from programs.arithmetic import FORMS

SHORTEST, LONGEST = 5, 24
"""Hypothesis's lists are not much longer than they must be; what fails is made smaller later."""

SETTINGS = {
    "database": None,
    "derandomize": False,
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
}

REGISTER = st.integers(0, 2)
PART = st.sampled_from([3, 3, 2, -1, 0])
ROOT = st.integers(0, 3)
TAG = st.sampled_from([0, 0, 1, 2, 3])
GROUP = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 4])
DELAY = st.integers(0, 3)
AXIS = st.sampled_from([0, None, 1, -1])
MESSAGE = st.sampled_from(["send", "isend"]), st.sampled_from(["recv", "irecv"])


def each(size, item):
    """Return a strategy for one item for each rank."""
    return st.tuples(*[item] * size)


def registers(*names):
    return dict.fromkeys(names, REGISTER)


def messages(partner):
    return st.builds(
        steps.Message, *MESSAGE, **registers("a", "out"), source=ROOT, dest=ROOT, tag=TAG, late=DELAY,
        waits=st.tuples(DELAY, DELAY), used=st.booleans(), dropped=st.sampled_from([False, False, False, True]),
        partner=partner, group=GROUP,
    )  # fmt: skip


def twins(size):
    """Return a strategy for two messages under way together, between the same ranks and under the same tag."""

    def both(first, out, waits):
        first = first._replace(send="isend", recv="irecv", late=0, dest=first.source + 1)
        return first, steps.Local(first.a, out, first.a, (1,) * size), first._replace(out=out, waits=waits)

    return st.builds(both, messages(st.just("rank")), REGISTER, st.tuples(DELAY, DELAY))


def kinds_of_step(size):
    """Return the strategies of all kinds of step."""
    lengths = each(size, st.integers(0, steps.LENGTH))
    place = {"root": ROOT, "group": GROUP}
    three, two = registers("a", "b", "out"), registers("a", "out")
    return [
        st.builds(steps.Local, **three, forms=each(size, st.integers(0, len(FORMS) - 1))),
        st.builds(
            steps.Combine, st.sampled_from(["allreduce", "reduce"]), st.sampled_from(["SUM", "PROD", "MAX", "MIN"]),
            **three, **place, part=PART, twist=st.booleans(),
        ),
        st.builds(
            steps.Combine, st.sampled_from(["bcast", "sum", "scan", "exscan"]), st.just("SUM"),
            **three, **place, part=PART, twist=st.booleans(),
        ),
        st.builds(steps.Gather, st.sampled_from(["gather", "allgather"]), **three, **place, axis=AXIS, lengths=lengths),
        st.builds(
            steps.Scatter, st.sampled_from(["scatter", "reduce_scatter"]), **three, **place, axis=AXIS,
            lengths=st.none() | lengths,
        ),
        st.builds(
            steps.Transpose, **three, part=PART, group=GROUP, blocks=st.sampled_from(["equal", "learned", "given"])
        ),
        st.builds(
            steps.Exchange, **three, shift=st.integers(0, 3), both=st.booleans(), silent=each(size, st.booleans()), tag=TAG,
            group=GROUP,
        ),
        st.builds(steps.Pair, **two, source=ROOT, dest=ROOT, tag=TAG, group=GROUP),
        messages(st.sampled_from(["rank", "rank", "rank", "rank", "any", "none"])),
        st.builds(steps.Start, **two, part=PART, waits=each(size, DELAY), group=GROUP),
        st.builds(
            steps.Integers,
            st.sampled_from(["SUM", "MAX", "BXOR", "bcast", "exscan", "ring", "gather", "iallreduce"]),
            **two, values=each(size, st.integers(0, 5)), **place,
        ),
        st.builds(steps.Barrier, GROUP),
        st.builds(steps.Inner, **three, objective=st.sampled_from(["root", "sum", "mean"]), **place),
    ]  # fmt: skip


def kinds_that_fall_back(size):
    """Return the strategies of operators that communicate inside, and of what leaves a trace, here and there."""
    some = each(size, st.sampled_from([False, False, True]))
    most, three = each(size, st.sampled_from([True, True, False])), registers("a", "b", "out")
    loops = st.builds(
        steps.Loop, **three, count=st.integers(2, 4), checkpoints=st.sampled_from([None, 1, 2, 3, 4]), decides=some,
        used=most, group=GROUP,
    )  # fmt: skip
    return [
        loops, loops.map(lambda step: step._replace(decides=(False,) * size)),
        st.builds(steps.Solve, st.sampled_from(["solve", "newton"]), **three, used=most, group=GROUP),
        st.builds(steps.Operator, st.sampled_from(["halo", "total"]), **registers("a", "out"), used=most),
        st.builds(steps.Ragged, **three, decides=some, group=GROUP),
        decisions(size),
    ]  # fmt: skip


def decisions(size):
    return st.builds(steps.Decide, REGISTER, each(size, st.sampled_from(["on", "on", "forwards", "backwards"])))


@st.composite
def programs(draw, size, falling_back=False):
    """Return a strategy for programs of `size` ranks; `falling_back`: a rank that is compiled leaves a trace."""
    kinds = kinds_of_step(size) + (kinds_that_fall_back(size) * 2 if falling_back else [])
    # Reductions and messages again, as strategies of their own (Hypothesis drops one that it has): they have the most
    # variants, and messages overlap with each other.
    kind = st.one_of(
        *[each.map(lambda step: (step,)) for each in [*kinds, *kinds[1:3], *kinds[6:10]]], *[twins(size) for _ in range(3)]
    )
    objective, root = draw(st.sampled_from(["root", "sum", "mean"])), draw(st.integers(0, size - 1))
    losses = [draw(st.sampled_from(["all", "all", "all", "all", "constant", "none"])) for _ in range(size)]
    if objective != "root":
        losses = ["constant" if kind == "none" else kind for kind in losses]
    elif losses[root] == "none":
        losses[root] = "all"
    drawn_steps = tuple(step for some in draw(st.lists(kind, min_size=SHORTEST, max_size=LONGEST)) for step in some)
    if falling_back:
        # An even rank, which is compiled in each way.
        left = draw(decisions(size).filter(lambda step: set(step.kinds[::2]) != {"on"}))
        place = draw(st.integers(0, len(drawn_steps)))
        drawn_steps = (*drawn_steps[:place], left, *drawn_steps[place:])
    return steps.Program(
        size=size, seed=draw(st.integers(0, 99)), single=draw(st.sampled_from([False, False, True])),
        complex_input=draw(st.sampled_from([False, False, True])),
        complex_registers=draw(st.sampled_from(
            [(False,) * 3, (False,) * 3, (False, False, True), (True, False, False), (True,) * 3]
        )),
        objective=objective, root=root, shared=draw(st.booleans()), losses=tuple(losses),
        second=draw(st.sampled_from(["hvp", "reverse", "forward"])), waitall=draw(st.booleans()),
        steps=drawn_steps,
    )  # fmt: skip


def drawn(size, count, seed, compiled=("none",), falling_back=False):
    """Return a list of programs, which are `compiled` in turn; `falling_back` as in `programs`."""
    found = []

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, phases=[hypothesis.Phase.generate], **SETTINGS)
    @hypothesis.given(programs(size, falling_back))
    def draw(program):
        found.append(program._replace(compiled=compiled[len(found) % len(compiled)]))

    draw()
    return found
