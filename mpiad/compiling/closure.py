"""Closures: the objects that a function reads besides its arguments, found by the traversal of a `FunctionReader`.

These are the function's defaults, the global variables and variables of enclosing functions that its bytecode names, and
recursively the objects that the functions among them read. The reader follows only those attributes of the user's modules
and objects that the code names, such as `rate` in `settings.rate`. Since the function may create objects of a class that it
reads, the reader follows the special methods of the class, and the values, methods and properties whose names occur in
any code that it follows, or all of them if code may compute such a name, as for `getattr`. So it does for the classes of
values, such as a named tuple, a member of an enumeration or a subclass of list.

An object of a class written in Python is followed as a whole if it is found in a container or is another function's
argument, or if the code names a property of it: the members of its class as above, but methods that create objects only if
the code may call them, and those attributes in its `__dict__` and slots whose names occur. Some libraries are assumed to be
constant. A function can't be followed if it may reach anything else, such as an iterator, random numbers, or an object with
state in C.

Subclasses of the reader record the objects: that of `fingerprint_of` records values, and that of `watch_of` records
conditions under which the objects are unchanged. A `Watch` checks them at each call of a compiled function, whose program
considers these objects constant: whether the variable, attribute or container from which an object was read still refers to
it, and whether the contents of writable arrays are unchanged. There is no watch, and the function isn't compiled, if an
object can't be followed, or the function communicates without the primitives.
"""

from __future__ import annotations

import builtins
import dis
import sys
from abc import ABCMeta, get_cache_token
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from functools import cached_property, lru_cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    DynamicClassAttribute,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import Box

from mpiad.compiling.bytecode import (
    Unknown,
    attributes_of_results,
    line_of,
    names_in,
    reads_in,
    reads_of_first_argument,
    reads_of_super,
)
from mpiad.compiling.watch import MISSING, Place, Watch, content_of, is_writable, parts_of, text_of

# Functions that read objects that the code doesn't name.
_HIDDEN_READS = frozenset({"eval", "exec", "globals", "id", "input", "locals", "open", "__import__"})
# Functions and methods of constant libraries whose results change from call to call, or that read or write files.
_UNREPEATABLE = frozenset(
    """random rvs resample bootstrap permutation_test monte_carlo_test differential_evolution dual_annealing basinhopping
    shgo datetime64 io datasets load loadtxt genfromtxt fromfile fromregex memmap open_memmap DataSource save savez
    savez_compressed savetxt tofile dump""".split()
)
_OF_DISTRIBUTIONS = frozenset({"rvs", "resample"})  # methods that draw, refused for the result of a call, too
_NUMBERS_AND_TEXTS = frozenset({type(None), bool, int, float, complex, str, bytes})
_PLAIN = (*_NUMBERS_AND_TEXTS, np.generic, CodeType, range, type(...), type(NotImplemented), np.dtype)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, MappingProxyType, slice, partial)
_VALUES = (*_PLAIN, *_CONTAINERS, np.ndarray)  # read as a whole
_FUNCTIONS_IN_C = (np.ufunc, type(np.dot), MethodDescriptorType, WrapperDescriptorType)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, *_FUNCTIONS_IN_C)
_STANDARD_LOOKUPS = {kind.__getattribute__ for kind in (object, ModuleType, SimpleNamespace, *_VALUES)}
_UNFOLLOWED = object()
_COMPUTED = "neither a stored value nor a method written in Python"
# What reads attributes whose names the code doesn't contain.
_BY_NAME = frozenset(
    """getattr hasattr setattr delattr vars dir attrgetter methodcaller format format_map __dict__
    __getattribute__ MATCH_CLASS asdict astuple""".split()
)
# Attributes of users' objects that functions of libraries read, and Python itself for `**`; and methods that the packages
# named below call.
_OF_PROTOCOLS = frozenset(
    "keys shape dtype size ndim astype max min round real imag T transpose takes_blocks is_updated".split()
)
_OF_MODELS = frozenset("initial draw log_prob logpdf dist dim forward inverse setup update precondition".split())
_CALLING = tuple(f"mpiad.{package}" for package in ("vi", "parallel", "inverse", "optimize", "ensemble", "linalg"))
# Members of classes that are called only when an object is created, copied or deleted, and names in code that may do this.
_OF_NEW_OBJECTS = frozenset(
    """__init__ __new__ __post_init__ __init_subclass__ __class_getitem__ __set_name__ __del__ __copy__ __deepcopy__
    __replace__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __getnewargs__ __getnewargs_ex__""".split()
)
_CREATING, _COPYING = ("type", "__class__", "replace"), ("copy", "deepcopy")
# Methods generated for dataclasses, which name classes, but don't create objects.
_OF_DATACLASSES = frozenset("__eq__ __lt__ __le__ __gt__ __ge__ __repr__ __setattr__ __delattr__".split())
# Members of classes that don't change what their objects do, or are generated for named tuples; fields in C.
_OF_CLASSES = frozenset(
    """__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__ __annotate_func__
    __annotations_cache__ __dataclass_fields__ __dataclass_params__ __match_args__ __slots__ __firstlineno__
    __static_attributes__ __abstractmethods__ _abc_impl __orig_bases__ __parameters__ __type_params__""".split()
)
_OF_NAMED_TUPLES = frozenset("__new__ _make _replace _asdict _fields _field_defaults __getnewargs__ __replace__".split())
_METACLASSES, EnumType = (type, ABCMeta), type(Enum)
FIELDS: dict[type, tuple[str, ...]] = {}  # fields that libraries read without naming them, see `mpiad.pytrees.register`
_STATIC, _CLASS, _CACHED = staticmethod.__get__, classmethod.__get__, cached_property.__get__
_PROPERTIES = {kind.__get__ for kind in (property, DynamicClassAttribute, type(vars(Enum)["name"]))}
_OF_ENUMS = _OF_CLASSES | vars(IntEnum("_", ())).keys()
_DESCRIPTORS = (MemberDescriptorType, GetSetDescriptorType, type(namedtuple("_", "x").x))  # type: ignore[attr-defined]


