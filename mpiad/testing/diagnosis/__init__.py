"""`diagnose`: find the operations of a program whose adjoints are wrong."""

from mpiad.testing.diagnosis.diagnose import Diagnosis, diagnose
from mpiad.testing.diagnosis.record import WrongAdjoint

__all__ = ["Diagnosis", "WrongAdjoint", "diagnose"]
__dir__ = __all__.copy
