"""Classes, functions and enum members by their import name. Safety (V6) is kept here.

What a pool says is only a name. To turn it into an object:

1. The module is looked up in ``sys.modules``. Nothing is ever imported because of it.
2. The steps below a module go through the ``__dict__`` of classes only, so no ``__getattr__``
   runs and no module leads to another. What is found must itself carry the very same name.
3. Nothing found is called. Instances are made by ``object``, ``tuple`` or ``dict`` below their
   class, attributes are put into their ``__dict__`` or slots; a class with ``__del__`` is refused,
   since dropping such an object would run it. (The union of several flags is made by ``enum``.)
4. Classes and functions that the caller may call later come from the standard library only if
   they are in ``STANDARD``: a pool must not be able to slip ``os.system`` into a place where an
   activation function was saved.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from portus.errors import CorruptionError, UsageError

_BUILTINS: Final = (
    "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple "
    "abs all any len max min pow round sorted sum"
)
_PATHS: Final = frozenset(
    {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
)
STANDARD: Final[Mapping[str, frozenset[str]]] = {
    "builtins": frozenset(_BUILTINS.split()),
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
    "datetime": frozenset({"date", "datetime", "time", "timedelta", "timezone"}),
    "math": frozenset(
        {"ceil", "cos", "exp", "floor", "log", "log10", "log2", "sin", "sqrt", "tanh"}
    ),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # their home in CPython 3.13
}
"""The only names of the standard library that may be saved and loaded as classes or functions."""

_PARTIAL_OF: Final = ("torch.optim.", "torch.nn.")


FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, np.ufunc, type(np.mean))
"""What counts as a function."""


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """Where a class or function is found: ``module`` and the dotted ``qualname`` in it."""

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


def find(name: Name) -> object:
    """The class or function of that name, if its module is imported already.

    Raises ``UsageError`` if it is not, or does not hold the name any more.
    """
    found: object = sys.modules.get(name.module)  # V6: looked up, never imported
    if not isinstance(found, types.ModuleType):
        raise UsageError(
            f"{name} is needed, and {name.module} is not imported; import it before loading"
        )
    *outer, last = name.qualname.split(".")
    for step in outer:
        found = vars(found).get(step)
        if not isinstance(found, type):
            raise UsageError(f"{name.module} has no class {step} on the way to {name}")
    if last not in vars(found):
        raise UsageError(_gone(name))
    found = vars(found)[last]
    if isinstance(found, staticmethod):
        found = found.__func__
    named = isinstance(found, (type, *FUNCTIONS)) and _own_name(found) == last
    if not named or _own_module(found) != name.module:
        raise UsageError(f"{name} is not what it was when the state was saved; it is {found!r:.80}")
    return found


def name_of(value: object) -> Name:
    """The name under which ``find`` gives exactly ``value``. Raises ``UsageError`` if none does."""
    module = _own_module(value)
    if module is not None:
        for qualname in (getattr(value, "__qualname__", None), _own_name(value)):
            name = Name(module, qualname) if isinstance(qualname, str) else None
            if name is not None and "<" not in name.qualname and _is_at(name, value):
                return name
    raise UsageError(
        f"{value!r:.80} cannot be found again by an import name; define it at the top level of a "
        "module"
    )


def callable_name(value: object) -> Name:
    """``name_of`` a class or function that may be saved. Raises ``UsageError`` if it may not."""
    name = name_of(value)
    if not _may_be_called(name):
        raise UsageError(f"{name} belongs to the standard library and is not one of those allowed")
    return name


def find_callable(name: Name) -> object:
    """The class or function of that name. It is not called here. Raises ``UsageError``."""
    if not _may_be_called(name):
        raise UsageError(f"{name} belongs to the standard library and is not one of those allowed")
    return find(name)


def partial_name(value: functools.partial[object]) -> Name:
    """The name of the class under a ``functools.partial``. Raises ``UsageError``.

    A partial is complete but for its call, so only the classes of ``torch.optim`` and
    ``torch.nn`` are let in.
    """
    name = name_of(value.func)
    find_partial(name)
    return name


def find_partial(name: Name) -> type:
    """The class that a saved ``functools.partial`` may hold. Raises ``UsageError``."""
    found = find(name) if f"{name.module}.".startswith(_PARTIAL_OF) else None
    if not isinstance(found, type):
        raise UsageError(
            f"a partial of {name} is not allowed, only of classes in torch.optim, torch.nn"
        )
    return found


def member_names(value: enum.Enum) -> list[str]:
    """The names whose union is ``value``: one, but for a flag. Raises ``UsageError``."""
    members = type(value)._member_map_
    if value._name_ in members:
        return [str(value._name_)]
    if isinstance(value, enum.Flag):
        names = [name for name, member in members.items() if _is_in(member, value)]
        if find_member(type(value), names) == value:
            return names
    raise UsageError(f"{value!r} is not a member of {type(value).__name__}")


def find_member(owner: object, names: Iterable[str]) -> enum.Enum:
    """The member of the enum ``owner`` with these names. Raises ``UsageError``."""
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum)):
        raise UsageError(f"{owner!r:.80} is not an enum now")
    try:
        members = [owner._member_map_[name] for name in names]
    except KeyError as error:
        raise UsageError(f"{owner.__name__} has no member {error} now") from error
    if len(members) == 1:
        return members[0]
    if not issubclass(owner, enum.Flag):
        raise CorruptionError(f"{len(members)} members of {owner.__name__}, expected 1")
    union: enum.Flag = functools.reduce(operator.or_, members, owner(0))
    return union


def fields_of(value: object) -> dict[str, object]:
    """The instance attributes of ``value``, those in slots too."""
    fields = dict(getattr(value, "__dict__", {}))
    for name, slot in _slots(type(value)).items():
        try:
            fields[name] = slot.__get__(value)
        except AttributeError:  # never set
            continue
    return fields


def new_dataclass(owner: object, fields: Mapping[str, object]) -> object:
    """An instance of the dataclass ``owner`` with these attributes; ``__init__`` is not run."""
    if not (isinstance(owner, type) and dataclasses.is_dataclass(owner)):
        raise UsageError(f"{owner!r:.80} is not a dataclass now")
    made: object = object.__new__(_harmless(owner))
    slots = _slots(owner)
    for name, value in fields.items():
        if name in slots:
            slots[name].__set__(made, value)
        elif hasattr(made, "__dict__"):
            made.__dict__[name] = value
        else:
            raise UsageError(f"{owner.__name__} has no place for its field {name} now")
    return made


def new_namedtuple(owner: object, fields: Mapping[str, object]) -> object:
    """An instance of the named tuple class ``owner``; its ``__new__`` is not run."""
    if not (isinstance(owner, type) and issubclass(owner, tuple)):
        raise UsageError(f"{owner!r:.80} is not a named tuple now")
    expected = getattr(owner, "_fields", None)
    if expected != tuple(fields):
        raise UsageError(
            f"{owner.__name__} has fields {expected} now, but was saved with {[*fields]}"
        )
    return tuple.__new__(_harmless(owner), fields.values())


def new_mapping(owner: object, items: Mapping[object, object]) -> dict[object, object]:
    """An instance of ``owner``, a subclass of dict, with ``items``; none of its code is run."""
    if not (isinstance(owner, type) and issubclass(owner, dict)):
        raise UsageError(f"{owner!r:.80} is not a subclass of dict now")
    base: type[dict[object, object]] = OrderedDict if issubclass(owner, OrderedDict) else dict
    made: dict[object, object] = base.__new__(_harmless(owner))
    for key, value in items.items():
        base.__setitem__(made, key, value)
    return made


def _harmless(owner: type) -> type:
    if any("__del__" in vars(base) for base in owner.__mro__):
        raise UsageError(f"{owner.__name__} has __del__, which would run when dropped")
    return owner


def _slots(owner: type) -> dict[str, types.MemberDescriptorType]:
    return {
        name: slot
        for base in reversed(owner.__mro__)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    }


def _is_in(member: enum.Enum, value: enum.Flag) -> bool:
    return isinstance(member, enum.Flag) and bool(member) and (member | value) == value


def _own_name(value: object) -> str | None:
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else None


def _own_module(value: object) -> str | None:
    if isinstance(value, np.ufunc) and not hasattr(value, "__module__"):
        return "numpy"  # numpy 1 does not say it of its own; ``find`` sees that it is there
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) else None


def _is_at(name: Name, value: object) -> bool:
    try:
        return find(name) is value
    except UsageError:
        return False


def _may_be_called(name: Name) -> bool:
    package = name.module.partition(".")[0]
    if package not in sys.stdlib_module_names and package != "builtins":
        return True
    return name.qualname in STANDARD.get(name.module, ())


def _gone(name: Name) -> str:
    if name.module == "__main__":
        return f"{name.qualname} was defined in the script that saved; define it before loading"
    return f"{name.module} has no {name.qualname} now; bring it back, or load without this leaf"
