"""Which files a source means, and what each of them holds.

A file is looked at by its content: a JSON array in a `.jsonl`, JSON lines in a `.json` and one object over many lines are all
read for what they are. A name only decides between "a text, one document" and "rows": `.json`, `.jsonl` and `.ndjson` are
rows, and so is any other file that starts with a JSON object holding the text key. Names that start with a dot are left out of
folders. Everything is read as UTF-8, whatever the locale says. Rejected: guessing encodings (a wrong guess trains on garbage).
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from typing import BinaryIO, Literal, cast

from muletrain.spec.errors import InputError

Form = Literal["text", "lines", "values", "binary", "utf-16", "utf-32"]
"""text: one document; lines: a JSON value a line; values: a JSON array or values spread over lines; the rest: not read."""
HEAD_BYTES = 1 << 16
_ROW_SUFFIXES = (".json", ".jsonl", ".ndjson")
_PACKED_SUFFIXES = (".gz", ".zst")
_BOM = b"\xef\xbb\xbf"
# Control characters that text does not hold: all but backspace, the white ones and escape.
_CONTROL = b"\x00\x01\x02\x03\x04\x05\x06\x07\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1c\x1d\x1e\x1f\x7f"
_HASH_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """One input file as it was when it was hashed."""

    path: str
    """As the user would write it: what messages name."""
    size: int
    mtime_ns: int
    digest: str
    """blake2b of the bytes on disk, hex."""
    form: Form

    @property
    def packed(self) -> bool:
        """Compressed: it can only be read from its start."""
        return self.path.endswith(_PACKED_SUFFIXES)

    def check_unchanged(self) -> None:
        """Raises InputError if the file is no longer the one that was hashed."""
        now = os.stat(self.path)
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise InputError(f"{self.path}: the file changed while it was being read; start again when it is complete")


def open_binary(path: str) -> BinaryIO:
    """Opens a file for bytes, decompressed by suffix (.gz, .zst). Raises InputError where no decompressor is installed."""
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.endswith(".zst"):
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError:
            raise InputError(f"{path}: reading .zst needs the package zstandard; pip install zstandard, or unpack it") from None
        return cast(BinaryIO, io.BufferedReader(zstandard.open(path, "rb")))
    return open(path, "rb")


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turns what reading a file may raise into InputError."""
    try:
        yield
    except (EOFError, zlib.error):
        raise InputError(f"{path}: the compressed file is cut short or damaged; fetch it again") from None
    except OSError as error:
        raise InputError(f"{path}: this file cannot be read: {error.strerror or error}") from None


def find_files(sources: Sequence[str]) -> list[str]:
    """The files that sources name: files as given, folders recursively and sorted, globs sorted; each file once.

    Raises InputError naming every source that is nothing.
    """
    found: dict[str, str] = {}
    problems = []
    for source in map(os.path.expanduser, sources):
        if os.path.isfile(source):
            names = [source]
        elif os.path.isdir(source):
            names = _walk(source)
        else:
            matches = sorted(glob(source, recursive=True))
            names = [name for match in matches for name in (_walk(match) if os.path.isdir(match) else [match])]
            if not matches:
                problems.append(f"data.source: {source!r} is no file or folder, and matches none; check the path")
                continue
        if not names:
            problems.append(f"data.source: the folder {source!r} holds no file; check the path")
        for name in names:
            found.setdefault(os.path.realpath(name), name)
    if problems:
        raise InputError(*problems)
    return list(found.values())


def _walk(folder: str) -> list[str]:
    names = []
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names += [os.path.join(where, name) for name in files if not name.startswith(".")]
    return sorted(name for name in names if os.path.isfile(name))


def examine(paths: Sequence[str], text_key: str, threads: int, progress: Callable[[int], None]) -> list[SourceFile]:
    """Hashes and classifies files, in threads (hashing frees the interpreter). `progress` is told bytes as they are read."""

    def one(path: str) -> SourceFile:
        with readable(path):
            return _examine(path, text_key, progress)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, paths))


def _examine(path: str, text_key: str, progress: Callable[[int], None]) -> SourceFile:
    with open_binary(path) as stream:
        form = classify(path, stream.read(HEAD_BYTES), text_key)
    digest = hashlib.blake2b(digest_size=20)
    status = os.stat(path)
    with open(path, "rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return SourceFile(path, status.st_size, status.st_mtime_ns, digest.hexdigest(), form)


def classify(path: str, head: bytes, text_key: str) -> Form:
    """What a file holds, from its name and its first HEAD_BYTES (decompressed)."""
    wide = _wide_encoding(head)
    if wide:
        return wide
    text = head.removeprefix(_BOM).decode("utf-8", "replace")
    if not path.removesuffix(".gz").removesuffix(".zst").endswith(_ROW_SUFFIXES):
        # Bytes that are not UTF-8 alone make no binary file: text in another encoding must be named, not skipped.
        if b"\0" in head or len(head.translate(None, _CONTROL)) < len(head) * 0.95:
            return "binary"
        if not _starts_with_row(text, text_key):
            return "text"
    return _row_form(text, whole=len(head) < HEAD_BYTES)


def _wide_encoding(head: bytes) -> Literal["utf-16", "utf-32"] | None:
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    # Without a mark: mostly ASCII text in UTF-16 has a zero in nearly every second byte, and hardly any in the others.
    sample = head[:8192]
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    if len(sample) >= 4 and max(even, odd) > len(sample) * 0.4 and min(even, odd) < len(sample) * 0.02:
        return "utf-16"
    return None


def _starts_with_row(text: str, text_key: str) -> bool:
    start = text.lstrip().removeprefix("[").lstrip()
    if not start.startswith("{"):
        return False
    try:
        value, _ = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(value.get(text_key), str)


def _row_form(text: str, whole: bool) -> Literal["lines", "values"]:
    """JSON lines, or values that do not keep to lines. `whole`: the text is all of the file."""
    start = text.lstrip()
    first, newline, rest = start.partition("\n")
    if not newline and not whole:  # a first row longer than the head
        return "values" if re.match(r"\[\s*\{", start) else "lines"
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return "values" if _spans_lines(start, first, whole) else "lines"
    # An array alone in its file is the data set; one line that is an array, among other lines, is a bad row.
    return "values" if isinstance(value, list) and not rest.strip() else "lines"


def _spans_lines(start: str, first: str, whole: bool) -> bool:
    """Whether the value that begins on the first line, which does not hold it all, goes on over the next ones."""
    if start.startswith("["):
        return True
    try:
        json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        return not whole and first.rstrip().endswith(("{", "[", ",", ":"))
    return start.startswith("{")
