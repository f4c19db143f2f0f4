"""What finds mistakes: checks that ranks agree, and reports of what they are and do."""

from mpiad.debug.environment import Environment, environment
from mpiad.debug.replicated import assert_replicated

__all__ = ["Environment", "assert_replicated", "environment"]
