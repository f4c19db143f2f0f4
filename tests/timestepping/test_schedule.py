"""What the schedules keep and run again, counted, against the least that is possible."""

import functools
import itertools
import math

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.timestepping import CheckpointSchedule, scan
from mpiad.timestepping.checkpoints import Advance, Keep, Restore, Reverse, actions
from mpiad.timestepping.scan import Loop
from mpiad.timestepping.stepping import UserStepping

pytestmark = pytest.mark.serial


@functools.lru_cache(None)
def fewest(steps, kept):
    """Return how many steps are run and, with these, states kept at the least, behind the first state that is kept."""
    if steps <= 1:
        return 0, 0
    if kept == 1:
        return steps * (steps - 1) // 2, 0
    found = [(k, fewest(steps - k, kept - 1), fewest(k, kept)) for k in range(1, steps)]
    return min((k + a[0] + b[0], (steps - k > 1) + a[1] + b[1]) for k, a, b in found)


def least(steps, kept):
    """Return how many steps are run at the least to reverse `steps` with `kept` states, the first one among them."""
    return fewest(steps, kept)[0]


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 23])
@pytest.mark.parametrize("memory, disk", [(1, 0), (2, 0), (3, 0), (1, 2), (0, 2), (22, 0), (40, 0), (5, 40)])
def test_schedules_reverse_each_step_once_with_the_least_work(steps, memory, disk):
    at, advanced, backwards, kept = 0, 0, steps, {}
    for action in actions(steps, CheckpointSchedule(memory, disk)):
        if isinstance(action, Keep):
            assert action.number == at
            kept[at] = action.on_disk
            assert sum(kept.values()) <= disk
            assert len(kept) - sum(kept.values()) <= memory
        elif isinstance(action, Advance):
            assert action.first == at < action.stop
            advanced, at = advanced + action.stop - action.first, action.stop
        elif isinstance(action, Restore):
            at = action.number
            assert at in kept
            if action.last:
                del kept[at]
        else:
            assert isinstance(action, Reverse)
            assert action.first == at
            assert action.stop == backwards
            backwards = at
    assert backwards == 0
    assert not kept
    assert advanced == least(steps, memory + disk)


@pytest.mark.parametrize("kept", [1, 2, 3, 5, 9, 30])
def test_schedules_run_and_keep_as_few_as_can_be(kept):
    """Against a search of all schedules, and for longer loops the closed form r n - β(s + 1, r - 1)."""
    for steps in [*range(1, 45), 333, 1000]:
        found = list(actions(steps, CheckpointSchedule(kept)))
        advanced = sum(action.stop - action.first for action in found if isinstance(action, Advance))
        states = min(kept, steps - 1) or 1
        repeats = next(r for r in range(steps + 1) if math.comb(states + r, r) >= steps)
        assert advanced == repeats * steps - math.comb(states + repeats, states + 1)
        if 1 < steps < 45:
            written = sum(isinstance(action, Keep) for action in found)
            assert (advanced, written - 1) == fewest(steps, states)


@pytest.mark.parametrize("steps, memory, disk", [(23, 2, 3), (40, 3, 2), (40, 1, 4), (12, 4, 4)])
def test_states_on_disk_are_those_that_cost_the_least(steps, memory, disk):
    """Against all choices of the places in the stack of kept states."""
    costs, stack, found = [0] * (memory + disk), [], 0
    for action in actions(steps, CheckpointSchedule(memory, disk)):
        if isinstance(action, Keep):
            stack.append(action.on_disk)
        if isinstance(action, (Keep, Restore)):
            costs[len(stack) - 1] += 1
            found += stack[-1]
        if isinstance(action, Restore) and action.last:
            stack.pop()
    assert found == min(map(sum, itertools.combinations(costs, disk)))


@pytest.mark.parametrize("steps, kept, plain", [
    (20, CheckpointSchedule(4, recorded=5), 15 + 5), (23, CheckpointSchedule(5, recorded=5), 20 + 3),
    (9, CheckpointSchedule(1, recorded=20), 9),
])  # fmt: skip
@pytest.mark.interpreted
def test_blocks_that_are_recorded_together_are_run_twice_only(steps, kept, plain):
    """As many states as blocks: nothing is run again but with its record."""
    calls = {"plain": 0, "traced": 0}

    def advance(u, k, c):
        calls["plain" if mpiad.stop_gradient(u) is u else "traced"] += 1
        return u * c + anp.sin(u) * k

    found = mpiad.grad(lambda c: scan(advance, 1.0, steps, c, checkpoints=kept))(0.3)
    assert calls == {"plain": plain, "traced": steps}
    assert found == pytest.approx(mpiad.grad(lambda c: scan(advance, 1.0, steps, c))(0.3), rel=1e-13)


