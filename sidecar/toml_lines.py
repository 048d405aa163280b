"""Where each key of a TOML text stands: what the parser does not tell, for messages.

The text must already have been accepted by a TOML parser; this scanner finds its way by the
punctuation and never judges.
"""

import re
from typing import TypeAlias

import tomli

KeyPath: TypeAlias = tuple[str | int, ...]
"""Table and key names from the root, positions in arrays as numbers."""

_SPACE = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|[^\s.=\[\]{}"\'#,]+')
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\]|\\.)*"|\'[^\']*\'', re.DOTALL
)
# The second part is the time of a date written with a space between the two.
_SCALAR = re.compile(r"[^\s,\[\]{}#]+(?: \d\d:[^\s,\[\]{}#]*)?")


def locate(text: str) -> dict[KeyPath, int]:
    """Line numbers (from 1) of every table, key and array element of a valid TOML `text`.

    A table has the line of its header, or of the first key or header that implies it.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int | None:
    """The line of `path`, or of the nearest table around it that is in the text."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


class _Scanner:
    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._arrays: dict[KeyPath, int] = {}
        """Arrays of tables, with the position of the last element."""

    def document(self) -> None:
        table: KeyPath = ()
        while self._peek():
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)

    def _peek(self) -> str:
        """The next character that is not space or comment, '' at the end."""
        self._take(_SPACE)
        return self._text[self._at : self._at + 1]

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            msg = f"not TOML at offset {self._at}"
            raise ValueError(msg)
        self._at = found.end()
        return found.group()

    def _mark(self, path: KeyPath, line: int) -> None:
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], line)

    def _names(self) -> tuple[list[str], int]:
        """A dotted key and its line."""
        names: list[str] = []
        self._peek()
        line = self._text.count("\n", 0, self._at) + 1
        while True:
            self._peek()
            name = self._take(_NAME)
            names.append(tomli.loads(f"name = {name}")["name"] if name[0] in "\"'" else name)
            if self._peek() != ".":
                return names, line
            self._at += 1

    def _header(self) -> KeyPath:
        repeated = self._text.startswith("[[", self._at)
        self._at += 2 if repeated else 1
        names, line = self._names()
        self._peek()
        self._at += 2 if repeated else 1
        path: KeyPath = ()
        for name in names[:-1]:
            path = (*path, name)
            if path in self._arrays:
                path = (*path, self._arrays[path])
        path = (*path, names[-1])
        if repeated:
            self._arrays[path] = self._arrays.get(path, -1) + 1
            path = (*path, self._arrays[path])
        self._mark(path, line)
        return path

    def _pair(self, table: KeyPath) -> None:
        names, line = self._names()
        path = (*table, *names)
        self._mark(path, line)
        self._peek()
        self._at += 1
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        match self._peek():
            case "[":
                self._array(path)
            case "{":
                self._inline_table(path)
            case '"' | "'":
                self._take(_STRING)
            case _:
                self._take(_SCALAR)

    def _array(self, path: KeyPath) -> None:
        self._at += 1
        position = 0
        while self._peek() != "]":
            self._mark((*path, position), self._text.count("\n", 0, self._at) + 1)
            self._value((*path, position))
            position += 1
            self._comma()
        self._at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._at += 1
        while self._peek() != "}":
            self._pair(path)
            self._comma()
        self._at += 1

    def _comma(self) -> None:
        if self._peek() == ",":
            self._at += 1
