"""Functions of JAX and PyTorch in mpiad's programs, and driven functions in programs of JAX and PyTorch.

A function of another framework becomes one step of the tape. An `_Operator` is such a function of flat arrays. Its adjoint
and its tangent are functions of the same framework, so they are operators as well, with derivatives of their own. A `_Call`
is one call of an operator. PyTorch keeps intermediate values for the adjoint; JAX's compiled adjoint computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
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

_jax_waits = ContextVar("jax_waits", default=False)  # whether a program of JAX waits for a driven function


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
            token = _jax_waits.set(True)
            try:
                found = method(*tree_map(lambda x: np.asarray(x, float), args))
            finally:
                _jax_waits.reset(token)
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
    ``f.vjp``; there is no derivative in forward mode or of second order.

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
            ctx.x = build([leaf.detach().double().cpu().numpy() for leaf in leaves])
            return like(f(ctx.x), leaves[0])

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Any) -> tuple[Any, ...]:
            found = f.vjp(ctx.x, g.double().cpu().numpy())
            return None, *(like(part, x) for part, x in zip(flatten(found)[0], ctx.saved_tensors))

    def driven(x: Any) -> Any:
        leaves, build = flatten(x)
        return Driven.apply(build, *leaves)

    return driven


def _check_driven(f: object, call: str) -> None:
    if not isinstance(f, DrivenFunction):
        raise TypeError(
            f"{call}: expected a driven function, but got {type(f).__name__} {f!r:.60}. Other frameworks may drop, "
            "repeat or reorder calls, and then a function that communicates deadlocks. Pass the function to mpiad.drive, "
            "and convert the driven function that its program receives."
        )


def _imported(framework: _Framework, fun: Function, call: str) -> Function:
    if not callable(fun):
        raise TypeError(f"{call}: expected a function, but got {type(fun).__name__} {fun!r:.60}.")
    name = f"{call}({getattr(fun, '__name__', type(fun).__name__)})"
    operators: dict[Hashable, _Operator] = {}

    def called(*args: Tree, **kwargs: Tree) -> Tree:
        if framework.name == "JAX" and _jax_waits.get():
            raise RuntimeError(
                f"{name} was called in a driven function that a program of JAX waits for (see to_jax). JAX may "
                "wait forever for a function that it runs in such a call. Use a program of another framework, or call the "
                "driven function's own methods."
            )
        given = arguments_of(args, kwargs)
        leaves = [np.asarray(leaf) if isinstance(leaf, TracedArray) else leaf for leaf in given.leaves]
        if len(given.traced) < len(leaves):
            refuse_objects(given.build(leaves), "an argument", name)
        variables = tuple(place for place in given.traced if isbox(leaves[place]))
        dynamic = tuple(place for place in given.traced if place not in variables)
        static = {place: leaf for place, leaf in enumerate(leaves) if place not in given.traced}
        key = given.form, variables, dynamic, tuple((type(leaf), leaf) for leaf in static.values())
        if key not in operators:
            build = given.build

            def flat(natives: Sequence[object], constants: Sequence[object]) -> Tree:
                found = {**static, **dict(zip(variables, natives)), **dict(zip(dynamic, constants))}
                args, kwargs = build([found[place] for place in range(len(found))])
                return fun(*args, **kwargs)

            operators[key] = _Operator(framework, flat, name)
        operator = operators[key]
        return operator([leaves[place] for place in variables], operator.natives([leaves[place] for place in dynamic]))

    called.__name__ = name
    return opaque(called)


class _Operator:
    """A function ``fun(variables, constants)`` of lists of another framework's arrays; the result is a pytree."""

    def __init__(self, framework: _Framework, fun: Function, name: str):
        self.framework, self._fun, self._name = framework, fun, name
        self.value, self.recorded = framework.compiled(fun, name), framework.compiled(self._vjp, name)
        self._derivatives: dict[int, _Operator] = {}

    def __call__(self, variables: Sequence[Array], constants: Sequence[object]) -> Tree:
        """Return the result, a pytree of arrays, for arrays that may be traced."""
        traced = any(map(isbox, variables))
        call = _Call(self, constants, traced and self.framework.keeps)
        leaves = call.parts(_evaluate(*variables, call=call)) if traced else call.values(variables)
        return call.build(leaves)

    def natives(self, arrays: Sequence[Array]) -> list[object]:
        """Return the framework's arrays with the values of plain arrays and numbers."""
        found = [np.asarray(array) for array in arrays]
        for x in found:
            if type(x) is not np.ndarray or x.dtype.kind not in "fciub":
                kind = f"{type(x).__name__} of {x.dtype}"
                raise TypeError(f"{self._name}: expected arrays of numbers on the host, but got {kind}.")
        return [self.framework.native(x, self._name) for x in found]

    def arrays(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Return plain arrays with the values of the leaves of a result."""
        found = list(map(self.framework.array, leaves))
        for y, array in zip(leaves, found):
            if array is None:
                got = f"an array of {y.dtype} on {y.device}" if hasattr(y, "device") else f"{type(y).__name__} {y!r:.60}"
                text = "the function must return floating-point or complex arrays on the CPU"
                raise TypeError(f"{self._name}: {text}, but returned {got}.")
        return found  # type: ignore[return-value]

    def _vjp(self, variables: Sequence[object], constants: Sequence[object]) -> tuple[Tree, Function]:
        return self.framework.vjp(partial(self._fun, constants=constants), variables)

    def adjoint(self, count: int) -> _Operator:
        """Return the operator from the variables and `count` cotangents of results to the cotangents of the variables."""

        def fun(natives: Sequence[object], constants: Sequence[object]) -> Tree:
            n = len(natives) - count
            result, pull = self._vjp(natives[:n], constants)
            return pull(flatten(result)[1](list(natives[n:])))

        return self._derivative(count, fun)

    def tangent(self) -> _Operator:
        """Return the operator from the variables and their tangents to the tangents of the results."""

        def fun(natives: Sequence[object], constants: Sequence[object]) -> Tree:
            n = len(natives) // 2
            return self.framework.jvp(partial(self._fun, constants=constants), (natives[:n],), (natives[n:],))[1]

        return self._derivative(-1, fun)

    def _derivative(self, key: int, fun: Function) -> _Operator:
        if key not in self._derivatives:
            self._derivatives[key] = _Operator(self.framework, fun, self._name)
        return self._derivatives[key]


class _Call:
    """One call of an operator; a traced result is one vector of all leaves, or the only leaf."""

    def __init__(self, operator: _Operator, constants: Sequence[object], records: bool):
        self._operator, self._constants, self._records = operator, constants, records
        self._pull: Function | None = None  # the adjoint with its intermediate values

    def values(self, variables: Sequence[Array]) -> list[np.ndarray]:
        """Return the leaves of the result for plain arrays."""
        operator = self._operator
        tree = (operator.recorded if self._records else operator.value)(operator.natives(variables), self._constants)
        if self._records:
            tree, self._pull = tree
        leaves, self.build = flatten(tree)
        return operator.arrays(leaves)

    def evaluate(self, variables: Sequence[Array]) -> Array:
        """Return the result for plain arrays, as one array."""
        values = self.values(variables)
        self._layout = None if len(values) == 1 else Concatenation(list(map(spec_like, values)))
        return self._joined(values)

    def _joined(self, leaves: Sequence[Array]) -> Array:
        return leaves[0] if self._layout is None else self._layout.vector(leaves)

    def parts(self, result: Array) -> list[Array]:
        """Return the leaves of the result."""
        return [result] if self._layout is None else self._layout.parts(result)

    def pull(self, args: Sequence[Array], g: Array) -> Sequence[Array]:
        """Return the cotangents of the variables."""
        operator, gs = self._operator, self.parts(g)
        if self._pull is None or isbox(g) or any(map(isbox, args)):
            return operator.adjoint(len(gs))([*args, *gs], self._constants)
        return operator.arrays(self._pull(self.build(operator.natives(gs))))

    def push(self, args: Sequence[Array], gs: Sequence[Array]) -> Array:
        """Return the tangent of the result."""
        return self._joined(flatten(self._operator.tangent()([*args, *gs], self._constants))[0])


@primitive
def _evaluate(*variables: Array, call: _Call) -> Array:
    return call.evaluate(variables)


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


class _JAX:
    """JAX: compiled functions of pytrees of arrays."""

    name, keeps = "JAX", False

    def __init__(self) -> None:
        self.module = jax = optional_package("jax", "JAX", "jax", "mpiad.interop")
        self.jvp = jax.jvp

    def compiled(self, fun: Function, name: str) -> Function:
        """Return a function of variables and constants, compiled at its first call for these shapes."""
        return self.module.jit(fun)

    def vjp(self, fun: Function, variables: Sequence[object]) -> tuple[Tree, Function]:
        """Return the result of a function, and its adjoint."""
        result, pull = self.module.vjp(fun, variables)
        return result, lambda g: pull(g)[0]

    def native(self, x: np.ndarray, name: str) -> np.ndarray:
        """Return x, which JAX reads without a copy."""
        dtype = self.module.dtypes.canonicalize_dtype(x.dtype)
        if dtype != x.dtype and (x.dtype.kind in "fc" or not np.array_equal(x, x.astype(dtype))):
            raise TypeError(
                f"{name}: an argument is {x.dtype}, but JAX's 64-bit mode is off, and JAX would round it to 32 bits. "
                'Call jax.config.update("jax_enable_x64", True) at the start of the program, or pass 32-bit arrays.'
            )
        return x

    def array(self, y: Any) -> np.ndarray | None:
        """Return the values of a result; None if it isn't a floating-point or complex array on the CPU."""
        expected = isinstance(y, self.module.Array) and y.dtype.kind in "fc"
        return np.asarray(y) if expected and all(device.platform == "cpu" for device in y.devices()) else None


class _Torch:
    """PyTorch: functions of pytrees of tensors, called as they are."""

    name, keeps = "PyTorch", True

    def __init__(self) -> None:
        self.module = torch = optional_package("torch", "PyTorch", "torch", "mpiad.interop")
        self.jvp = torch.func.jvp
        self._dtypes = torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128

    def compiled(self, fun: Function, name: str) -> Function:
        """Return the function without a graph of its own, as for parameters of a module; it must not change arguments."""

        def run(variables: Sequence[Any], constants: Sequence[Any]) -> object:
            with self.module.no_grad():
                result = fun(variables, constants)
            if any(native._version for native in (*variables, *constants)):
                raise RuntimeError(f"{name}: the function changes an argument in place. Copy it first, with x.clone().")
            return result

        return run

    def vjp(self, fun: Function, variables: Sequence[object]) -> tuple[Tree, Function]:
        """Return the result of a function, and its adjoint for cotangents that aren't conjugated, as PyTorch's are."""
        conjugated = partial(self.module.utils._pytree.tree_map, lambda g: g.conj() if g.is_complex() else g)
        result, pull = self.module.func.vjp(fun, variables)
        return result, lambda g: conjugated(pull(conjugated(g))[0])

    def native(self, x: np.ndarray, name: str) -> object:
        """Return a tensor that shares the memory of x if possible."""
        return self.module.from_numpy(np.require(x, requirements=("C", "W")))

    def array(self, y: Any) -> np.ndarray | None:
        """Return the values of a result; None if it isn't a floating-point or complex tensor on the CPU."""
        if not isinstance(y, self.module.Tensor) or y.dtype not in self._dtypes or y.device.type != "cpu":
            return None
        return y.detach().resolve_conj().resolve_neg().numpy()


_Framework: TypeAlias = _JAX | _Torch
_jax, _torch = lru_cache(None)(_JAX), lru_cache(None)(_Torch)
