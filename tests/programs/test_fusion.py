"""What is one loop, what is copied, and what memory it takes: counted on programs whose best schedule is known."""

import gc
import time
import tracemalloc

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.domain import Domain
from mpiad.programs.fusion import Loop, Run, root_of
from mpiad.programs.memory_plan import allocate

pytestmark = pytest.mark.serial


def replays_of(fun, *args):
    """Return what runs a function: of its only signature."""
    jitted = mpiad.jit(fun, strict=True)
    for _ in range(2):
        np.testing.assert_allclose(jitted(*args), fun(*args), rtol=1e-12, atol=1e-13)
    (entry,) = jitted._cache.entries.values()
    return entry.replays


def counts(replays):
    """Return the numbers of loops, of calls, and of arrays that are copied."""
    steps = replays.schedule.steps
    loops = [step for step in steps if isinstance(step, Loop)]
    copies = [item for step in loops for item in step.items if item.copies]
    return len(loops), len(steps) - len(loops), len(copies)


U = np.random.default_rng(3).standard_normal((40, 30))


def laplacian(u):
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]


def test_a_stencil_in_slices_is_one_loop():
    replays = replays_of(lambda u: 0.5 * anp.sin(laplacian(u)) + u[1:-1, 1:-1] ** 2, U)
    assert counts(replays) == (1, 0, 0)
    (text,) = replays.texts
    assert len(text.buffers) == 2 and len(text.written) == 1


def test_the_edges_of_what_is_put_together_are_part_of_the_loop():
    replays = replays_of(lambda u: anp.pad(laplacian(u), 1, "constant") + anp.roll(u, 1, axis=0), U)
    assert counts(replays) == (1, 0, 0)


@pytest.mark.parametrize("join", [anp.concatenate, anp.stack], ids=["concatenate", "stack"])
def test_a_join_of_many_arrays_is_stored_part_by_part(join):
    def fun(u):
        fields = [u]
        for _ in range(11):
            fields.append(0.5 * fields[-1] + anp.sin(u))
        return anp.sum(join(fields) ** 2)

    texts = [text for text in replays_of(fun, U).texts if text is not None]
    assert all(len(text.boxes) == text.divisible for text in texts)  # none computes all parts of an entry and chooses one


def fluxes(r, m, e):
    v = m / r
    p = 0.4 * (e - 0.5 * m * v)
    return (m, m * v + p, (e + p) * v), anp.abs(v) + anp.sqrt(1.4 * p / r)


def euler_step(state):
    state = [anp.concatenate([q[-1:], q, q[:1]]) for q in state]
    f, speed = fluxes(*state)
    largest = anp.maximum(speed[1:], speed[:-1])
    f = [0.5 * (x[1:] + x[:-1]) - 0.5 * largest * (q[1:] - q[:-1]) for x, q in zip(f, state)]
    return [q[1:-1] - 0.01 * (x[1:] - x[:-1]) for q, x in zip(state, f)]


def test_alike_steps_have_the_same_kernels_in_forward_and_reverse_passes():
    def kernels(count):
        def loss(r):
            state = [r, 0.1 * r, 2.5 + 0 * r]
            for _ in range(count):
                state = euler_step(state)
            return anp.sum(anp.tanh(state[0]) ** 2)

        texts = [text for text in replays_of(mpiad.grad(loss), 1 + U[0] / 20).texts if text is not None]
        assert len(texts) > 2 * count
        return len({text.text for text in texts})

    assert kernels(9) == kernels(5)


@pytest.mark.parametrize("shape", [(8, 8, 8), (6, 20), (8, 8)])
def test_padded_stencils_have_as_many_operations_on_few_cells_as_on_many(shape):
    def smoothed(u):
        axes = range(u.ndim)
        for _ in range(3):
            w, inside = anp.pad(u, 1, mode="wrap"), [slice(1, -1)] * u.ndim
            shifted = [(slice(2, None), slice(None, -2))] * u.ndim
            near = [w[tuple(inside[:k]) + (part,) + tuple(inside[k + 1 :])] for k in axes for part in shifted[k]]
            u = u + 0.1 * anp.tanh(sum(near) - 2 * u.ndim * w[tuple(inside)])
        return u

    def operations(shape):
        fun = lambda u, shape=shape: smoothed(u)  # noqa: E731 (another function for each shape)
        replays = replays_of(fun, np.random.default_rng(1).standard_normal(shape))
        return len(replays.schedule.needed), counts(replays)

    assert operations(shape) == operations(tuple([n + 9 for n in shape]))


