"""Fields of a solution that are made when somebody first reads them: most programs read one or two of ten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Deferred", "deferring"]

Class = TypeVar("Class")


class Deferred:
    """A value that isn't made yet.

    Parameters
    ----------
    make : callable
        Returns the value. It must not refer to the solution: a cycle would keep its memory until it is found.
    """

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]):
        self.make = make


class DeferredField:
    """A field to which a value can be given, or a `Deferred` that makes it.

    Parameters
    ----------
    name : str
    """

    def __init__(self, name: str):
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if self._name not in instance.__dict__:
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {self._name!r}")
        value = instance.__dict__[self._name]
        if type(value) is Deferred:
            value = instance.__dict__[self._name] = value.make()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value


def deferring(*names: str) -> Callable[[type[Class]], type[Class]]:
    """Return a decorator of dataclasses some of whose fields may be deferred."""

    def decorated(cls: type[Class]) -> type[Class]:
        for name in names:
            setattr(cls, name, DeferredField(name))
        return cls

    return decorated
