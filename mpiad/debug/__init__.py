"""What finds mistakes: checks that ranks agree, and reports of what they are and do."""

from mpiad.debug.replicated import assert_replicated

__all__ = ["assert_replicated"]