def test_a_reshaped_view_is_stored_once():
    replays = replays_of(lambda u: mpiad.mpi_allreduce(anp.reshape(anp.transpose(anp.sin(u)), (-1,))), U)
    assert counts(replays) == (1, 1, 0)
    assert [len(step.items) for step in replays.schedule.steps if isinstance(step, Loop)] == [1]


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reduction", [anp.sum, anp.prod, anp.max, anp.mean])
def test_reductions_of_stacked_arrays_are_elementwise(axis, reduction):
    replays = replays_of(lambda u: anp.sqrt(reduction(anp.stack([u * u, u**2 + 1, 2 + u], axis) ** 2, axis)), U)
    assert counts(replays) == (1, 0, 0)
    (text,) = replays.texts
    assert len(text.buffers) == 2


@pytest.mark.unguarded
@pytest.mark.parametrize("mode", ["edge", "reflect", "symmetric", "wrap"])
def test_padding_by_own_elements_is_part_of_the_loop(mode):
    for fun in (lambda u: laplacian(anp.pad(u, 1, mode)), lambda u: anp.pad(u, ((2, 9), (0, 3)), mode) * 2):
        replays = replays_of(fun, U)
        assert counts(replays)[1:] == (0, 0)
    # The call shares the value.
    assert counts(replays_of(mpiad.grad(lambda u: anp.sum(laplacian(anp.pad(u, 1, mode)) ** 2)), U))[1] == 1
    # A loop for each of many parts would take long to compile.
    assert counts(replays_of(lambda u: anp.pad(u[:2], 50, mode) * 2, U))[1] == (mode != "edge")


@pytest.mark.unguarded
def test_gradients_along_axes_are_part_of_the_loop():
    def diffusion(u):
        first = anp.gradient(anp.gradient(u, 0.5, axis=0, edge_order=2), axis=0)
        return u + 0.1 * (first + anp.gradient(anp.gradient(u, np.arange(30.0) ** 2, axis=1), axis=1))

    for fun in (diffusion, lambda u: sum(anp.gradient(u))):
        assert counts(replays_of(fun, U))[1] == 0
    assert counts(replays_of(mpiad.grad(lambda u: anp.sum(diffusion(u) ** 2)), U))[1] == 1  # the call shares the value


def test_sums_end_the_loop_that_computes_what_they_add():
    replays = replays_of(lambda u: anp.sum(laplacian(u) ** 2) + anp.max(laplacian(u)), U)
    loops, calls, copies = counts(replays)
    assert (loops, calls, copies) in ((1, 0, 0), (2, 0, 0))  # the second one adds two numbers
    assert not [b for b in replays.allocations if np.prod(replays.schedule.buffers[b].shape) > 1]  # no array is kept


def test_a_field_is_computed_into_the_buffer_of_its_exchange():
    domain = Domain((40, 30), halo=1, periodic=True)

    def step(u):
        v = domain.exchange(u * 1.01)
        w = domain.exchange(u * 1.01 + 0.1 * laplacian(v))
        return w[1:-1, 1:-1] + 0.1 * laplacian(w)

    replays = replays_of(step, U)
    loops, calls, copies = counts(replays)
    assert (loops, calls, copies) == (3, 2, 0)
    assert all(step.in_place for step in replays.schedule.steps if isinstance(step, Run))


@pytest.mark.unguarded
def test_the_operands_of_several_exchanges_are_computed_in_one_loop():
    domain = Domain(U.shape, halo=1, periodic=True)

    def step(u, v):
        a, b = domain.exchange(u), domain.exchange(v)
        return u + 0.1 * laplacian(a) * v, v - 0.1 * laplacian(b) * u

    replays = replays_of(lambda u, v: step(*step(u, v)), U, U[::-1])
    loops, calls, copies = counts(replays)
    # One loop copies both arguments to the buffers of their exchanges, and one computes the results of each step.
    assert (loops, calls, copies) == (3, 4, 2)


