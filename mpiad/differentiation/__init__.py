"""The ordered tape, and the functions that compute derivatives with it."""

from mpiad.differentiation.gradient import grad, value_and_grad
from mpiad.differentiation.jacobian import hessian, jacobian
from mpiad.differentiation.products import (
    Linearization,
    SecondOrder,
    hvp,
    jvp,
    linearize,
    make_hvp,
    make_jvp,
    make_vjp,
)
from mpiad.differentiation.segment_sum import segment_sum

__all__ = ["Linearization", "SecondOrder", "grad", "hessian", "hvp", "jacobian", "jvp"]
__all__ += ["linearize", "make_hvp", "make_jvp", "make_vjp", "segment_sum", "value_and_grad"]
__dir__ = __all__.copy
