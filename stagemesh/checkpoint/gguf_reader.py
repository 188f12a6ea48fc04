"""Bounds-checked reading of the primitives of a GGUF file: numbers, strings, arrays. Torch-free.

Every length is compared with what is left of the file before memory is taken for it.
"""

import struct
from typing import Any, BinaryIO

from stagemesh.errors import CheckpointError

MAX_ARRAY_DEPTH = 4
"""Deepest nesting of arrays that is read; files in use have at most one level."""

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]


class GgufReader:
    """A forward-only reader over an open file; every method names the field it was reading.

    Args:
        file: the open file, at its start.
        path: named in errors.
        size: bytes of the file.
    """

    def __init__(self, file: BinaryIO, *, path: str, size: int) -> None:
        self._file = file
        self._path = path
        self._size = size
        self.position = 0

    @property
    def remaining(self) -> int:
        """Bytes after the position."""
        return self._size - self.position

    def fail(self, field: str, problem: str) -> CheckpointError:
        """The error for `field`, to be raised by the caller."""
        return CheckpointError(f"{self._path}: {field}: {problem}")

    def take(self, count: int, *, field: str) -> bytes:
        """The next `count` bytes."""
        if count > self._size - self.position:
            raise self.fail(
                field,
                f"needs {count} bytes at byte {self.position}, that is a file of at least "
                f"{self.position + count} bytes, the file has {self._size}",
            )
        raw = self._file.read(count)
        if len(raw) != count:
            raise self.fail(field, f"the file ended after {len(raw)} of {count} bytes")
        self.position += count
        return raw

    def u32(self, *, field: str) -> int:
        """An unsigned 32-bit number."""
        return int(_U32.unpack(self.take(4, field=field))[0])

    def u64(self, *, field: str) -> int:
        """An unsigned 64-bit number."""
        return int(_U64.unpack(self.take(8, field=field))[0])

    def count(self, *, field: str, min_item_bytes: int) -> int:
        """A 64-bit number of items, of which each takes at least `min_item_bytes` of the file."""
        count = self.u64(field=field)
        if count * min_item_bytes > self.remaining:
            raise self.fail(
                field,
                f"{count} items of at least {min_item_bytes} bytes do not fit in the "
                f"{self.remaining} bytes that are left of the file",
            )
        return count

    def string(self, *, field: str) -> str:
        """A length-prefixed UTF-8 string."""
        raw = self.take(self.u64(field=f"length of {field}"), field=field)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(field, f"not valid UTF-8: {error}") from error

    def value(self, value_type: int, *, field: str, depth: int = 0) -> Any:
        """A metadata value of the given GGUF type; an array becomes a list."""
        if value_type == _STRING:
            return self.string(field=field)
        if value_type == _ARRAY:
            return self._array(field=field, depth=depth + 1)
        scalar = self._scalar(value_type, field=field)
        number = scalar.unpack(self.take(scalar.size, field=field))[0]
        return self._bool(number, field=field) if value_type == _BOOL else number

    def _scalar(self, value_type: int, *, field: str) -> struct.Struct:
        scalar = _SCALARS.get(value_type)
        if scalar is None:
            raise self.fail(field, f"unknown value type {value_type}")
        return scalar

    def _bool(self, number: int, *, field: str) -> bool:
        if number > 1:
            raise self.fail(field, f"a bool must be 0 or 1, got {number}")
        return bool(number)

    def _array(self, *, field: str, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(field, f"arrays nest deeper than {MAX_ARRAY_DEPTH}")
        item_type = self.u32(field=f"item type of {field}")
        length_field = f"length of {field}"
        if item_type == _STRING:
            return self._strings(self.count(field=length_field, min_item_bytes=8), field=field)
        if item_type == _ARRAY:
            count = self.count(field=length_field, min_item_bytes=12)
            return [self._array(field=field, depth=depth + 1) for _ in range(count)]
        scalar = self._scalar(item_type, field=field)
        count = self.count(field=length_field, min_item_bytes=scalar.size)
        raw = self.take(count * scalar.size, field=field)
        numbers = struct.unpack(f"<{count}{scalar.format[-1]}", raw)
        if item_type == _BOOL:
            return [self._bool(number, field=field) for number in numbers]
        return list(numbers)

    def _strings(self, count: int, *, field: str) -> list[str]:
        """The string array, without a call per item: a vocabulary has 10**5 of them."""
        read, unpack = self._file.read, _U64.unpack
        position, size = self.position, self._size
        strings = []
        for index in range(count):
            head = read(8)
            length = unpack(head)[0] if len(head) == 8 else size
            position += 8
            if length > size - position:
                raise self.fail(
                    f"length of {field}[{index}]",
                    f"{length} bytes at byte {position} pass the end of the file at {size}",
                )
            raw = read(length)
            position += length
            try:
                strings.append(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise self.fail(f"{field}[{index}]", f"not valid UTF-8: {error}") from error
        self.position = position
        return strings
