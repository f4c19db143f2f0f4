"""Debugging tools: checks that ranks agree, and reports on the environment and the communication of all ranks."""

from mpiad.debug.checked import assert_replicated, checked, watch
from mpiad.debug.environment import Environment, environment
from mpiad.debug.recording import recorded, traced
from mpiad.debug.report import Report, Row, report

__all__ = ["Environment", "Report", "Row", "assert_replicated", "checked", "environment", "recorded", "report"]
__all__ += ["traced", "watch"]
__dir__ = __all__.copy
