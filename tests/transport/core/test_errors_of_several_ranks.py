"""What ranks raise together where several have found something wrong, each something else."""

import pytest

from mpiad.errors import RemoteError
from mpiad.transport import channel
from mpiad.transport.core.agreement import agreed_among, error_of, failures_among, forget_agreement, raise_together


class Missing(IndexError):
    """Of a kind that no other rank need know."""


def test_each_raises_its_own_and_the_others_that_of_the_first(rank, size):
    used = channel(None, "test")
    own = Missing(f"on rank {rank}") if rank else None
    if size == 1:
        raise_together(used, own)
        return
    with pytest.raises(IndexError) as found:
        raise_together(used, own)
    assert found.value is own if rank else found.type is IndexError
    assert str(found.value) == (f"on rank {rank}" if rank else "on rank 1 (raised on rank 1)")
    assert agreed_among(found.value) == set(range(size))
    forget_agreement(found.value)
    assert not agreed_among(found.value)


@pytest.mark.also_on(2)  # where only one fails
def test_the_first_is_shown_and_the_others_are_counted(rank, size):
    if size == 1:
        return
    failures = failures_among(channel(None, "test").data, SystemExit(rank + 2) if rank else None)
    error = error_of(failures, "call", RemoteError)
    others = f" (and {size - 2} more)" if size > 2 else ""
    assert str(error).startswith(f"call: rank 1{others} raised SystemExit: 3\n")
    assert (error.rank, error.exit_code) == (1, 3)
