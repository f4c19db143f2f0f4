"""What the tests of compiled programs have in common."""

import pytest


@pytest.fixture(autouse=True)
def _every_rank_warns(monkeypatch):
    """Of five ranks and more some leave a warning to others; here it is looked for on each."""
    monkeypatch.setattr("mpiad.transport.world.logs_for_others", lambda rank, size: True)
