"""Functions of JAX and PyTorch in mpiad's programs, and driven functions in programs of JAX and PyTorch.

A function of another framework becomes one step of the tape. An `_Operator` is such a function of flat arrays, with its
adjoint and its tangent. These are functions of the same framework, so derivatives of higher order are operators as well. A
`_Call` is one call of an operator; in reverse mode it stores what the framework has kept for the adjoint.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from autograd.core import VJPNode
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import isbox

from mpiad._typing import Array, Function, Shape, Tree
from mpiad.differentiation.concatenation import Concatenation
from mpiad.optimize.drive import DrivenFunction
from mpiad.optional_packages import optional_package
from mpiad.primitives.cotangents import conform, conformed, spec_like
from mpiad.programs.signature import arguments_of
from mpiad.programs.traced_array import TracedArray
from mpiad.pytrees import flatten, refuse_objects
from mpiad.transport.core.tracing import opaque

__all__ = ["from_jax", "from_torch", "to_jax", "to_torch"]

_inside = ContextVar("inside", default="")  # the name of the framework whose program waits for a driven function


def from_jax(fun: Function) -> Function:
    """Turn a function of JAX into a function of NumPy arrays that mpiad differentiates.

    Parameters
    ----------
    fun : callable
        A function of pytrees (dicts, lists and tuples) of arrays and numbers, that JAX can compile (`jax.jit`) and
        differentiate. It returns a pytree of floating-point or complex arrays. Strings, booleans and None are constants of
        the compiled program.

    Returns
    -------
    callable
        A function of pytrees of NumPy arrays and numbers with the same structure. The arrays of the result are read-only.

    Raises
    ------
    ImportError
        If JAX isn't installed.
    TypeError
        If an argument is a 64-bit number or array while JAX's 64-bit mode is off, an array on a device, or an object; if a
        result isn't a floating-point or complex array on the CPU.
    RuntimeError
        If the function is called while a program of JAX waits for a driven function (see `to_jax`).

    Ranks
    -----
    Each rank for itself: the function must not communicate.

    Adjoint
    -------
    `jax.vjp` of `fun`, and in forward mode `jax.jvp`, compiled, for derivatives of any order. Cotangents aren't conjugated,
    in JAX as in mpiad. In `mpiad.jit`, a call is one step, which isn't fused with others.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpiad.interop import from_jax
    >>> norm = from_jax(lambda x: jnp.sqrt(jnp.sum(x**2)))
    >>> print(mpiad.grad(norm)(np.array([3.0, 4.0], np.float32)))
    [0.6 0.8]
    """
    return _imported(_jax(), fun, "from_jax")


def from_torch(fun: Function) -> Function:
    """Turn a function of PyTorch into a function of NumPy arrays that mpiad differentiates.

    Parameters
    ----------
    fun : callable
        A function of pytrees (dicts, lists and tuples) of tensors and numbers that `torch.func` can differentiate. It
        returns a pytree of floating-point or complex tensors, and must not change its arguments in place. Parameters of a
        module are constants; to differentiate with respect to them, pass them as an argument, and call the module by
        `torch.func.functional_call`.

    Returns
    -------
    callable
        A function of pytrees of NumPy arrays and numbers with the same structure. Arguments and results share the memory
        of the tensors, unless an argument is read-only or not contiguous.

    Raises
    ------
    ImportError
        If PyTorch isn't installed.
    TypeError
        If an argument is an array on a device or an object; if a result isn't a floating-point or complex tensor on the
        CPU.
    RuntimeError
        If `fun` changes an argument in place.

    Ranks
    -----
    Each rank for itself: the function must not communicate.

    Adjoint
    -------
    `torch.func.vjp` of `fun`, and in forward mode `torch.func.jvp`, for derivatives of any order that they support.
    PyTorch's cotangents are conjugated; mpiad's aren't. In `mpiad.jit`, a call is one step, which isn't fused with others.

    Examples
    --------
    >>> import torch
    >>> from mpiad.interop import from_torch
    >>> norm = from_torch(torch.linalg.norm)
    >>> print(mpiad.grad(norm)(np.array([3.0, 4.0])))
    [0.6 0.8]
    """
    return _imported(_torch(), fun, "from_torch")


def to_jax(f: DrivenFunction, shape: Shape = ()) -> Function:
    """Turn a driven function into a function of JAX with a derivative in reverse mode.

    Parameters
    ----------
    f : mpiad.optimize.DrivenFunction
        A function that `mpiad.drive` passes to its program.
    shape : tuple of int
        The shape of the values of f, () for numbers.

    Returns
    -------
    callable
        A function of a pytree of floating-point arrays, which `jax.jit`, `jax.grad`, `jax.vjp` and, one point after the
        other, `jax.vmap` transform. f computes with 64 bits; the result has the dtype of the first array.

    Raises
    ------
    TypeError
        If f isn't a driven function. All ranks would have to call a function that communicates the same number of times and
        in the same order, but JAX may drop, repeat or reorder calls.

    Ranks
    -----
    The root only, in the program of `mpiad.drive`. If an evaluation fails, JAX raises an error, which ends the program.

    Adjoint
    -------
    ``f.value_and_gradient``, or ``f.vjp`` for arrays; there is no derivative in forward mode or of second order.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> def program(f):
    ...     return jax.jit(jax.grad(mpiad.interop.to_jax(f)))(jnp.array([1.0, 2.0]))
    >>> print(mpiad.mpi_bcast(np.asarray(mpiad.drive(program, lambda x: np.sum(x**2)))))
    [2. 4.]
    """
    _check_driven(f, "to_jax")
    jax = _jax().module
    tree_map = jax.tree_util.tree_map

    def called(method: Function, specs: Any, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            with _waiting("JAX"):
                found = method(*tree_map(lambda x: np.asarray(x, float), args))
            return tree_map(lambda spec, x: np.asarray(x, spec.dtype), specs, found)

        return jax.pure_callback(run, specs, *args, vmap_method="sequential")

    def value_of(x: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jax.tree_util.tree_leaves(x)[0].dtype)

    @jax.custom_vjp
    def driven(x: Any) -> Any:
        return called(f, value_of(x), x)

    def forward(x: Any) -> tuple[Any, Any]:
        if shape:
            return driven(x), x
        return called(f.value_and_gradient, (value_of(x), x), x)

    def backward(kept: Any, g: Any) -> tuple[Any]:
        return (called(f.vjp, kept, kept, g) if shape else tree_map(lambda gradient: g * gradient, kept),)

    driven.defvjp(forward, backward)
    return driven


def to_torch(f: DrivenFunction) -> Function:
    """Turn a driven function into a function of PyTorch with a derivative in reverse mode.

    Parameters
    ----------
    f : mpiad.optimize.DrivenFunction
        A function that `mpiad.drive` passes to its program.

    Returns
    -------
    callable
        A function of a pytree (dicts, lists and tuples) of floating-point tensors, which `torch.autograd` differentiates. f
        computes with 64 bits on the CPU; the result has the dtype and the device of the first tensor.

    Raises
    ------
    TypeError
        If f isn't a driven function (see `to_jax`).

    Ranks
    -----
    The root only, in the program of `mpiad.drive`.

    Adjoint
    -------
    ``f.gradient``, or ``f.vjp`` for arrays; there is no derivative in forward mode or of second order.

    Examples
    --------
    >>> import torch
    >>> def program(f):
    ...     x = torch.tensor([1.0, 2.0], requires_grad=True)
    ...     mpiad.interop.to_torch(f)(x).backward()
    ...     return x.grad.numpy()
    >>> print(mpiad.mpi_bcast(mpiad.drive(program, lambda x: np.sum(x**2))))
    [2. 4.]
    """
    _check_driven(f, "to_torch")
    torch = _torch().module

    def like(values: Any, x: Any) -> Any:
        return torch.as_tensor(np.asarray(values), dtype=x.dtype, device=x.device)

    class Driven(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, build: Function, *leaves: Any) -> Any:
            ctx.save_for_backward(*leaves)
            ctx.x = build([leaf.detach().double().cpu().numpy() for leaf in leaves])[0][0]
            return like(f(ctx.x), leaves[0])

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Any) -> tuple[Any, ...]:
            w = g.double().cpu().numpy()
            found = f.vjp(ctx.x, w) if w.ndim else f.gradient(ctx.x)
            parts = [like(part, x) for part, x in zip(flatten(found)[0], ctx.saved_tensors)]
            return None, *(parts if w.ndim else [g * part for part in parts])

    def driven(x: Any) -> Any:
        given = arguments_of((x,), {})
        return Driven.apply(given.build, *given.leaves)

    return driven


def _check_driven(f: Any, call: str) -> None:
    if not isinstance(f, DrivenFunction):
        raise TypeError(
            f"{call}: expected a driven function, but got {type(f).__name__} {f!r:.60}. Other frameworks may drop, "
            "repeat or reorder calls, and then a function that communicates deadlocks. Pass the function to mpiad.drive, "
            "and convert the driven function that its program receives."
        )


@contextmanager
def _waiting(framework: str) -> Iterator[None]:
    token = _inside.set(framework)
    try:
        yield
    finally:
        _inside.reset(token)


def _imported(framework: Any, fun: Function, call: str) -> Function:
    if not callable(fun):
        raise TypeError(f"{call}: expected a function, but got {type(fun).__name__} {fun!r:.60}.")
    name = f"{call}({getattr(fun, '__name__', type(fun).__name__)})"
    return opaque(_Imported(framework, fun, name))


class _Imported:
    """A function of another framework, called with NumPy arrays."""

    def __init__(self, framework: Any, fun: Function, name: str):
        self._framework, self._fun, self.__name__ = framework, fun, name
        self._operators: dict[Hashable, _Operator] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        if _inside.get() == "JAX" == self._framework.name:
            raise RuntimeError(
                f"{self.__name__} was called in a driven function that a program of JAX waits for (see to_jax). JAX may "
                "wait forever for a function that it runs in such a call. Use a program of another framework, or call the "
                "driven function's own methods."
            )
        given = arguments_of(args, kwargs)
        leaves = [np.asarray(leaf) if isinstance(leaf, TracedArray) else leaf for leaf in given.leaves]
        if len(given.traced) < len(leaves):
            refuse_objects(given.build(leaves), "an argument", self.__name__)
        variables = tuple(place for place in given.traced if isbox(leaves[place]))
        dynamic = tuple(place for place in given.traced if place not in variables)
        static = {place: leaf for place, leaf in enumerate(leaves) if place not in given.traced}
        key = given.form, variables, dynamic, tuple((type(leaf), leaf) for leaf in static.values())
        operator = self._operators.get(key)
        if operator is None:
            fun, build = self._fun, given.build

            def flat(natives: Sequence[Any], constants: Sequence[Any]) -> Tree:
                found = {**static, **dict(zip(variables, natives)), **dict(zip(dynamic, constants))}
                args, kwargs = build([found[place] for place in range(len(found))])
                return fun(*args, **kwargs)

            operator = self._operators[key] = _Operator(self._framework, flat, self.__name__)
        constants = operator.natives([leaves[place] for place in dynamic])
        call, parts = _called(operator, [leaves[place] for place in variables], constants)
        return call.result.build(parts)


class _Operator:
    """A function ``fun(variables, constants)`` of sequences of another framework's arrays; the result is a pytree."""

    def __init__(self, framework: Any, fun: Function, name: str):
        self.framework, self.fun, self.name = framework, fun, name
        self.value = framework.compiled(fun)
        self.recorded = framework.recorder(fun)
        self.jvp = framework.compiled(self._tangent)
        self._derivatives: dict[Hashable, _Operator] = {}

    def _tangent(self, variables: Any, constants: Any, gs: Any) -> Tree:
        return self.framework.jvp(partial(self.fun, constants=constants), variables, gs)

    def natives(self, arrays: Sequence[Array]) -> tuple:
        """Return the framework's arrays with the values of plain arrays and numbers."""
        return tuple([self.framework.native(np.asarray(array), self.name) for array in arrays])

    def arrays(self, tree: Tree) -> tuple[list[Array], _Structure]:
        """Return plain arrays with the values of the leaves of a result, and the result's structure."""
        if self.framework.is_array(tree):
            return [self.framework.array(tree, self.name)], _ONE
        given = arguments_of((tree,), {})
        values = [self.framework.array(leaf, self.name) for leaf in given.leaves]
        return values, _Structure(given.form, lambda leaves: given.build(list(leaves))[0][0], len(values))

    def adjoint(self, result: _Structure) -> _Operator:
        """Return the operator from the variables and the cotangents of results to the cotangents of the variables."""

        def fun(natives: Sequence[Any], constants: Sequence[Any]) -> Tree:
            count = len(natives) - result.count
            _, pull = self.framework.vjp(partial(self.fun, constants=constants), natives[:count])
            return pull(result.build(natives[count:]))

        return self._derivative(result.form, fun)

    def tangent(self) -> _Operator:
        """Return the operator from the variables and their tangents to the tangents of the results."""

        def fun(natives: Sequence[Any], constants: Sequence[Any]) -> Tree:
            count = len(natives) // 2
            return self._tangent(natives[:count], constants, natives[count:])

        return self._derivative("tangent", fun)

    def _derivative(self, key: Hashable, fun: Function) -> _Operator:
        if key not in self._derivatives:
            self._derivatives[key] = _Operator(self.framework, fun, self.name)
        return self._derivatives[key]