@pytest.mark.parametrize("shape", [(4, 4), (5, 5), (6, 4)])
def test_a_part_of_an_exchanged_field_is_read_before_the_other_parts_are_stored(shape):
    """The part is a join itself; in small blocks it is stored, and the other parts depend on it."""
    domain, (u, v) = Domain(shape, halo=1, periodic=(False, True)), np.random.default_rng(0).random((2, *shape))
    is_open = np.ones(shape)
    is_open[-1] = 0.0

    def spread(p):
        return p[1:-1, 2:] + p[1:-1, :-2] + p[2:, 1:-1] + p[:-2, 1:-1] - 4 * p[1:-1, 1:-1]

    def step(u, v):
        up, vp = domain.exchange([u, v], boundary="edge")
        east, north = u * (v + vp[1:-1, 2:]) / 2, v * (u + up[2:, 1:-1]) / 2
        spin = (vp[1:-1, 2:] - v - up[2:, 1:-1] + u) / (v + 3)
        fe, fn, q = domain.exchange([east, north, spin], boundary="zero")
        new_v = -(spin * (east + fe[2:, 1:-1]) + q[1:-1, :-2] * (fe[1:-1, :-2] + fe[2:, :-2])) / 4
        new_u = spin * (north + fn[1:-1, 2:]) + q[:-2, 1:-1] * (fn[:-2, 1:-1] + fn[:-2, 2:])
        u, v = u + new_u, (v + new_v) * is_open
        up, vp = domain.exchange([u, v], boundary="edge")
        return anp.sum((u + spread(up)) ** 2) + anp.sum(((v + spread(vp)) * is_open) ** 3)

    direction, h = np.random.default_rng(1).standard_normal(shape), 1e-5
    slope = (step(u + h * direction, v) - step(u - h * direction, v)) / (2 * h)
    found = mpiad.grad(mpiad.jit(step, strict=True))(u, v)
    np.testing.assert_allclose(np.sum(found * direction), slope, rtol=1e-7)


@pytest.mark.unguarded
def test_the_reverse_pass_of_a_stencil_reads_at_mirrored_places():
    """No array of zeros is scattered into: a loop for the value, one for the gradient; the call shares the value."""
    replays = replays_of(mpiad.grad(lambda u: anp.sum(anp.sin(laplacian(u)))), U)
    loops, calls, copies = counts(replays)
    assert calls <= 1 and copies == 0 and loops <= 3
    large = [b for b in replays.allocations if np.prod(replays.schedule.buffers[b].shape) > 1]
    assert len(large) <= 1  # the cotangent, which five places read


@pytest.mark.parametrize("place", ["in", "around"], ids=["jit of the gradient", "gradient of jit"])
def test_each_step_of_an_unrolled_loop_reads_as_many_arrays_backwards(place):
    """The cotangent of a state is stored once per step: to sum it anew, a step would read the arrays of all later steps."""

    def neighbors(u):
        return anp.roll(u, 1, 0) + anp.roll(u, -1, 0) + anp.roll(u, 1, 1) + anp.roll(u, -1, 1)

    def loss(u, v):
        for _ in range(12):
            u, v = u + 0.1 * neighbors(u) - u * v**2, v + 0.05 * neighbors(v) + u * v**2
        return anp.sum(u**2) + anp.sum(anp.sin(v))

    states = 0.3 * U, 0.2 * U[::-1]
    (_, expected), jitted = mpiad.value_and_grad(loss, (0, 1))(*states), mpiad.jit(loss, strict=True)
    compiled = mpiad.jit(mpiad.value_and_grad(loss, (0, 1)), strict=True)
    for _ in range(2):
        found = compiled(*states) if place == "in" else mpiad.value_and_grad(jitted, (0, 1))(*states)
        np.testing.assert_allclose(found[1], expected, rtol=1e-11, atol=1e-11)
    caches = (jitted, *jitted._derived.values()) if place == "around" else (compiled,)
    (replays,) = [entry.replays for each in caches for entry in each._cache.entries.values() if entry is not None]
    reads = [len({b for b, _ in text.loads}) for text in replays.texts if text is not None]
    assert len(reads) >= 2 * 12 and max(reads) <= 12
    assert len({text.text for text in replays.texts if text is not None}) <= 8  # alike steps have one kernel


