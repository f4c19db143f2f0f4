"""SciPy's methods by their names, and what must be known of each."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Method", "is_sharded", "method_named"]

_SHARDED = "L-BFGS-sharded", "Newton-CG-sharded"


class Method(NamedTuple):
    """What must be known of a method of SciPy.

    Attributes
    ----------
    name : str
        SciPy's name.
    together : bool
        Whether its line search wants the gradient at every point at which it wants the value.
    products : bool
        Whether it uses Hessian products.
    knows_maxfun : bool
        Whether it has an option of this name.
    bounded : bool
        Whether it takes bounds.
    constrained : bool
        Whether it takes constraints.
    """

    name: str
    together: bool
    products: bool
    knows_maxfun: bool = False
    bounded: bool = False
    constrained: bool = False


_METHODS = {
    "l-bfgs": Method("L-BFGS-B", True, False, True, bounded=True),
    "l-bfgs-b": Method("L-BFGS-B", True, False, True, bounded=True),
    "bfgs": Method("BFGS", True, False),
    "cg": Method("CG", True, False),
    "tnc": Method("TNC", True, False, True, bounded=True),
    "slsqp": Method("SLSQP", False, False, bounded=True, constrained=True),
    "newton-cg": Method("Newton-CG", False, True),
    "trust-ncg": Method("trust-ncg", False, True),
    "trust-krylov": Method("trust-krylov", False, True),
    "trust-constr": Method("trust-constr", False, True, bounded=True, constrained=True),
}


def method_named(name: object) -> Method:
    """Return the method of a name, in any case.

    Raises
    ------
    ValueError
        Where there is none of this name.
    """
    found = _METHODS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        names = ", ".join(repr(method.name) for key, method in _METHODS.items() if key != "l-bfgs")
        sharded = ", ".join(map(repr, _SHARDED))
        raise ValueError(f"minimize: method must be 'L-BFGS', {sharded} or one of {names}, but got {name!r}.")
    return found


def is_sharded(name: object) -> bool:
    """Return whether a method of this name leaves the variables on their ranks; it isn't one of SciPy's.

    Raises
    ------
    ValueError
        Where there is none of this name.
    """
    if isinstance(name, str) and name.lower() in map(str.lower, _SHARDED):
        return True
    method_named(name)
    return False