class _Structure(NamedTuple):
    """The structure of a result: as a key, as a function of its leaves, and the number of leaves."""

    form: Hashable
    build: Callable[[Sequence[Any]], Tree]
    count: int


_ONE = _Structure("array", itemgetter(0), 1)


class _Call:
    """One call of an operator, whose results form one vector unless there is only one."""

    def __init__(self, operator: _Operator, constants: tuple, reverse: bool):
        self.operator, self._constants, self._reverse = operator, constants, reverse
        self._pull: Any = None

    def run(self, variables: Sequence[Array]) -> Array:
        """Return the results for plain arrays."""
        operator, natives = self.operator, self.operator.natives(variables)
        if self._reverse:
            tree, self._pull = operator.recorded(natives, self._constants)
        else:
            tree = operator.value(natives, self._constants)
        operator.framework.check_unchanged((*natives, *self._constants), operator.name)
        values, self.result = operator.arrays(tree)
        if len(values) == 1:
            return values[0]
        self._layout = Concatenation(list(map(spec_like, values)))
        return self._layout.vector(values)

    def parts(self, results: Array) -> list[Array]:
        """Return the arrays of the results."""
        return [results] if self.result.count == 1 else self._layout.parts(results)

    def pull(self, args: Sequence[Array], g: Array) -> Sequence[Array]:
        """Return the cotangents of the variables."""
        operator, gs = self.operator, self.parts(g)
        if isbox(g) or any(map(isbox, args)):
            return _called(operator.adjoint(self.result), [*args, *gs], self._constants)[1]
        if self._pull is None:
            self._pull = operator.recorded(operator.natives(args), self._constants)[1]
        return [
            operator.framework.array(leaf, operator.name) for leaf in self._pull(self.result.build(operator.natives(gs)))
        ]

    def push(self, args: Sequence[Array], gs: Sequence[Array]) -> Array:
        """Return the tangent of the results."""
        operator = self.operator
        if any(map(isbox, (*args, *gs))):
            parts = _called(operator.tangent(), [*args, *gs], self._constants)[1]
        else:
            parts, _ = operator.arrays(operator.jvp(operator.natives(args), self._constants, operator.natives(gs)))
        return parts[0] if self.result.count == 1 else self._layout.vector(parts)


