"""The pickle inside a PyTorch file, read without running it: a stack machine of 33 instructions that only builds
dictionaries, lists, numbers, text and inert records of tensors.

No function is ever looked up or called, so there is nothing to subvert: a name other than the few below, or any
other instruction, is refused by name before it could mean anything.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynajax.checkpoint.wording import plain, quoted
from dynajax.errors import ModelError

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
_UNTYPED = "uint8"  # counted in bytes


@dataclass(frozen=True, slots=True)
class Storage:
    """What a file says of one storage: `numel` items of `dtype` in the member data/`key`. None of it is checked."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class View:
    """What a file says of one tensor. The types are right, the numbers are unchecked."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Ordered(dict):
    """Stands for collections.OrderedDict, whose attributes are read and dropped."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Name:
    """A global the file may mention. Not callable."""

    role: str  # ordered, tensor, parameter, storage
    dtype: str = ""


_NAMES = {
    "collections.OrderedDict": _Name("ordered"),
    "torch._utils._rebuild_tensor_v2": _Name("tensor"),
    "torch._utils._rebuild_parameter": _Name("parameter"),
    **{f"torch.{name}": _Name("storage", dtype) for name, dtype in _STORAGES.items()},
    **dict.fromkeys(("torch.storage.UntypedStorage", "torch.UntypedStorage"), _Name("storage", _UNTYPED)),
}
# The type of a TypedStorage stands elsewhere, in what is not read here: naming one is allowed, using it is not.
_NAMES |= dict.fromkeys(("torch.storage.TypedStorage", "torch.TypedStorage"), _Name("storage"))


_NAME_LINES = {"stringnl": 1, "stringnl_noescape": 1, "stringnl_noescape_pair": 2}


