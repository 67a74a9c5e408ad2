"""Documents out of files, one at a time: a row is held, never a file.

Lines end at \\n only: U+2028 and its like are ordinary characters, a \\r before \\n is dropped by the JSON reader, and the last
line needs no end. A row that cannot be used is a `Bad` with its line and why; reading goes on behind it.

Two stated limits keep memory bounded. A row over ROW_LIMIT_BYTES is rejected. A document over DOCUMENT_LIMIT_BYTES is cut, at
the last line end (else the last character) within the limit, into documents of their own; each cut is counted.
Rejected: json.load of whole files (memory), and column inference over rows (the order of rows would decide what loads).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from muletrain.data.sources import SourceFile, open_binary, readable

DOCUMENT_LIMIT_BYTES = 1 << 20
ROW_LIMIT_BYTES = 64 << 20
TO_THE_END = 1 << 62
"""The end of a piece whose length is not known: a compressed file, or all of any file."""
_CHUNK_BYTES = 1 << 18
_BOM = b"\xef\xbb\xbf"
_WIDE = {
    "utf-16": "the file is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8",
    "utf-32": "the file is UTF-32, not UTF-8; convert it: iconv -f UTF-32 -t UTF-8",
}
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number"} | {
    str: "a string",
    list: "an array",
    dict: "an object",
}
_SPACE = re.compile(r"[ \t\r\n]*")
_NEXT_ROW = re.compile(r"\n[ \t\r,]*(?=\{)")


@dataclass(frozen=True, slots=True)
class Document:
    """Text to train on. `text_utf8` is its UTF-8; `cut`: it goes on in the next document."""

    text: str
    text_utf8: bytes
    cut: bool


@dataclass(frozen=True, slots=True)
class Bad:
    """A row that cannot be used. `line` counts from 1 at the start of the piece; `place` is ":offset" where a byte is meant."""

    line: int
    why: str
    place: str = ""


@dataclass(frozen=True)
class Piece:
    """A byte range of a file; a row belongs to the piece that its first byte is in. Only JSON lines are split."""

    file: SourceFile
    start: int
    end: int


def documents(files: Sequence[SourceFile], text_key: str) -> Iterator[Document | Bad]:
    """All of several files, one after another."""
    for file in files:
        yield from PieceReader(Piece(file, 0, TO_THE_END), text_key)


class PieceReader:
    """Iterates a piece. After the end, `rows` is how many rows were met and `lines` how many lines the piece holds."""

    def __init__(self, piece: Piece, text_key: str) -> None:
        self.piece = piece
        self.rows = 0
        self.lines = 0
        self._key = text_key

    def __iter__(self) -> Iterator[Document | Bad]:
        form = self.piece.file.form
        if form == "binary":
            return
        if form in _WIDE:
            self.rows = 1
            yield Bad(1, _WIDE[form])
            return
        with readable(self.piece.file.path), open_binary(self.piece.file.path) as stream:
            if form == "text":
                yield from self._text(stream)
            elif form == "lines":
                yield from self._json_lines(stream)
            else:
                yield from self._json_values(stream)
        self.piece.file.check_unchanged()

    def _text(self, stream: BinaryIO) -> Iterator[Document | Bad]:
        self.rows = 1
        offset, line, held = 0, 1, b""
        while True:
            chunk = stream.read(DOCUMENT_LIMIT_BYTES + 1 - len(held))
            held += chunk
            if not held and offset:
                return
            part = held if len(held) <= DOCUMENT_LIMIT_BYTES else held[: _cut_at(held)]
            more = len(part) < len(held)
            try:
                body = part.removeprefix(_BOM) if offset == 0 else part
                yield Document(body.decode("utf-8"), body, more)
            except UnicodeDecodeError as error:
                yield _bad_byte(error, line, offset + len(part) - len(error.object))
            offset, line, held = offset + len(part), line + part.count(b"\n"), held[len(part) :]
            if not more:
                return

    def _json_lines(self, stream: BinaryIO) -> Iterator[Document | Bad]:
        offset = self.piece.start
        if offset:
            # A line belongs to the piece that holds its first byte: go on behind the first line end at or after start - 1.
            stream.seek(offset - 1)
            offset += _skip_line(stream) - 1
        while offset < self.piece.end and (line := stream.readline(ROW_LIMIT_BYTES + 1)):
            self.lines += 1
            length = len(line)
            if length > ROW_LIMIT_BYTES and not line.endswith(b"\n"):
                length += _skip_line(stream)
                self.rows += 1
                yield Bad(self.lines, f"the row is {length:,} bytes long, over the limit of {ROW_LIMIT_BYTES:,}; split it")
            else:
                body = line.removeprefix(_BOM) if offset == 0 else line
                yield from self._line(body, offset + len(line) - len(body))
            offset += length

    def _line(self, line: bytes, offset: int) -> Iterator[Document | Bad]:
        if not line.strip():
            return
        self.rows += 1
        try:
            yield from self._row(json.loads(line.rstrip(b"\r\n").decode("utf-8")), self.lines)
        except UnicodeDecodeError as error:
            yield _bad_byte(error, self.lines, offset)
        except RecursionError:
            yield Bad(self.lines, "the JSON is nested too deep")
        except ValueError as error:
            yield Bad(self.lines, _json_why(error))

    def _json_values(self, stream: BinaryIO) -> Iterator[Document | Bad]:
        values = _JsonValues(stream)
        for line, value, bad in values:
            self.rows += 1
            if bad:
                yield bad
            else:
                yield from self._row(value, line)
        self.lines = values.line

    def _row(self, value: Any, line: int) -> Iterator[Document | Bad]:
        if not isinstance(value, dict):
            yield Bad(line, f"the row is {_KINDS[type(value)]}, not an object")
        elif self._key not in value:
            keys = ", ".join(map(repr, list(value)[:8])) or "none"
            yield Bad(line, f"no key {self._key!r} (keys: {keys}); name the right one with data.text_key")
        elif not isinstance(value[self._key], str):
            yield Bad(line, f"{self._key!r} is {_KINDS[type(value[self._key])]}, not a string")
        else:
            try:
                whole = value[self._key].encode("utf-8")
            except UnicodeEncodeError:
                yield Bad(line, f"{self._key!r} holds half of a surrogate pair (\\ud800 to \\udfff), which is no character")
            else:
                yield from _cut(value[self._key], whole)


def _cut(text: str, whole: bytes) -> Iterator[Document]:
    """A text as one document, or several where it is over the limit."""
    if len(whole) <= DOCUMENT_LIMIT_BYTES:
        yield Document(text, whole, False)
        return
    start = 0
    while start < len(whole):
        window = whole[start : start + DOCUMENT_LIMIT_BYTES + 1]
        part = window if len(window) <= DOCUMENT_LIMIT_BYTES else window[: _cut_at(window)]
        start += len(part)
        yield Document(part.decode("utf-8"), part, start < len(whole))


def _cut_at(window: bytes) -> int:
    """Where to cut bytes that are over the limit: behind the last line end within it, else before a character's first byte."""
    newline = window.rfind(b"\n", 0, DOCUMENT_LIMIT_BYTES)
    if newline >= 0:
        return newline + 1
    at = DOCUMENT_LIMIT_BYTES
    while at > DOCUMENT_LIMIT_BYTES - 3 and window[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _skip_line(stream: BinaryIO) -> int:
    """Reads to behind the next line end in bounded memory; the number of bytes passed."""
    passed = 0
    while chunk := stream.readline(_CHUNK_BYTES):
        passed += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return passed


def _bad_byte(error: UnicodeDecodeError, line: int, offset: int) -> Bad:
    at = offset + error.start
    line += error.object[: error.start].count(b"\n")
    return _not_utf8(error.object[error.start], line, at)


def _not_utf8(byte: int, line: int, at: int) -> Bad:
    return Bad(line, f"byte 0x{byte:02x} at offset {at} of the file is not UTF-8; save the file as UTF-8", f":{at}")


def _json_why(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} (column {error.colno})"
    return f"not valid JSON: {error}"


class _JsonValues:
    """Values of one JSON array, or of a run of JSON values, read through a buffer that holds little more than one value.

    Iterates (line of the value's start, value, Bad or None). Behind a fault it goes on at the next line that starts an object.
    Bytes that are not UTF-8 are carried through as lone surrogates, so that only the value that holds one is lost.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.line = 1
        self._offset = 0
        self._stream = stream
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._at = 0
        self._done = False
        self._lost = False

    def __iter__(self) -> Iterator[tuple[int, Any, Bad | None]]:
        self._more(_CHUNK_BYTES)
        if self._text.startswith("\ufeff"):
            self._move(1)
        array = self._peek() == "["
        if array:
            self._move(self._at + 1)
        while self._peek() not in ("", "]" if array else ""):
            yield from self._one(array)
        if array and not self._peek():
            if not self._lost:  # else the end was passed over, and that has been said
                yield self.line, None, Bad(self.line, "the JSON array is not closed: the file is cut short")
        elif array:
            self._move(self._at + 1)
            if self._peek():
                yield self.line, None, Bad(self.line, "there is more behind the end of the JSON array; it is not read")
                self._to_end()

    def _one(self, array: bool) -> Iterator[tuple[int, Any, Bad | None]]:
        line = self.line
        try:
            value, end = self._decode()
        except RecursionError:
            yield line, None, self._resume(line, "the JSON is nested too deep")
            return
        except json.JSONDecodeError as error:
            where = line + self._text.count("\n", self._at, error.pos)
            yield line, None, self._resume(line, f"not valid JSON: {error.msg} (line {where})")
            return
        except ValueError as error:
            yield line, None, self._resume(line, f"not valid JSON: {error}")
            return
        yield line, value, self._bad_byte(end)
        self._move(end)
        if array and self._peek() == ",":
            self._move(self._at + 1)
        elif array and self._peek() not in ("]", ""):
            fault = "a comma is missing between two values of the JSON array"
            yield self.line, None, Bad(self.line, fault) if self._peek() in ("{", "[") else self._resume(self.line, fault)

    def _decode(self) -> tuple[Any, int]:
        """The value at the cursor and where it ends; reads on while the value may only be cut by the buffer's end."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
                if end < len(self._text) or self._done:  # a number at the buffer's end may go on
                    return value, end
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - 16 or error.msg.startswith("Unterminated string")
                if self._done or not cut or len(self._text) - self._at > ROW_LIMIT_BYTES:
                    raise
            # Reading as much again as is held keeps the total work linear in the size of the value.
            self._more(max(_CHUNK_BYTES, len(self._text) - self._at))

    def _bad_byte(self, end: int) -> Bad | None:
        raw = self._text[self._at : end]
        try:
            raw.encode("utf-8")
        except UnicodeEncodeError as error:
            at = self._offset + len(raw[: error.start].encode("utf-8", "surrogateescape"))
            return _not_utf8(ord(raw[error.start]) - 0xDC00, self.line + raw.count("\n", 0, error.start), at)
        return None

    def _resume(self, line: int, why: str) -> Bad:
        """Moves behind the fault at the cursor, to the next line that starts an object."""
        while True:
            match = _NEXT_ROW.search(self._text, self._at)
            if match:
                self._move(match.end())
                return Bad(line, why)
            if self._done:
                self._move(len(self._text))
                self._lost = True
                return Bad(line, f"{why}; nothing behind it could be read")
            self._move(max(self._at, len(self._text) - 64))
            self._more(_CHUNK_BYTES)

    def _peek(self) -> str:
        """The next character that is not white space, with the cursor on it; "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._move(match.end() if match else self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if self._done:
                return ""
            self._more(_CHUNK_BYTES)

    def _to_end(self) -> None:
        while not self._done:
            self._move(len(self._text))
            self._more(_CHUNK_BYTES)
        self._move(len(self._text))

    def _move(self, to: int) -> None:
        passed = self._text[self._at : to]
        self.line += passed.count("\n")
        self._offset += len(passed.encode("utf-8", "surrogateescape"))
        self._at = to

    def _more(self, count: int) -> None:
        raw = self._stream.read(count)
        self._done = not raw
        self._text = self._text[self._at :] + self._utf8.decode(raw, final=not raw)
        self._at = 0