class _Objects(NamedTuple):
    """The objects of a class that are read as a whole."""

    are_all_read: bool  # whether all attributes are read
    values: list[tuple[tuple[Place, ...], object]]  # with the paths by which they were reached
    names: dict[str, bool]  # the names of attributes, and whether they have been read


class FunctionReader:
    """A traversal of the objects that a function reads; subclasses record the objects."""

    constant_modules = frozenset(
        {"numpy", "autograd", "math", "cmath", "builtins", "collections", "copy", "dataclasses", "reprlib"}
    )

    def __init__(self) -> None:
        self.path: tuple[Place, ...] = ()  # the expression that is being read, after those from which it was reached
        # The names in the code, and members of classes and objects whose names haven't occurred: paths and functions that
        # read them.
        self._occurring: set[str] = set(_OF_PROTOCOLS)
        self._are_all_read = False  # whether code may read attributes whose names it doesn't contain
        self._pending: dict[str, list[tuple[tuple[Place, ...], Callable[[], None]]]] = {}
        self._objects: dict[type, _Objects] = {}  # that are read as a whole
        self._kinds: set[type] = {partial}  # classes of values that were read, and the one of a constant library

    @property
    def reading(self) -> str:
        """The expression in the user's code that is being read."""
        return text_of(self.path)

    @property
    def origin(self) -> str:
        """The line in the outermost function from which another function was reached that is being read."""
        fun, names = next((place for place in self.path if place[0]), (None, ("",)))
        if fun is None or fun is self.path[-1][0]:
            return ""
        line = line_of(fun.__code__, names[-1]) or fun.__code__.co_firstlineno
        return f"reached from {fun.__qualname__}, line {line}"

    # ---- what subclasses record

    def constant(self, value: object) -> None:
        """Record a number, a text, code, a class, or a module or function of a constant library."""

    def is_known(self, value: object) -> bool:
        """Return whether an object was read before, and needn't be read again; may note that it is read now."""
        raise NotImplementedError

    def array(self, value: np.ndarray) -> None:
        """Record an array."""

    def device_array(self, value: object) -> None:
        """Record an array on a device, whose entries programs read in each run."""

    def container(self, value: Any, parts: list[Any]) -> None:
        """Record a container; its parts are read afterwards."""

    def members(self, value: type) -> None:
        """Record the namespace of a class; its members are read afterwards."""
        self.container(vars(value), parts_of(vars(value)))

    def function(self, value: FunctionType) -> None:
        """Record a user's function; the objects that it uses are read afterwards."""

    def variable(self, cell: CellType, value: object) -> None:
        """Record the value of a variable of an enclosing function."""

    def name(self, names: Mapping[str, object], name: str, owner: type | None = None) -> None:
        """Record the object of a name in a namespace, that of the class `owner` or a dict, or that the name is missing."""

    def library_object(self, value: object) -> None:
        """Record an instance of a class of a constant library."""

    def kind(self, value: object) -> None:
        """Record the class of an object in which attributes are looked up."""

    def bases(self, value: type) -> None:
        """Record the base classes of a class."""

    def slot(self, value: object, name: str, part: object) -> None:
        """Record an attribute in a slot of an object; the attribute is read afterwards."""

    def attribute_names(self, value: dict[str, object]) -> None:
        """Record the names of the attributes in the `__dict__` of an object."""

    # ---- objects of all kinds

    def read(self, value: object) -> None:
        """Record a value, and all objects that can be reached from it."""
        if type(value) in _NUMBERS_AND_TEXTS:
            self.constant(value)
            return
        if type(value) is FunctionType:
            value = getattr(value, "in_place_of", value)  # a primitive of autograd, which the first trace has replaced
        if self.is_known(value):
            return
        module = "numpy" if isinstance(value, np.ufunc) else str(getattr(value, "__module__", ""))
        if type(value) in _FUNCTIONS and _is_in(module, self.constant_modules):
            _require_repeatable(getattr(value, "__name__", ""))
            self._read_pending((getattr(value, "__name__", ""),))  # for example np.mean calls a method `mean`
        if module.startswith(_CALLING):
            self._read_pending(_OF_MODELS)
        path, read = self.path, _reader_for(type(value))
        try:
            self.other(value) if read is None else read(self, value)
        except RecursionError:
            raise Unknown("there are too many levels of functions or containers") from None
        if isinstance(value, _VALUES) and not isinstance(value, Enum):
            self.read_state(value)  # attributes of an instance of a user's subclass
        if isinstance(value, (*_VALUES, Enum)) and type(value) not in self._kinds and not self.is_constant(value):
            self._kinds.add(type(value))
            self.read(type(value))
        self.path = path

    def read_first_argument(self, fun: FunctionType, value: Any) -> None:
        """Record the attributes that a function reads from its first argument."""
        if isinstance(value, _VALUES) or self.is_constant(value):
            self.read(value)
            return
        outer = self.path
        self.path = (*outer, (fun, ()))
        for attributes in reads_of_first_argument(fun.__code__):
            self.path = (*outer, (fun, (fun.__code__.co_varnames[0], *attributes)))
            self._chain(value, attributes)
        for attributes in reads_of_super(fun.__code__):
            self.path = (*outer, (fun, ("super()", *attributes)))
            self.kind(value)
            owner, name, *others = content_of(_cells(fun)["__class__"]), *attributes
            mro = type(value).__mro__
            if owner not in mro:
                raise Unknown("super() of a class")
            found = self._stored(value, name, {}, mro[mro.index(owner) + 1 :])
            self.read(value) if found is _UNFOLLOWED else self._chain(found, others)
        self.path = outer

    def read_held(self, value: object) -> None:
        """Record an object found in a function or object of a library, if it may come from the user."""
        kinds = FunctionType, MethodType, np.ndarray, *_CONTAINERS
        is_users = not self.is_constant(value) and (callable(value) or not _obstacle(type(value)))
        if isinstance(value, kinds) or is_users or self._wrapped(value) is not None:
            self.read(value)

    def read_state(self, value: object) -> None:
        """Record all attributes in the `__dict__` and in the slots of an object."""
        state = getattr(value, "__dict__", None)
        if state:
            self.container(state, parts_of(state))
            for part in state.values():
                self.read_held(part)
        for name in _slots_of(type(value)):
            part = getattr(value, name, MISSING)
            self.slot(value, name, part)
            self.read_held(part)

    def other(self, value: object) -> None:
        """Record an object of a class that isn't in `_READERS`."""
        wrapped = self._wrapped(value)
        if wrapped is not None:
            self.read(wrapped)
        elif hasattr(type(value), "__next__"):
            raise Unknown(f"an iterator, {type(value).__name__}")
        elif not self.is_constant(value):
            self.instance(value)
        elif type(value).__module__ == "builtins" and type(value) is not object:
            raise Unknown(f"an object of type {type(value).__name__}")
        else:
            self._read_pending((type(value).__name__,))
            self.library_object(value)

    def instance(self, value: object) -> None:
        """Record an object of a user's class: the class, and the attributes whose names occur in the code."""
        kind, outer = type(value), self.path
        if obstacle := _obstacle(kind):
            raise Unknown(f"an object of type {kind.__name__}, {obstacle}: pass the values that are needed as arguments")
        self.kind(value)
        if (own := getattr(value, "__dict__", None)) is not None:
            self.attribute_names(own)
        objects = self._objects.get(kind)
        if objects is None:
            objects = self._objects[kind] = _Objects(_asks(kind, self.is_constant), [], {})
            self._members(kind, objects.are_all_read, is_new=False)
        objects.values.append((outer, value))
        for name in (*(own or ()), *_slots_of(kind)):
            if objects.names.get(name):
                self._own(outer, value, name)
            elif name not in objects.names:
                objects.names[name] = False
                read = partial(self._own_of_all, kind, name)
                if objects.are_all_read or name[:2] == "__" or name in FIELDS.get(kind, ()):
                    read()
                else:  # `replace` reads all fields of a dataclass
                    self._when_named((name, "replace") if hasattr(kind, "__dataclass_fields__") else (name,), read)

    def _own_of_all(self, kind: type, name: str) -> None:
        """Record an attribute of all objects of a class that are read as a whole."""
        objects = self._objects[kind]
        objects.names[name] = True
        for path, value in [*objects.values]:
            self._own(path, value, name)

    def _own(self, path: tuple[Place, ...], value: object, name: str) -> None:
        """Record an attribute in the `__dict__` or in a slot of an object."""
        self.path = (*path, (None, (type(value).__qualname__, name)))
        own: dict[str, Any] = getattr(value, "__dict__", {})
        if name in own:
            self.name(own, name)
            self.read(own[name])
        elif name in _slots_of(type(value)):
            part = getattr(value, name, MISSING)
            self.slot(value, name, part)
            self.constant(part) if part is MISSING else self.read(part)

    def _enum(self, value: Enum) -> None:
        self.constant(value)
        for name, part in vars(value).items():
            if name not in ("_name_", "_sort_order_", "__objclass__"):
                self.slot(value, name, part)
                self.read(part)

    def _array(self, value: np.ndarray) -> None:
        if value.dtype.hasobject:
            raise Unknown("an array of objects")
        self.array(value)

    def _container(self, value: Any) -> None:
        parts = parts_of(value)
        self.container(value, parts)
        for part in parts:
            self.read(part)

    def _function(self, value: FunctionType) -> None:
        code, module = value.__code__, value.__globals__.get("__name__", "")
        cells = _cells(value)
        is_primitive = module == "autograd.tracer"  # `primitive(f)`, where f is NumPy's or the user's
        if is_primitive or _is_in(module, self.constant_modules):  # for example a derivative of a user's function
            self.constant(value if is_primitive else code)
            for content in map(content_of, cells.values()):
                if is_primitive and isinstance(content, partial):  # jit records calls of SciPy's functions
                    content = getattr(content, "__wrapped__", content)
                (self.read if is_primitive else self.read_held)(content)
            return
        self.function(value)
        outer = self.path
        is_generated = code.co_filename == "<string>" and code.co_name in _OF_DATACLASSES
        self._read_pending([name for name in names_in(code) if not is_generated or name not in ("__class__", "type")])
        if any(parts := (value.__defaults__, value.__kwdefaults__, value.__dict__)):
            self.path = (*outer, (value, ("a default or an attribute",)))
            for part in parts:
                self.read(part)
            self.path = outer
        for is_global, name, attributes in reads_in(code):
            self.path = (*outer, (value, (name, *attributes)))
            if not is_global:
                found = content_of(cells[name])
                self.variable(cells[name], found)
                self._chain(found, attributes)
                continue
            self.name(value.__globals__, name)
            if name in value.__globals__:
                self._chain(value.__globals__[name], attributes)
            elif name in _HIDDEN_READS:
                raise Unknown(name)
            elif not hasattr(builtins, name):
                self.name(vars(builtins), name)
                self._chain(MISSING, attributes)

    def _read_pending(self, names: Collection[str]) -> None:
        """Read the methods and properties that have one of the names in code, or of `getattr` under another name."""
        self._occurring.update(names)
        self._are_all_read |= not _BY_NAME.isdisjoint(names)
        outer = self.path
        for name in [*self._pending] if self._are_all_read else names:
            for path, read in self._pending.pop(name, ()):
                self.path = path
                read()
        self.path = outer

    def _when_named(self, names: Sequence[str], read: Callable[[], None]) -> None:
        """Read a member of a class or object, at once if one of these names has occurred, else when it occurs."""
        if self._are_all_read or not self._occurring.isdisjoint(names):
            read()
            return
        for name in names:
            self._pending.setdefault(name, []).append((self.path, read))

    def _method(self, value: MethodType) -> None:
        if self.is_constant(value.__self__):
            _require_repeatable(value.__name__)
            self.read(value.__self__)
        elif not isinstance(value.__func__, FunctionType):
            raise Unknown("a method")
        else:
            self.read(value.__func__)
            self.read_first_argument(value.__func__, value.__self__)

    def _module(self, value: ModuleType) -> None:
        if not self.is_constant(value):
            raise Unknown(f"all of module {value.__name__}")
        self.constant(value)

    def _class(self, value: type) -> None:
        """Record a class of which a function may create objects: the members that may be read."""
        self.constant(value)
        self._read_pending((value.__name__,))
        if self.is_constant(value):
            return
        self.bases(value)
        if type(value) not in (*_METACLASSES, EnumType):
            raise Unknown(f"class {value.__name__}, which has a metaclass")
        for member in value.__members__.values() if isinstance(value, EnumType) else ():
            self.read(member)
        # Libraries may read members of callable objects, such as `transpose` of an operator.
        asks = _asks(value, self.is_constant) or any("__call__" in vars(base) for base in value.__mro__)
        self._members(value, asks, is_new=True)

    def _members(self, kind: type, asks: bool, is_new: bool) -> None:
        """Record members of a class, all of them if a library `asks` for them; `is_new`: whether code creates objects."""
        outer = self.path
        for base in kind.__mro__:
            if self.is_constant(base) or base.__module__ in ("abc", "enum", "typing") or base is SimpleNamespace:
                continue
            self.members(base)
            generated = _OF_ENUMS if isinstance(base, EnumType) else _OF_CLASSES
            generated |= _OF_NAMED_TUPLES if "_field_defaults" in vars(base) else frozenset()
            for name, member in vars(base).items():
                if name not in generated:
                    self.path = (*outer, (None, (base.__qualname__, name)))
                    self.read(name)
                    creates = name in _OF_NEW_OBJECTS
                    read = partial(self._member, member, is_new or creates)
                    if asks or name[:2] == "__" and (is_new or not creates) or is_new and name in _OF_MODELS:
                        read()
                    else:
                        copies = creates and name not in ("__init__", "__post_init__")
                        self._when_named((name, *_CREATING * creates, *_COPYING * copies), read)

    def _member(self, value: Any, is_new: bool) -> None:
        getter = getattr(type(value), "__get__", None)
        if getter in _PROPERTIES:
            for fun in filter(None, (value.fget, value.fset, value.fdel)):
                self.method(fun, is_new)
        elif getter in (_STATIC, _CLASS) or isinstance(value, FunctionType):
            fun = getattr(value, "__func__", value)
            if getter is _CLASS and _uses_first_argument(fun):
                self._read_pending(("__class__",))  # `cls` may create objects
            self.method(fun, is_new)
        elif getter is _CACHED:
            self.method(value.func, is_new)
        elif not isinstance(value, _DESCRIPTORS):
            self.read(value)

    def method(self, value: object, is_new: bool) -> None:
        """Record a function that a class defines; `is_new`: whether the code has created the object."""
        self.read(value)

    def function_of_class(self, value: FunctionType) -> None:
        """Record that a method is called as a function of its class, as in ``Base.__init__(self)``; it is read later."""

    def _builtin(self, value: BuiltinFunctionType) -> None:
        owner = value.__self__
        is_known = isinstance(owner, ModuleType) and self.is_constant(owner) and value.__name__ not in _HIDDEN_READS
        if not is_known and value is not sys.exit:  # on several ranks that is a function of mpiad's
            raise Unknown(f"{value.__name__}, an unknown function")
        self._read_pending((value.__name__,))
        self.constant(value)

    # ---- attributes

    def _chain(self, value: Any, attributes: Iterable[str]) -> None:
        """Follow a chain of attributes as far as possible; record the names, and all parts of the last object."""
        for name in attributes:
            found = _UNFOLLOWED if value is MISSING else self.attribute(value, name)
            if found is _UNFOLLOWED:
                break
            value = found
        self.constant(value) if value is MISSING else self.read(value)

    def attribute(self, value: Any, name: str) -> Any:
        """Return a stored attribute or MISSING, and record its name; `_UNFOLLOWED`: `value` is recorded with all parts."""
        kind, is_module = type(value), isinstance(value, ModuleType)
        if self.is_constant(value):
            _require_repeatable(name)
            return getattr(value, name, None) if is_module else _UNFOLLOWED
        if issubclass(kind, (Enum, EnumType)):
            if name in (("name", "value") if isinstance(value, Enum) else value.__members__):
                return getattr(value, name)
            raise Unknown(_COMPUTED)
        if kind in _METACLASSES:
            self.bases(value)
            own, bases = {}, value.__mro__
        elif kind.__getattribute__ in _STANDARD_LOOKUPS:
            self.kind(value)
            own, bases = getattr(value, "__dict__", {}), kind.__mro__
        else:
            raise Unknown(_COMPUTED)
        return self._stored(value, name, own, bases)

    def _stored(self, value: Any, name: str, own: Mapping[str, Any], bases: Sequence[type]) -> Any:
        """Return an attribute that is stored in `own` or in one of the classes `bases`; see `attribute`."""
        common = next((base.__dict__[name] for base in bases if name in base.__dict__), MISSING)
        method = self._wrapped(common) or common
        is_missing = common is MISSING and name not in own
        getter = getattr(type(common), "__get__", None)
        if isinstance(common, staticmethod) and getter is _STATIC:
            common = common.__func__
        elif isinstance(common, classmethod) and getter is _CLASS:
            common = MethodType(common.__func__, value if isinstance(value, type) else type(value))
        elif isinstance(method, FunctionType):
            if isinstance(value, type):
                self.function_of_class(method)  # Python returns the function itself
            else:
                common = MethodType(method, value)
        elif getter or is_missing and _is_computed(type(value), name, own):
            if isinstance(value, _VALUES) and not isinstance(common, property):
                return _UNFOLLOWED  # an attribute of the built-in base class, or an item of a dictionary
            if not is_missing and not isinstance(value, (type, *_VALUES)) and not _obstacle(type(value)):
                return _UNFOLLOWED  # a property or a slot
            raise Unknown(_COMPUTED)
        # The namespace in which the attribute is found, and the namespaces searched before it.
        for names, owner in ((own, None), *((base.__dict__, base) for base in bases)):
            self.name(names, name, owner)
            if name in names:
                break
            if is_missing:
                self.name(names, "__getattr__", owner)
        return own.get(name, common)

    # ---- constant libraries

    def is_constant(self, value: object) -> bool:
        """Return whether a module, a class, or the class of an object belongs to a constant library."""
        if isinstance(value, ModuleType):
            return _is_in(value.__name__, self.constant_modules)
        module = (value if isinstance(value, type) else type(value)).__module__
        # The type of functions in Cython has a descriptor there, of the modules of its functions.
        return isinstance(module, str) and _is_in(module, self.constant_modules)

    def _wrapped(self, value: Any) -> Any:
        """Return the user's function wrapped by an object of a constant library, such as a jitted one; else None."""
        return getattr(value, "__wrapped__", None) if self.is_constant(value) else None


