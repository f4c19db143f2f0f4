# autograd has no types; what is taken from it is checked at run time alone.
from typing import Any

def __getattr__(name: str) -> Any: ...