def load(raw: bytes, where: str) -> object:
    """What the pickle describes: Ordered, dict, list, tuple, str, numbers, None, View and Storage.

    `where` names the file in the ModelError that everything else ends in. Time and memory are bounded by a small
    multiple of len(raw).
    """
    machine, file = _Machine(where), io.BytesIO(raw)
    try:
        while (code := file.read(1)) != b".":
            opcode = _OPCODES.get(code)
            if opcode is None:
                raise machine.refused(f"byte {quoted(code)} is no pickle instruction")
            action = _ACTIONS.get(opcode.name)
            wanted = opcode.arg is not None and (action or opcode.name == "INST")
            argument = _argument(opcode.arg, file) if wanted else None
            if action is None:
                raise machine.forbidden(opcode.name, argument)
            action(machine, argument)
    except (ValueError, IndexError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        raise machine.refused(f"truncated or corrupt: {plain(str(error)[:60])}") from error
    if file.read(1) or len(machine.stack) != 1 or machine.marks:
        raise machine.refused("it does not end where it should")
    return machine.stack[0]


def _argument(kind: pickletools.ArgumentDescriptor, file: io.BytesIO) -> Any:
    """What follows an instruction. Names with a backslash are refused: the library would undo escapes in them, and
    warns of those that it does not know."""
    start = file.tell()
    for _ in range(_NAME_LINES.get(kind.name, 0)):
        if b"\\" in file.readline():
            raise ValueError("a name with a backslash")
    file.seek(start)
    return kind.reader(file)


class _Machine:
    def __init__(self, where: str):
        self.where = where
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}

    def refused(self, why: str) -> ModelError:
        return ModelError(f"{self.where} is not a file of tensors: {why}; nothing of it was run")

    def forbidden(self, opcode: str, argument: object) -> ModelError:
        name = f" {plain(argument.replace(' ', '.'))}" if isinstance(argument, str) else ""
        return self.refused(f"it holds the instruction {opcode}{name}, which tensors do not need")

    def push(self, value: object) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise self.refused("its stack is empty")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.push(items)

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise self.refused(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise self.refused(f"it sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                raise self.refused(f"a key is a {type(key).__name__}, not text or a number")
            target[key] = value

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def name(self, module: object, name: object) -> None:
        dotted = f"{module}.{name}" if type(module) is type(name) is str else None
        if dotted not in _NAMES:
            shown = plain(dotted) if dotted else "a name that is no text"
            raise self.refused(f"it asks for {shown}, which tensors do not need")
        self.push(_NAMES[dotted])

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def reduce(self) -> None:
        """What calling one of the three names would build, built by hand."""
        arguments, name = self.stack.pop(), self.stack.pop()
        role = name.role if isinstance(name, _Name) and type(arguments) is tuple else ""
        if role == "ordered" and arguments == ():
            self.push(Ordered())
        elif role == "parameter" and len(arguments) == 3 and isinstance(arguments[0], View):
            self.push(arguments[0])
        elif role == "tensor" and len(arguments) in (6, 7):
            self.push(self.view(*arguments[:4]))
        else:
            raise self.refused("it calls something with arguments that do not belong to it")

    def view(self, storage: object, offset: object, shape: object, stride: object) -> View:
        sizes, steps = _integers(shape), _integers(stride)
        if isinstance(storage, Storage) and isinstance(offset, int) and sizes is not None and steps is not None:
            return View(storage, int(offset), sizes, steps)
        raise self.refused("a tensor's storage, offset, shape or stride has the wrong type")

    def build(self) -> None:
        """The state of an OrderedDict (its `_metadata`) is dropped; nothing else has one."""
        self.stack.pop()
        if type(self.stack[-1]) is not Ordered:
            raise self.refused(f"it sets attributes of a {type(self.stack[-1]).__name__}")

    def storage(self) -> None:
        known = self.stack.pop()
        match known:
            case ("storage", _Name(role="storage", dtype=dtype), str(key), str(), int(numel)) if dtype:
                self.push(Storage(dtype, key, int(numel)))
            case _:
                raise self.refused(f"its storage is described by {quoted(_shallow(known))}")


def _integers(value: object) -> tuple[int, ...] | None:
    """`value` if it is a tuple of integers, and no bool among them."""
    return value if isinstance(value, tuple) and all(type(item) is int for item in value) else None


def _shallow(value: object) -> object:
    """Something whose repr is short: nested values may be huge."""
    return tuple(type(item).__name__ for item in value[:8]) if type(value) is tuple else type(value).__name__


_Action = Callable[[_Machine, Any], object]
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_CONSTANTS = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
)  # fmt: skip
_ACTIONS: dict[str, _Action] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, argument: None),
    **dict.fromkeys(_CONSTANTS, lambda machine, argument: machine.push(argument)),
    "NONE": lambda machine, argument: machine.push(None),
    "NEWTRUE": lambda machine, argument: machine.push(True),
    "NEWFALSE": lambda machine, argument: machine.push(False),
    "MARK": lambda machine, argument: machine.mark(),
    "EMPTY_LIST": lambda machine, argument: machine.push([]),
    "EMPTY_TUPLE": lambda machine, argument: machine.push(()),
    "EMPTY_DICT": lambda machine, argument: machine.push({}),
    "APPEND": lambda machine, argument: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, argument: machine.extend(machine.since_mark()),
    "TUPLE": lambda machine, argument: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, argument: machine.tuple_of(1),
    "TUPLE2": lambda machine, argument: machine.tuple_of(2),
    "TUPLE3": lambda machine, argument: machine.tuple_of(3),
    "SETITEM": lambda machine, argument: machine.set_item(),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.since_mark()),
    "MEMOIZE": lambda machine, argument: machine.put(len(machine.memo)),
    "BINPUT": lambda machine, argument: machine.put(argument),
    "LONG_BINPUT": lambda machine, argument: machine.put(argument),
    "BINGET": lambda machine, argument: machine.push(machine.memo[argument]),
    "LONG_BINGET": lambda machine, argument: machine.push(machine.memo[argument]),
    "GLOBAL": lambda machine, argument: machine.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, argument: machine.stack_name(),
    "REDUCE": lambda machine, argument: machine.reduce(),
    "BUILD": lambda machine, argument: machine.build(),
    "BINPERSID": lambda machine, argument: machine.storage(),
}