_READERS: tuple[tuple[Any, Any], ...] = (
    (Enum, FunctionReader._enum),
    (np.ndarray, FunctionReader._array),
    (_CONTAINERS, FunctionReader._container),
    (FunctionType, FunctionReader._function),
    (MethodType, FunctionReader._method),
    (ModuleType, FunctionReader._module),
    (type, FunctionReader._class),
    (BuiltinFunctionType, FunctionReader._builtin),
    ((*_PLAIN, *_FUNCTIONS_IN_C), lambda self, value: self.constant(value)),
)


@lru_cache(maxsize=1024)
def _is_in(module: str, packages: frozenset[str]) -> bool:
    return module.partition(".")[0] in packages and not module.startswith("numpy.random")


@lru_cache(maxsize=256)
def _reader_for(kind: type) -> Any:
    if hasattr(kind, "__cuda_array_interface__"):
        return lambda self, value: self.device_array(value)
    return next((read for kinds, read in _READERS if issubclass(kind, kinds)), None)


@lru_cache(maxsize=256)
def computes_as_ndarray(kind: type) -> bool:
    """Return whether arrays of a class are computed with and indexed as plain arrays, unlike `np.matrix`."""
    names = "__array_ufunc__", "__array_function__", "__add__", "__mul__", "__pow__", "__getitem__"
    return issubclass(kind, np.memmap) or all(getattr(kind, name) is getattr(np.ndarray, name) for name in names)