def _called(operator: _Operator, variables: Sequence[Array], constants: tuple) -> tuple[_Call, list[Array]]:
    """Call an operator; return the call and the arrays of its results."""
    call = _Call(operator, constants, any(map(_is_in_reverse_mode, variables)))
    return call, call.parts(_evaluate(*variables, call=call))


def _is_in_reverse_mode(x: Any) -> bool:
    while isbox(x):
        if isinstance(x._node, VJPNode):
            return True
        x = x._value
    return False


@primitive
def _evaluate(*variables: Array, call: _Call) -> Array:
    return call.run(variables)


def _vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    call: _Call = kwargs["call"]
    like = spec_like(ans)

    def vjp(g: Array) -> list[Array]:
        found = call.pull(args, conform(g, *like))
        return [conform(found[k], *spec_like(args[k])) for k in argnums]

    return vjp


def _jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    tangents: Mapping[int, Array] = dict(zip(argnums, gs))
    return kwargs["call"].push(args, [conformed(tangents.get(k), spec_like(x)) for k, x in enumerate(args)])


defvjp_argnums(_evaluate, _vjp)
defjvp_argnums(_evaluate, _jvp)


# Above this mean size in bytes, intermediate values are kept for the adjoint; passing smaller ones from one compiled
# function to another takes longer than computing them again.
_KEPT = 1 << 15


