"""Reading: by content, line by line, every bad row named, nothing guessed."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muletrain.data import read
from muletrain.data.read import TO_THE_END, Bad, Document, Piece, PieceReader
from muletrain.data.sources import classify, examine, find_files
from muletrain.data.units import pieces_of
from muletrain.spec.errors import InputError


def read_file(path: Path, key: str = "text") -> tuple[list[str], list[Bad], PieceReader]:
    (file,) = examine([str(path)], key, 1, lambda _: None)
    reader = PieceReader(Piece(file, 0, TO_THE_END), key)
    items = list(reader)
    return [i.text for i in items if isinstance(i, Document)], [i for i in items if isinstance(i, Bad)], reader


def read_bytes(tmp_path: Path, raw: bytes, name: str = "a.jsonl") -> tuple[list[str], list[Bad], PieceReader]:
    (tmp_path / name).write_bytes(raw)
    return read_file(tmp_path / name)


def test_D01_bad_lines_are_all_named(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {i}"}) for i in range(1, 101)]
    faults = {
        57: '{"text": "x"',
        80: "[]",
        81: "null",
        82: '"str"',
        90: '{"txt": "x"}',
        91: '{"text": 5}',
        92: '{"text": null}',
    }
    faults |= {93: '{"text": "\\ud800"}', 94: "[" * 100_000, 95: '{"text": ' + "9" * 5000 + "}"}
    for line, fault in faults.items():
        lines[line - 1] = fault
    texts, bad, reader = read_bytes(tmp_path, "\n".join(lines).encode())
    assert [row.line for row in bad] == list(faults)
    assert texts == [f"row {i}" for i in range(1, 101) if i not in faults]
    assert reader.rows == reader.lines == 100
    why = {row.line: row.why for row in bad}
    assert "not valid JSON" in why[57] and "array" in why[80] and "null" in why[81] and "a string" in why[82]
    assert "'txt'" in why[90] and "a number" in why[91] and "null" in why[92] and "surrogate" in why[93] and "deep" in why[94]


@pytest.mark.parametrize("first", ['{"text": "x"', "[]", "null", '{"text": "x",', "garbage", "3"])
def test_D01_a_bad_first_line_does_not_change_what_the_file_is(tmp_path: Path, first: str) -> None:
    texts, bad, _ = read_bytes(tmp_path, f'{first}\n{{"text": "a"}}\n{{"text": "b"}}\n'.encode())
    assert texts == ["a", "b"] and [row.line for row in bad] == [1]


ROWS = [{"text": "a\nb", "meta": {"x": [1, {"y": 2}]}}, {"text": "ç"}, {"text": "c"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a"])
@pytest.mark.parametrize(
    "content",
    [
        "\n".join(map(json.dumps, ROWS)),
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "\n".join(json.dumps(row, indent=0, ensure_ascii=False) for row in ROWS),
        "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n",
        "\ufeff" + json.dumps(ROWS),
        "\ufeff\n" + "\r\n".join(map(json.dumps, ROWS)) + "\r\n",
    ],
    ids=["lines", "array", "indented", "spread", "array-by-line", "bom-array", "bom-lines"],
)
def test_D02_json_is_read_by_content(tmp_path: Path, name: str, content: str) -> None:
    texts, bad, reader = read_bytes(tmp_path, content.encode(), name)
    assert (texts, bad, reader.rows) == (["a\nb", "ç", "c"], [], 3)


def test_D02_array_larger_than_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_CHUNK_BYTES", 32)
    rows = [{"text": f"{i} " + "é" * i, "n": i} for i in range(100)]
    for content in (json.dumps(rows, ensure_ascii=False), "\n".join(json.dumps(row, indent=1) for row in rows)):
        texts, bad, _ = read_bytes(tmp_path, content.encode())
        assert (texts, bad) == ([row["text"] for row in rows], [])


def test_D02_a_fault_that_hides_the_rest_is_named_once(tmp_path: Path) -> None:
    texts, bad, _ = read_bytes(tmp_path, b'[{"text": "a"}, {"text": "b" oops}, {"text": "c"}]')
    assert texts == ["a"]
    assert len(bad) == 1 and bad[0].why.endswith("nothing behind it could be read")


def test_D02_faults_in_an_array_are_named_and_passed(tmp_path: Path) -> None:
    raw = b'[\n{"text": "a"},\nnull,\n{"text": "x"\n,{"text": "b"},\n{"text": "\xe9"},\n{"text": "c"}\n{"text": "d"},\n'
    texts, bad, _ = read_bytes(tmp_path, raw)
    assert texts == ["a", "b", "c", "d"]
    assert [(row.line, row.place) for row in bad] == [(3, ""), (4, ""), (6, f":{raw.index(0xE9)}"), (8, ""), (9, "")]
    assert "comma" in bad[3].why and "not closed" in bad[4].why


def test_D04_utf8_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(json.dumps({"text": "你好 é"}, ensure_ascii=False).encode())
    (tmp_path / "c.txt").write_bytes("你好 é".encode())
    program = (
        "import locale, sys; from muletrain.data.sources import examine; from muletrain.data.read import documents\n"
        "assert 'utf' not in locale.getencoding().lower(), locale.getencoding()\n"
        "print([ascii(d.text) for d in documents(examine(sys.argv[1:], 'text', 1, lambda _: None), 'text')])"
    )
    environment = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program, str(tmp_path / "c.jsonl"), str(tmp_path / "c.txt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str([ascii("你好 é")] * 2), done.stderr


def test_D04_bom_dropped_utf16_told_bad_byte_named(tmp_path: Path) -> None:
    assert read_bytes(tmp_path, b"\xef\xbb\xbfab", "a.txt")[0] == ["ab"]
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        for name in ("a.txt", "a.jsonl"):
            texts, bad, _ = read_bytes(tmp_path, '{"text": "some words"}\n'.encode(encoding), name)
            assert texts == [] and encoding[:6].upper() in bad[0].why and "iconv" in bad[0].why
    raw = 'é\n{"text": "a"}\n{"text": "caf'.encode()[3:] + b'\xe9"}\n{"text": "b"}'
    texts, bad, _ = read_bytes(tmp_path, raw)
    assert texts == ["a", "b"] and (bad[0].line, bad[0].place) == (2, f":{raw.index(0xE9)}") and "0xe9" in bad[0].why
    raw = "é\nb".encode() + b"\xe9c"
    texts, bad, _ = read_bytes(tmp_path, raw, "b.txt")
    assert texts == [] and (bad[0].line, bad[0].place) == (2, ":4")


def test_D04_bad_byte_behind_a_bom_counts_from_the_file_start(tmp_path: Path) -> None:
    for name, raw in {"a.txt": b"\xef\xbb\xbfab\xff", "a.jsonl": b'\xef\xbb\xbf{"text": "\xff"}\n{"text": "b"}'}.items():
        assert read_bytes(tmp_path, raw, name)[1][0].place == f":{raw.index(0xFF)}"


def test_D06_documents_over_the_limit_are_cut_and_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "DOCUMENT_LIMIT_BYTES", 50)
    for text in ("山" * 400, "one line\n" * 60, "x" * 50, "x" * 51, "", "é" * 25, "a" + "é" * 60):
        for name, raw in {"a.txt": text.encode(), "a.jsonl": json.dumps({"text": text}).encode()}.items():
            (tmp_path / name).write_bytes(raw)
            (file,) = examine([str(tmp_path / name)], "text", 1, lambda _: None)
            parts = [d for d in PieceReader(Piece(file, 0, TO_THE_END), "text") if isinstance(d, Document)]
            assert "".join(part.text for part in parts) == text
            assert all(len(part.text_utf8) <= 50 and part.text.encode() == part.text_utf8 for part in parts)
            assert [part.cut for part in parts] == [True] * (len(parts) - 1) + [False]
            assert len(parts) <= 1 + len(text.encode()) // 40


def test_D06_a_row_over_the_limit_is_rejected_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    with open(path, "wb") as stream:
        stream.write(b'{"text": "a"}\n{"text": "')
        for _ in range(200):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n{"text": "b"}\n')
    program = (
        "import resource, sys; from muletrain.data.sources import examine; from muletrain.data.read import *\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "items = list(documents(examine(sys.argv[1:], 'text', 1, lambda _: None), 'text'))\n"
        "print([i.line if isinstance(i, Bad) else i.text for i in items], items[1].why)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    shown, grown = done.stdout.splitlines()
    assert shown.startswith("['a', 2, 'b']") and "over the limit" in shown
    assert int(grown) < 150 << 10, "a row of 200 MiB was held"


def test_D18_line_endings_and_separators(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\u2029c\x85d\x0be"}, {"text": "e"}]
    expected = [row["text"] for row in rows]
    unix = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    for raw in (unix, unix + b"\n", unix.replace(b"\n", b"\r\n") + b"\r\n", unix.replace(b"\n", b"\n\n \r\n")):
        assert read_bytes(tmp_path, raw)[:2] == (expected, [])
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw))
        assert read_file(tmp_path / "a.jsonl.gz")[:2] == (expected, [])


def test_zst_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(InputError, match="pip install zstandard"):
        read_file(tmp_path / "a.jsonl.zst")


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 13, 64, 1000])
def test_pieces_of_json_lines_give_each_row_once(tmp_path: Path, piece_bytes: int) -> None:
    lines = [json.dumps({"text": f"row {i} " + "é" * (i % 9)}, ensure_ascii=False) for i in range(40)] + ["", "bad", "", "[]"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = examine([str(tmp_path / "a.jsonl")], "text", 1, lambda _: None)
    texts: list[str] = []
    bad, before = [], 0
    for piece in pieces_of(files, piece_bytes):
        reader = PieceReader(piece, "text")
        for item in reader:
            if isinstance(item, Bad):
                bad.append(before + item.line)
            else:
                texts.append(item.text)
        before += reader.lines
    assert texts == [json.loads(line)["text"] for line in lines[:40]]
    assert bad == [42, 44] and before == 44


def test_sources_are_found_sorted_and_once(tmp_path: Path) -> None:
    for name in ("b/z.py", "b/a.py", "a.txt", ".git/config", "b/.hidden", "c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files([str(tmp_path), str(tmp_path / "a.txt"), str(tmp_path / "**/*.py")])
    assert [os.path.relpath(name, tmp_path) for name in found] == ["a.txt", "b/a.py", "b/z.py", "c.py"]
    with pytest.raises(InputError) as caught:
        find_files([str(tmp_path / "missing"), str(tmp_path / "*.none")])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("head", "form"),
    [
        (b"\x89PNG\r\n\0\0", "binary"),
        (bytes(range(1, 256)), "binary"),
        ("naïve".encode("latin-1"), "text"),
        ("你好".encode("gbk"), "text"),
        (b"", "text"),
    ],
)
def test_binary_is_told_from_text(head: bytes, form: str) -> None:
    assert classify("x", head, "text") == form


def test_a_file_that_changes_while_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    (file,) = examine([str(path)], "text", 1, lambda _: None)
    path.write_text("other")
    with pytest.raises(InputError, match="changed while"):
        list(PieceReader(Piece(file, 0, TO_THE_END), "text"))


def test_rows_of_many_kinds_never_stop_reading(tmp_path: Path) -> None:
    values: list[Any] = [None, True, 1, 1.5, "s", [], {}, {"text": []}, {"text": {"a": 1}}, {"text": "ok"}]
    for content in ("\n".join(map(json.dumps, values)), json.dumps([{"text": "ok"}, *values], indent=1)):
        texts, bad, _ = read_bytes(tmp_path, content.encode())
        assert set(texts) == {"ok"} and len(bad) == 9


@pytest.mark.parametrize("keep", [30, 100_000])
def test_a_compressed_file_cut_short_is_told(tmp_path: Path, keep: int) -> None:
    lines = "".join(f'{{"text": "{hash((i, 7))}"}}\n' for i in range(20_000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:keep])
    with pytest.raises(InputError, match="the compressed file is cut short or damaged"):
        read_file(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match="this file cannot be read"):
        read_file(tmp_path / "b.jsonl.gz")
