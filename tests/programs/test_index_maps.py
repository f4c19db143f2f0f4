"""Index maps against NumPy's own indexing, by brute force."""

import itertools

import numpy as np
import pytest

from mpiad.programs.array_program import (
    broadcast,
    composed,
    identity,
    inverse,
    is_identity,
    of_view,
    shifted,
    without_memory,
)

pytestmark = pytest.mark.serial


def read(whole, map, shape):
    """Return what a map reads of an array."""
    made = np.empty(shape)
    for place in itertools.product(*map_ranges(shape)):
        made[place] = whole[tuple([a.offset + (a.stride * place[a.source] if a.source is not None else 0) for a in map])]
    return made


def of_key(shape, key):
    """Return the map of a basic index, and the shape of the result."""
    whole = without_memory(tuple(shape))
    part = whole[(*key, ...)]
    return of_view(whole, part), part.shape


def map_ranges(shape):
    return [range(n) for n in shape]


def a_key(rng, shape):
    """Return a random basic index in full."""
    key = []
    for n in shape:
        if rng.random() < 0.2:
            key.append(None)
        kind = rng.integers(4)
        if kind == 0:
            key.append(int(rng.integers(-n, n)))
        elif kind == 1:
            key.append(slice(None))
        else:
            start, stop = rng.integers(-n - 1, n + 2, 2).tolist()
            key.append(slice(start, stop, int(rng.choice([-3, -2, -1, 1, 2, 3]))))
    return key


def test_keys_and_chains_of_keys(rng):
    nonempty = 0
    for _ in range(400):
        whole = rng.standard_normal(rng.integers(1, 6, rng.integers(1, 4)))
        first = a_key(rng, whole.shape)
        map, shape = of_key(whole.shape, first)
        part = whole[tuple(first)]
        assert shape == part.shape
        np.testing.assert_array_equal(read(whole, map, shape), part)
        if not part.size or not part.ndim:
            continue
        nonempty += 1
        second = a_key(rng, shape)
        outer, made = of_key(shape, second)
        np.testing.assert_array_equal(read(whole, composed(map, outer), made), part[tuple(second)])
        order = rng.permutation(part.ndim)
        turned = tuple([a._replace(source=int(np.flatnonzero(order == k)[0])) for k, a in enumerate(identity(part.ndim))])
        np.testing.assert_array_equal(
            read(whole, composed(map, turned), part.transpose(order).shape), part.transpose(order)
        )
    assert nonempty > 100


def test_broadcasting(rng):
    for shape, made in [((3,), (2, 3)), ((1, 3), (4, 3)), ((2, 1), (2, 5)), ((), (2, 2)), ((1,), (1, 1)), ((1,), (1,))]:
        whole = rng.standard_normal(shape)
        np.testing.assert_array_equal(read(whole, broadcast(shape, made), made), np.broadcast_to(whole, made))


def test_inverses(rng):
    """Where all of an array is read, in whatever order of its axes; nothing else has one."""
    found = 0
    for _ in range(300):
        whole = rng.standard_normal(rng.choice([1, 2, 3], rng.integers(1, 4)))
        key = a_key(rng, whole.shape)
        map, shape = of_key(whole.shape, key)
        back = inverse(map, whole.shape, shape)
        part = whole[tuple(key)]
        if back is None:
            assert part.size != whole.size or any(isinstance(k, slice) and k.step not in (None, 1) for k in key)
            continue
        found += 1
        np.testing.assert_array_equal(read(part, back, whole.shape), whole)
    assert found > 20


def test_identity_and_shift(rng):
    whole = rng.standard_normal((3, 1, 4))
    assert is_identity(identity(3), (3, 1, 4), (3, 1, 4))
    assert not is_identity(identity(3), (3, 1, 4), (3, 1, 3))
    turned = of_key((3, 1, 4), [slice(None, None, -1), slice(None), slice(None)])[0]
    assert not is_identity(turned, (3, 1, 4), (3, 1, 4))
    np.testing.assert_array_equal(read(whole, shifted(identity(3), 2, 1), (3, 1, 3)), whole[..., 1:])
