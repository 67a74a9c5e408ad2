"""The page: what is on it, and which ways are the best trade-offs."""

from __future__ import annotations

from xml.etree import ElementTree

from muletrain.planner.answer import WayRow
from muletrain.planner.page import page, pareto, picture

from .test_answer import planned


def row(plain: WayRow, name: str, speed: float, size: int, *, fits: bool = True) -> WayRow:
    return plain.model_copy(update={"name": name, "tokens_per_s": speed, "card_bytes": size, "fits": fits})


def test_the_best_trade_offs_are_those_that_none_beats_in_both() -> None:
    plain = planned("1x RTX 4090", model="qwen2.5-0.5b").ways[0]
    fast, small, worse = row(plain, "fast", 9, 9), row(plain, "small", 5, 3), row(plain, "worse", 4, 4)
    out = row(plain, "out", 99, 99, fits=False)
    assert [each.name for each in pareto((worse, out, small, fast))] == ["fast", "small"]
    assert pareto((out,)) == ()


def test_the_page_has_every_way_and_a_picture() -> None:
    found = planned("3x RTX 4090")
    text = page(found)
    assert text.count("<tr class=") == len(found.ways)
    drawing = ElementTree.fromstring(picture(found))
    circles = [each for each in drawing if each.tag == "circle"]
    assert len(circles) == sum(way.fits for way in found.ways)
    assert sum(each.get("fill") == "none" for each in circles) == sum(way.fits and bool(way.paper) for way in found.ways)
    assert "no price given" in text and "DeepSpeed&#x27;s" in text


def test_nothing_to_draw() -> None:
    text = page(planned("1x RTX 4090", "16GiB", model="llama-3.1-405b"))
    assert "nothing fits" in text and "<svg" not in text
