"""Numbers as people write them."""

from __future__ import annotations

import pytest

from muletrain.spec.units import (
    format_bytes,
    format_count,
    format_duration,
    parse_bytes,
    parse_count,
    parse_flag,
    parse_float,
    parse_length,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("65536", 65_536), ("64k", 64_000), ("64Ki", 65_536), ("1_000", 1_000), ("1e6", 10**6), ("1.5k", 1_500), ("010", 10),
     ("2T", 2 * 10**12), (" 7 ", 7), (12, 12), (3.0, 3), ("9223372036854775807", 2**63 - 1), ("0.1k", 100), (".5k", 500)],
)  # fmt: skip
def test_counts(text: object, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    "text", ["12:30", "0x10", "1.5", "-3", "k", "", "1 2", "1e-3", "nan", "1e400", True, None, [1], "64kk"]
)
def test_not_counts(text: object) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_count(text)


@pytest.mark.parametrize(("text", "value"), [("4k", 4096), ("4Ki", 4096), ("128K", 131_072), ("1m", 2**20), (2048, 2048)])
def test_lengths(text: object, value: int) -> None:
    assert parse_length(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24GiB", 24 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("500MB", 5 * 10**8),
        (1024, 1024),
    ],
)
def test_sizes(text: object, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["24 gigs", "24G", "GiB", "-1GiB", False])
def test_not_sizes(text: object) -> None:
    with pytest.raises(ValueError, match="write it like 24GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-5", 1e-5), ("5e-4", 5e-4), ("1_000", 1000.0), (3, 3.0), (".5", 0.5), ("-1", -1.0)]
)
def test_reals(text: object, value: float) -> None:
    assert parse_float(text) == value


@pytest.mark.parametrize("text", ["fast", "nan", "inf", "1e999", True, None, "12:30"])
def test_not_reals(text: object) -> None:
    with pytest.raises(ValueError, match="write it like 1e-5"):
        parse_float(text)


@pytest.mark.parametrize("text", ["0", "false", "no", "off", "", "False", "OFF", "No", False, 0])
def test_H05_off_means_off(text: object) -> None:
    assert parse_flag(text) is False


@pytest.mark.parametrize("text", ["1", "true", "yes", "on", "True", "ON", True, 1])
def test_H05_on_means_on(text: object) -> None:
    assert parse_flag(text) is True


@pytest.mark.parametrize("text", ["maybe", "2", "-1", "nope", None])
def test_H05_nonsense_is_an_error(text: object) -> None:
    with pytest.raises(ValueError, match="neither on nor off"):
        parse_flag(text)


def test_formats() -> None:
    assert [format_bytes(n) for n in (17, 3 * 2**29, 2**40)] == ["17 B", "1.5 GiB", "1.0 TiB"]
    assert [format_count(n) for n in (6.91e9, 13_200, 640)] == ["6.91B", "13.2k", "640"]
    assert [format_duration(s) for s in (45, 200, 7500, 273_600)] == ["45s", "3m 20s", "2h 05m", "3d 4h"]