@pytest.mark.few(1)
@pytest.mark.unguarded
@pytest.mark.parametrize("count", [9, 27])
def test_cotangents_of_components_are_joined(count):
    """Components of a stacked field are read at several places: no loop per place adds to the cotangent of the field."""
    f, v = np.random.default_rng(count).uniform(1.0, 2.0, (2, count, 7, 6))

    def loss(f):
        total = sum(f[q] for q in range(count))
        mean = sum((q + 1.0) * f[q] for q in range(count)) / total
        return anp.sum(anp.stack([anp.sin(f[q]) * mean - total for q in range(count)]) ** 2)

    first = replays_of(mpiad.grad(loss), f)
    second = replays_of(lambda f, v: mpiad.hvp(loss)(f, v)[1], f, v)
    for replays in (first, second):
        loops, calls, copies = counts(replays)
        assert loops <= 5 and calls <= 2 and copies == 0


def test_messages_stay_in_the_order_of_the_source():
    """Also those that nobody reads, between calls that could run earlier."""

    def fun(x):
        mpiad.mpi_allreduce(x)
        y = anp.sort(x)
        z = mpiad.mpi_bcast(x * 2)
        mpiad.mpi_barrier()
        mpiad.mpi_scan(y)
        return mpiad.mpi_exchange(z + y, 0, 0)

    replays = replays_of(fun, U[0])
    nodes = replays.schedule.program.nodes
    made = [nodes[step.node].data.fun.__name__ for step in replays.schedule.steps if isinstance(step, Run)]
    messages = [name for name in made if name != "sort"]
    assert messages == ["mpi_allreduce", "mpi_bcast", "mpi_barrier", "mpi_scan", "mpi_exchange"]
    assert made.index("sort") < made.index("mpi_scan")


@pytest.mark.thorough
def test_compiling_takes_time_linear_in_the_number_of_communications():
    def seconds(count):
        def fun(x):
            for _ in range(count):
                x = mpiad.mpi_exchange(1.0001 * x, mpiad.mpi_rank(), mpiad.mpi_rank())
            return anp.sum(x**2)

        program = mpiad.value_and_grad(mpiad.jit(fun, strict=True))
        gc.collect()
        start = time.process_time()
        program(np.ones(2))
        return time.process_time() - start

    gc.disable()  # its passes over all that the test session holds would be measured too
    try:
        for _ in range(3):  # the machine's speed may change between
            few, many = min(seconds(125), seconds(125)), seconds(1500)
            if many / few < 20:
                break
    finally:
        gc.enable()
    assert many / few < 20, f"1,500 communications took {many:.2f} s, 125 took {few:.2f} s"


def test_buffers_that_are_live_at_once_share_no_memory():
    """By the steps that read and write them; and memory is used again where they aren't."""

    def fun(x):
        for k in range(6):
            x = anp.sin(anp.cumsum(anp.cumsum(x * (k + 1.5), axis=0), axis=1)) + anp.roll(x, k, axis=1)
        return x

    forward = replays_of(fun, U)
    jitted = mpiad.jit(lambda u: anp.sum(fun(anp.sin(u)) ** 2), strict=True)
    mpiad.grad(jitted)(U)
    (entry,) = jitted._cache.entries.values()
    for replays in (forward, entry.replays):
        schedule = replays.schedule
        allocations, *sizes = allocate(schedule, replays.uses)
        ends = {}
        spans = {}
        for at, (step, text) in enumerate(zip(schedule.steps, replays.texts)):
            for b in step.inputs if text is None else text.buffers:
                spans.setdefault(root_of(schedule.buffers, b), []).append(at)
        for b in allocations:
            is_scratch, start, pitch = allocations[b]
            shape = schedule.buffers[b].shape
            assert pitch >= shape[-1] if shape else pitch == 1
            ends[b] = start + int(np.prod(shape[:-1])) * pitch * schedule.buffers[b].dtype.itemsize
            assert 0 <= start <= ends[b] <= sizes[is_scratch]
        for b in allocations:
            for c in allocations:
                apart = ends[b] <= allocations[c].start or ends[c] <= allocations[b].start
                if b < c and allocations[b].is_scratch == allocations[c].is_scratch and not apart:
                    first, second = sorted((spans[b], spans[c]))
                    assert max(first) < min(second)
                    # What the later part reads may be read again, when other arguments have been here.
                    assert schedule.part(min(first)) == schedule.part(max(first))
    assert len({allocation[:2] for allocation in allocations.values()}) < len(allocations)


