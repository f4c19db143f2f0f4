"""Fingerprints of arguments."""

import hashlib

import numpy as np
import pytest

from mpiad.transport.core.agreement import fingerprint

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("n", [3, 10_000])
def test_all_bytes_of_texts_and_arrays_are_hashed(n):
    """Checkpoints store fingerprints, so those of long arrays are hashes as well."""
    array = np.random.default_rng(n).normal(size=n)
    digest = hashlib.blake2b(b"a text" + array.tobytes(), digest_size=8).digest()
    assert fingerprint("a text", array) == int.from_bytes(digest, "little", signed=True)