def _is_computed(kind: type, name: str, own: Mapping[str, Any]) -> bool:
    """Return whether an attribute that isn't stored may exist: by `__getattr__`, in the class of a class, by `super()`."""
    return name.startswith("__") or "__getattr__" in own or hasattr(kind, "__getattr__") or hasattr(kind, name)


def _uses_first_argument(fun: FunctionType) -> bool:
    """Return whether a function may use its first argument otherwise than to read attributes."""
    try:
        return () in reads_of_first_argument(fun.__code__)
    except (AttributeError, Unknown):
        return True


def _asks(kind: type, is_constant: Callable[[object], bool]) -> bool:
    """Return whether a class is derived from one of a library, whose functions may read all members."""
    return any(is_constant(base) and base.__module__ != "builtins" or isinstance(base, EnumType) for base in kind.__mro__)


def _obstacle(kind: type) -> str:
    """Return the reason that objects of a class aren't followed as a whole; "" if they are."""
    if type(kind) not in _METACLASSES:
        return "whose class has a metaclass"
    if hasattr(kind, "__getattr__") or kind.__getattribute__ not in _STANDARD_LOOKUPS:
        return "whose class computes attributes in __getattr__ or __getattribute__"
    if hasattr(kind, "__get__"):
        return "a descriptor"
    references = len(_slots_of(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    if kind.__itemsize__ or kind.__basicsize__ > object.__basicsize__ + references * tuple.__itemsize__:
        return "whose state isn't stored in attributes"  # but in C
    return ""


def _require_repeatable(name: str) -> None:
    if name in _UNREPEATABLE or name.endswith(" (vectorized)"):  # of a user's function, by `np.frompyfunc`
        raise Unknown(f"{name}, whose result may differ in the next call")


def _cells(fun: FunctionType) -> dict[str, CellType]:
    return dict(zip(fun.__code__.co_freevars, fun.__closure__ or ()))


@lru_cache(maxsize=256)
def _slots_of(kind: type) -> list[str]:
    """Return the names of the slots of a class written in Python, and of a `defaultdict`."""
    classes = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base) or base is defaultdict]
    return [name for members in classes for name, x in members.items() if isinstance(x, MemberDescriptorType)]