class _JAX:
    """JAX: functions of tuples of arrays, compiled."""

    name = "JAX"

    def __init__(self) -> None:
        self.module = jax = optional_package("jax", "JAX", "jax", "mpiad.interop")
        self.compiled = jax.jit
        self._run = jax.jit(lambda pull, g: pull(g))

    def is_array(self, x: Any) -> bool:
        """Return whether x is an array, not a pytree of arrays."""
        return isinstance(x, self.module.Array)

    def vjp(self, fun: Function, variables: Any) -> tuple[Tree, Function]:
        """Return the result of a function, and its adjoint."""
        result, pull = self.module.vjp(fun, variables)
        return result, lambda g: pull(g)[0]

    def recorder(self, fun: Function) -> Function:
        """Return the compiled function that returns a result of `fun`, and its adjoint."""
        jax, keeps = self.module, list[bool]()
        value = jax.jit(fun)
        kept = jax.jit(lambda variables, constants: jax.vjp(partial(fun, constants=constants), variables))
        again = jax.jit(lambda variables, constants, g: kept(variables, constants)[1](g)[0])

        def recorded(variables: Any, constants: Any) -> tuple[Tree, Function]:
            if not keeps:
                found = jax.tree_util.tree_leaves(jax.eval_shape(kept, variables, constants)[1])
                keeps.append(sum(x.size * x.dtype.itemsize for x in found) > _KEPT * len(found))
            if not keeps[0]:
                return value(variables, constants), lambda g: again(variables, constants, g)
            result, pull = kept(variables, constants)
            return result, lambda g: self._run(pull, g)[0]

        return recorded

    def native(self, x: np.ndarray, name: str) -> np.ndarray:
        """Return x, which JAX reads without a copy."""
        _check_kind(x, name)
        if x.dtype.itemsize > (8 if x.dtype.kind == "c" else 4) and not self.module.config.jax_enable_x64:
            if x.dtype.kind in "fc" or not np.array_equal(x, x.astype(self.module.dtypes.canonicalize_dtype(x.dtype))):
                raise TypeError(
                    f"{name}: an argument is {x.dtype}, but JAX's 64-bit mode is off, and JAX would round it to 32 bits. "
                    'Call jax.config.update("jax_enable_x64", True) at the start of the program, or pass 32-bit arrays.'
                )
        return x

    def array(self, y: Any, name: str) -> np.ndarray:
        """Return the values of a result."""
        if not isinstance(y, self.module.Array):
            raise TypeError(_unexpected(name, type(y).__name__, y))
        if y.dtype.kind not in "fc" or any(device.platform != "cpu" for device in y.devices()):
            raise TypeError(_unexpected(name, f"an array of {y.dtype}", ", ".join(map(str, y.devices()))))
        return np.asarray(y)

    def jvp(self, fun: Function, variables: Any, gs: Any) -> Tree:
        """Return the tangent of a function."""
        return self.module.jvp(fun, (variables,), (gs,))[1]

    @staticmethod
    def check_unchanged(natives: Sequence[Any], name: str) -> None:
        """Do nothing: JAX's functions can't change their arguments."""