def test_the_listing_names_lines_loops_and_messages():
    def fun(u):
        total = mpiad.mpi_allreduce(anp.sum(u * u))
        return laplacian(u) * total

    jitted = mpiad.jit(fun)
    text = str(jitted.program(U))
    first = fun.__code__.co_firstlineno
    (message,) = [line for line in text.split("\n") if line.startswith("mpi_allreduce")]
    assert message.endswith(f"test_fusion.py:{first + 1} in fun")
    assert f"test_fusion.py:{laplacian.__code__.co_firstlineno + 1} in laplacian" in text
    assert "loop over [38, 28]" in text and f"reads {38 * 28 * 8 + 8} bytes, writes {38 * 28 * 8}" in text
    with pytest.raises(TypeError, match="isn't compiled for these arguments"):
        mpiad.jit(lambda x: x * float(x[0])).program(U[0])


def peak(call):
    tracemalloc.start()
    call()
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken


def test_replays_that_wait_for_their_reverse_pass_share_the_rest_of_their_memory():
    """Each step keeps what its reverse pass reads; the gradient takes no more than the interpreted one."""
    domain, start = Domain((160, 150), periodic=True), np.random.default_rng(4).standard_normal((160, 150))

    def step(u):
        v = domain.exchange(u * anp.cos(u))
        w = domain.exchange(v[2:, 1:-1] * v[:-2, 1:-1])
        return u + 0.1 * (w[1:-1, 2:] - w[1:-1, :-2])

    def after(step, steps):
        def loss(u):
            for _ in range(steps):
                u = step(u)
            return anp.sum(u * u)

        return mpiad.value_and_grad(loss)

    jitted, taken = mpiad.jit(step, strict=True), {}
    for steps in (1, 4, 12):
        fast, slow = after(jitted, steps), after(step, steps)
        for u in (start, start / 2):  # traced, then compiled
            np.testing.assert_allclose(fast(u)[1], slow(u)[1], rtol=1e-11, atol=1e-12)
        fresh = after(mpiad.jit(step, strict=True), steps)
        fresh(start)
        taken[steps] = peak(lambda f=fresh: f(start)), peak(lambda f=slow: f(start))
    assert taken[12][0] < taken[12][1]
    # What a further step takes is less than the first one's with its scratch memory.
    assert (taken[12][0] - taken[4][0]) / 8 < 0.8 * taken[1][0]


def test_reverse_passes_in_another_order_than_their_forward_passes():
    jitted = mpiad.jit(lambda u: laplacian(anp.sin(u) * laplacian(anp.pad(u, 1, "constant"))), strict=True)
    plain = lambda u: laplacian(anp.sin(u) * laplacian(anp.pad(u, 1, "constant")))  # noqa: E731
    g = np.cos(np.arange(38 * 28.0)).reshape(38, 28)
    expected = [mpiad.make_vjp(plain)(U * k)[0](g) for k in range(1, 4)]
    mpiad.make_vjp(jitted)(U)[0](g)
    pulls = [mpiad.make_vjp(jitted)(U * k)[0] for k in range(1, 4)]
    for k in (1, 0, 2, 1):
        np.testing.assert_allclose(pulls[k](g), expected[k], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [np.int64, np.int32, bool, np.float32, np.float64])
def test_a_field_times_a_constant_matrix_of_any_numbers_is_a_product_of_matrices(kind):
    velocities = np.array([[0, 1, 0, 1, 1], [0, 0, 1, 1, 0]]).astype(kind)
    field = np.random.default_rng(2).standard_normal((4, 3, 2))

    def loss(u):
        return anp.sum(anp.dot(u, velocities) ** 2 + u @ velocities)

    jitted = mpiad.jit(loss, strict=True)
    product = np.sum([field[..., k, None] * velocities[k] for k in range(2)], axis=0)
    gradient = np.sum((2.0 * product + 1.0)[..., None, :] * velocities.astype(float), axis=-1)
    np.testing.assert_allclose([jitted(field) for _ in range(2)], np.sum(product**2 + product), rtol=1e-14)
    np.testing.assert_allclose(mpiad.grad(jitted)(field), gradient, rtol=1e-13, atol=1e-14)
    listing = str(jitted.program(field))
    assert listing.count("= matmul(") == 2 and "dot(" not in listing