def with_values_of_variables(fun: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a function that keeps the present values of the variables of enclosing functions, which may change later.

    So do the functions among these values. A function is returned as it is if it assigns such a variable itself, or if it
    is an operator, whose derivative rules are registered for this object.
    """
    known = {} if known is None else known
    if type(fun) is not FunctionType or not fun.__closure__ or assigns_outside(fun.__code__):
        return fun
    if fun.__globals__.get("__name__", "").partition(".")[0] in ("autograd", "mpiad"):
        return fun
    if id(fun) not in known:
        cells = tuple([CellType() for _ in fun.__closure__])
        copy = known[id(fun)] = FunctionType(fun.__code__, fun.__globals__, fun.__name__, fun.__defaults__, cells)
        copy.__kwdefaults__, copy.__qualname__ = fun.__kwdefaults__, fun.__qualname__
        copy.__dict__.update(fun.__dict__)
        for cell, variable in zip(cells, fun.__closure__):
            if (value := content_of(variable)) is not MISSING:
                cell.cell_contents = with_values_of_variables(value, known)
    return known[id(fun)]


@lru_cache(1024)
def assigns_outside(code: CodeType) -> bool:
    """Return whether code assigns variables of an enclosing function."""
    assigned = {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_DEREF", "DELETE_DEREF")}
    return bool(assigned & set(code.co_freevars)) or any(assigns_outside(x) for x in code.co_consts if type(x) is CodeType)


_boxes = Box.types
# Attributes of a communicator that may be read without communicating.
_OF_COMMUNICATORS = frozenset({"rank", "size", "Get_rank", "Get_size"})
_NO_MPI4PY = (
    "calls of mpi4py aren't compiled (call mpiad's functions; what mpi4py returned before, such as the ranks of neighbors, "
    "may be read from variables outside)"
)
_MAX_OBJECTS = 2000


class HoldsTraced(Exception):
    """Raised for a traced value of an enclosing derivative, which can't be a constant of a program."""


def watch_of(fun: Any, args: Sequence[Any] = (), objects: Sequence[Any] = ()) -> Watch:
    """Return the watch of a function; `objects`: leaves of `args` that are constants. May raise HoldsTraced or Unknown."""
    reader = _WatchReader()
    try:
        reader.read(fun)
        for value in objects:
            # If the first argument is the object of a method, the code shows which of its attributes are read.
            if args and value is args[0] and isinstance(fun, FunctionType):
                reader.read_first_argument(fun, value)
            else:
                reader.read(value)
        reader.finish()
    except Unknown as error:
        text = ": ".join(filter(None, (reader.reading, str(error))))
        unknown = Unknown(", ".join(filter(None, (text, reader.origin))))
        unknown.watch = reader.watch
        raise unknown from None
    return reader.watch


# What code may do to objects that it reads, and the methods of containers that don't change them.
_CHANGING = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"}
_READING = {"copy", "count", "get", "index", "items", "keys", "values"}


def survey(fun: Any, kind: type | tuple[()]) -> tuple[bool, str]:
    """Return whether a function reads an object of a class, and its effect besides its result, "" for none.

    May raise HoldsTraced.
    """
    reader = _Survey(kind)
    reader.read(fun)
    return reader.reads, reader.effect


def may_communicate(fun: Any, kind: type | tuple[()] = ()) -> bool:
    """Return whether a function reads objects of a class, of mpiad or mpi4py, traced values, or what can't be followed."""
    reader = _Survey(kind)
    try:
        reader.read(fun)
    except HoldsTraced:
        return True
    return reader.reads or reader.communicates


class _WatchReader(FunctionReader):
    constant_modules = FunctionReader.constant_modules | {"mpiad", "scipy", "operator", "mpi4py"}

    def __init__(self) -> None:
        super().__init__()
        self.watch = Watch()
        # Names: those of the communicators' methods, and those of attributes that are read from unknown objects, with the
        # places of the latter.
        self._communicating: set[str] = set()
        self._names: dict[str, tuple[Place, ...]] = {}
        self._noted: set[tuple[int, str]] = set()  # the names in namespaces, by `id`, that have a condition
        self._without_attributes: list[FunctionType] = []
        self._asks_for_attributes = False  # whether code may find out that an object hasn't an attribute
        self._known: dict[int, Any] = {}  # by `id`; the references keep the ids from being used again

    def finish(self) -> None:
        """Add conditions that depend on all code; refuse functions that may draw, or use a communicator by another name."""
        self._refuse(_OF_DISTRIBUTIONS, "random numbers")
        self._refuse({"__subclasses__", "__globals__"}, "the code doesn't name the objects that it reads")
        self._refuse(self._communicating - _OF_COMMUNICATORS, _NO_MPI4PY)
        for fun in self._without_attributes if self._asks_for_attributes else []:
            self.watch.note("not {0}.__dict__", fun)

    def _refuse(self, names: Collection[str], reason: str) -> None:
        """Refuse functions that read attributes with these names from unknown objects."""
        for name in self._names:
            if name in names:
                self.path = self._names[name]
                raise Unknown(reason)

    def is_known(self, value: object) -> bool:
        if id(value) in self._known:
            return True
        self._known[id(value)] = value
        if len(self._known) > _MAX_OBJECTS:
            raise Unknown(f"there are more than {_MAX_OBJECTS} objects: pass arrays of their values as arguments")
        return False

    def array(self, value: np.ndarray) -> None:
        if is_writable(value):
            self.watch.note_array(self.path, value)

    def device_array(self, value: object) -> None:
        self.watch.device_arrays.append(value)

    def container(self, value: Any, parts: list[Any]) -> None:
        if not isinstance(value, (tuple, frozenset, slice, partial)):
            path = self.path
            if path and len(names := path[-1][1]) > 1 and hasattr(type(value), names[-1]):
                path = (*path[:-1], (path[-1][0], names[:-1]))  # without the container's method
            self.watch.note_container(path, value, parts)

    def members(self, value: type) -> None:
        self.watch.note_members(self.path, value)

    def function(self, value: FunctionType) -> None:
        same = "{0}.__code__ is {1} and {0}.__defaults__ is {2} and {0}.__kwdefaults__ is {3}"
        self.watch.note(same, value, value.__code__, value.__defaults__, value.__kwdefaults__)
        if not value.__dict__:
            self._without_attributes.append(value)
        for name in attributes_of_results(value.__code__):
            if name not in self._names:
                self._names[name] = (*self.path, (value, (name,)))

    def variable(self, cell: CellType, value: object) -> None:
        self.watch.note_variable(self.path, cell, value)

    def name(self, names: Mapping[str, object], name: str, owner: type | None = None) -> None:
        self._asks_for_attributes |= name in ("getattr", "hasattr")
        if (id(names), name) not in self._noted:
            self._noted.add((id(names), name))
            self.watch.note_name(self.path, names, name, owner)

    def other(self, value: object) -> None:
        if type(value) in _boxes:
            raise HoldsTraced
        if _is_communicator(value):
            names = [name for name in dir(value) if not name.startswith("__")]  # any object has `__init__`
            self._communicating.update(name for name in names if callable(getattr(type(value), name, None)))
        super().other(value)

    def read_held(self, value: object) -> None:
        if type(value) in _boxes:
            raise HoldsTraced
        if type(value).__module__.startswith("scipy."):
            self.read(value)
        else:
            super().read_held(value)

    def library_object(self, value: object) -> None:
        if not type(value).__module__.startswith(("mpiad", "mpi4py", "autograd")):
            self.read_state(value)
        for name in getattr(type(value), "attributes_of_programs", ()):
            part = getattr(value, name)
            self.slot(value, name, part)
            self.read(part)

    def kind(self, value: object) -> None:
        if (id(value), "") not in self._noted:
            self._noted.add((id(value), ""))
            self.watch.note("type({0}) is {1}", value, type(value))
            if (own := getattr(value, "__dict__", None)) is not None:
                self.watch.note("{0}.__dict__ is {1}", value, own)
        self.bases(type(value))

    def bases(self, value: type) -> None:
        if (id(value), "") not in self._noted:
            self._noted.add((id(value), ""))
            self.watch.note("{0}.__mro__ is {1}", value, value.__mro__)
            for base in value.__mro__:  # a new descriptor in a class takes precedence over attributes
                if not self.is_constant(base) and (id(base), "names") not in self._noted:
                    self._noted.add((id(base), "names"))
                    self.watch.note("len({0}) == {1}", vars(base), len(vars(base)))
            if type(value) is ABCMeta:  # changes if a class is registered as a subclass
                self.watch.note("{0}() == {1}", get_cache_token, get_cache_token())

    def slot(self, value: object, name: str, part: object) -> None:
        self.watch.note_slot(self.path, value, name, part)

    def attribute_names(self, value: dict[str, object]) -> None:
        self.watch.note_attribute_names(self.path, value)

    def attribute(self, value: Any, name: str) -> Any:
        if not _is_communicator(value):
            return super().attribute(value, name)
        if name not in _OF_COMMUNICATORS:
            raise Unknown(_NO_MPI4PY)
        return None


PRINTS = "prints"  # the effect of a function that has no other effect


class _Survey(_WatchReader):
    """A traversal for `survey`, which passes over objects that can't be followed, and ends at objects of the class."""

    def __init__(self, kind: type | tuple[()]) -> None:
        super().__init__()
        self._kind, self.reads, self.effect = kind, False, ""
        self.communicates = False  # whether it reads objects of mpiad or mpi4py, or unknown ones
        self._methods: set[Any] = set()  # of classes that are named in the code

    def read(self, value: Any) -> None:
        if isinstance(value, self._kind):
            self.reads = True
            return
        module = getattr(value, "__module__", None) or type(value).__module__
        self.communicates |= str(module).partition(".")[0] in ("mpiad", "mpi4py")
        # Not by a context manager: in Python 3.12 its generator and the exception, which refers to the frames of all
        # callers, are a reference cycle.
        path = self.path
        try:
            super().read(value)
        except Unknown:
            self.communicates, self.path = True, path

    def _chain(self, value: Any, attributes: Iterable[str]) -> None:
        try:
            super()._chain(value, attributes)
        except Unknown:
            self.communicates = True

    def _wrapped(self, value: Any) -> Any:
        self.reads |= isinstance(value, self._kind)
        return super()._wrapped(value)

    def function(self, value: FunctionType) -> None:
        # The methods of a class assign attributes of an object that the code has created.
        if _changes(value.__code__, value in self._methods) or assigns_outside(value.__code__):
            self.effect = f"assigns variables or attributes in {value.__qualname__}"

    def method(self, value: object, is_new: bool) -> None:
        if is_new:
            self._methods.add(value)
        elif isinstance(value, FunctionType):
            self._methods.discard(value)
            self.function(value)
        super().method(value, is_new)

    def function_of_class(self, value: FunctionType) -> None:
        if self.path[-1][0] in self._methods:  # of the same object
            self._methods.add(value)

    def read_first_argument(self, fun: FunctionType, value: Any) -> None:
        self._methods.discard(fun)
        self.function(fun)
        super().read_first_argument(fun, value)

    def name(self, names: Mapping[str, object], name: str, owner: type | None = None) -> None:
        if name == "print":
            self.effect = self.effect or PRINTS

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, (list, dict, set, deque)) and name not in _READING:
            self.effect = f"changes an object by the method {name}"
        return super().attribute(value, name)


@lru_cache(1024)
def _changes(code: CodeType, is_method: bool) -> bool:
    """Return whether code assigns global variables, or attributes; in a method those of its first argument don't count."""
    before: object = None
    for instruction in dis.get_instructions(code):
        is_own = is_method and instruction.opname.endswith("_ATTR") and before in code.co_varnames[:1]
        if instruction.opname in _CHANGING and not is_own:
            return True
        before = instruction.argval if instruction.opname.startswith("LOAD_FAST") else None
        before = before[-1] if isinstance(before, tuple) else before  # since Python 3.13 one instruction for two names
    return False


def _is_communicator(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "mpi4py" and hasattr(value, "Get_rank")