@pytest.mark.parametrize("steps, length", [(20, 5), (23, 4), (7, 3)])
def test_schedules_of_blocks_count_their_states_in_steps(steps, length):
    at, blocks = 0, []
    for action in actions(steps, CheckpointSchedule(2, recorded=length)):
        if isinstance(action, (Keep, Restore)):
            assert action.number % length == 0
            at = action.number if isinstance(action, Restore) else at
            assert action.number == at
        else:
            assert action.first == at
            at = action.stop
        if isinstance(action, Reverse):
            blocks.append((action.first, action.stop))
    assert blocks == [(k, min(k + length, steps)) for k in reversed(range(0, steps, length))]


@pytest.mark.parametrize("steps, kept", [(20, 1), (20, 4), (20, 19), (20, 20), (1, 1)])
@pytest.mark.interpreted
def test_steps_are_called_as_often_as_the_schedule_says(steps, kept):
    calls = {"plain": 0, "traced": 0}

    def advance(u, k, c):
        calls["plain" if mpiad.stop_gradient(u) is u else "traced"] += 1
        return u * c + k

    mpiad.grad(lambda c: scan(advance, 1.0, steps, c, checkpoints=CheckpointSchedule(kept)))(0.9)
    # The last step once more: its value is needed before its derivative.
    assert calls == {"plain": least(steps, kept) + 1, "traced": steps}


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.interpreted
def test_products_with_a_kept_jacobian_run_the_steps_once(kept):
    """No way back for J v; around it the loop has its second derivative all the same."""
    calls = []

    def cubic(c):
        return scan(lambda u, k, c: calls.append(k) or u * c + k, 1.0, 3, c, checkpoints=kept)  # c³ + c + 2

    linear = mpiad.linearize(cubic)(0.5)
    assert linear.jvp(2.0) == 2.0 * (3.0 * 0.5**2 + 1.0)
    calls.clear()
    assert linear.jvp(1.0) == 3.0 * 0.5**2 + 1.0
    assert calls == [0, 1, 2]
    assert mpiad.grad(lambda c: mpiad.linearize(cubic)(c).jvp(1.0))(0.5) == 6.0 * 0.5


@pytest.mark.parametrize("kept, most", [(3, 3), (CheckpointSchedule(2, 4), 2)])
def test_states_in_memory_stay_within_their_number(monkeypatch, kept, most):
    seen = []
    from mpiad.timestepping import snapshots

    keep = snapshots.Snapshots.keep

    def noted(self, *args):
        keep(self, *args)
        seen.append(len(self._memory))

    monkeypatch.setattr(snapshots.Snapshots, "keep", noted)
    value = mpiad.grad(lambda c: anp.sum(scan(lambda u, k, c: anp.sin(u * c), np.ones(4), 30, c, checkpoints=kept)))(0.9)
    assert np.isfinite(value)
    assert max(seen) == most


def test_loops_return_their_memory_with_the_gradient():
    """What a loop keeps is used up by its gradient, and a second one runs it again."""
    loops = []
    forwards = Loop.forwards

    def noted(self, *args):
        loops.append(self)
        return forwards(self, *args)

    Loop.forwards = noted
    try:
        pull, _ = mpiad.make_vjp(lambda c: scan(lambda u, k, c: u * c, 1.0, 9, c, checkpoints=3))(0.9)
    finally:
        Loop.forwards = forwards
    assert loops[0]._stored is not None
    first = pull(1.0)
    assert loops[0]._stored is None
    assert pull(1.0) == first == pytest.approx(9 * 0.9**8)


@pytest.mark.parametrize(
    "steps, kept, recorded", [(50, 4, 4), (90, 20, 5), (20, 20, 1), (20, 19, 1), (7, 1, 1), (40, 8, 5)]
)
@pytest.mark.interpreted
def test_a_number_of_checkpoints_is_also_the_number_of_steps_recorded_together(caplog, monkeypatch, steps, kept, recorded):
    """At most as many steps as states are recorded at a time, and no more than fill the gaps between the states."""
    monkeypatch.setattr(UserStepping, "keeps_values", False)  # the forward run would be traced, too
    calls, caplog_level = [], caplog.at_level("INFO", "mpiad")

    def advance(u, k, c):
        calls.append((mpiad.stop_gradient(u) is not u, k))
        return u * c + anp.sin(u) * k

    with caplog_level:
        found = mpiad.grad(lambda c: scan(advance, 1.0, steps, c, checkpoints=kept))(0.3)
    traced = [k for is_traced, k in calls if is_traced]
    starts = [k for k, before in zip(traced, [None, *traced]) if before is None or k != before + 1]
    assert starts == list(range(0, steps, recorded))[::-1]
    # Blocks of steps are scheduled like steps; the last block runs in the forward pass, too.
    blocks, rest = -(-steps // recorded), steps % recorded or recorded
    assert len(calls) - steps == least(blocks, kept) * recorded + rest
    assert f"recomputes {len(calls) - steps} steps" in caplog.text
    assert found == pytest.approx(mpiad.grad(lambda c: scan(advance, 1.0, steps, c))(0.3), rel=1e-12)