class _Torch:
    """PyTorch: functions of tuples of tensors, called as they are."""

    name = "PyTorch"

    def __init__(self) -> None:
        self.module = torch = optional_package("torch", "PyTorch", "torch", "mpiad.interop")
        self._dtypes = torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128

    def compiled(self, fun: Function) -> Function:
        """Return the function without a graph of its own: that of module parameters, for example."""
        return self.module.no_grad()(fun)

    def is_array(self, x: Any) -> bool:
        """Return whether x is a tensor, not a pytree of tensors."""
        return isinstance(x, self.module.Tensor)

    def vjp(self, fun: Function, variables: Any) -> tuple[Tree, Function]:
        """Return the result of a function, and its adjoint for cotangents that aren't conjugated, as PyTorch's are."""
        conjugated = partial(self.module.utils._pytree.tree_map, lambda g: g.conj() if g.is_complex() else g)
        result, pull = self.module.func.vjp(fun, variables)
        return result, lambda g: conjugated(pull(conjugated(g))[0])

    def recorder(self, fun: Function) -> Function:
        """Return the function that returns a result of `fun`, and its adjoint."""
        return self.compiled(lambda variables, constants: self.vjp(partial(fun, constants=constants), variables))

    def native(self, x: np.ndarray, name: str) -> Any:
        """Return a tensor that shares the memory of x if possible."""
        _check_kind(x, name)
        return self.module.from_numpy(np.require(x, requirements=("C", "W")))

    def array(self, y: Any, name: str) -> np.ndarray:
        """Return the values of a result."""
        if not isinstance(y, self.module.Tensor):
            raise TypeError(_unexpected(name, type(y).__name__, y))
        if y.dtype not in self._dtypes or y.device.type != "cpu":
            raise TypeError(_unexpected(name, f"a tensor of {y.dtype}", y.device))
        return y.detach().resolve_conj().resolve_neg().numpy()

    def jvp(self, fun: Function, variables: Any, gs: Any) -> Tree:
        """Return the tangent of a function."""
        return self.module.func.jvp(fun, (variables,), (gs,))[1]

    @staticmethod
    def check_unchanged(natives: Sequence[Any], name: str) -> None:
        """Raise a RuntimeError if a function has changed its arguments, whose memory is the caller's."""
        if any(native._version for native in natives):
            raise RuntimeError(f"{name}: the function changes an argument in place. Copy it first, with x.clone().")


_jax, _torch = lru_cache(None)(_JAX), lru_cache(None)(_Torch)


def _check_kind(x: np.ndarray, name: str) -> None:
    if type(x) is not np.ndarray or x.dtype.kind not in "fciub":
        raise TypeError(f"{name}: expected arrays of numbers on the host, but got {type(x).__name__} of {x.dtype}.")


def _unexpected(name: str, found: str, detail: object) -> str:
    return f"{name}: the function must return floating-point or complex arrays on the CPU, but returned {found} ({detail})."
