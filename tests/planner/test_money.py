"""Prices as people write them, and what a run costs, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muletrain.planner.assumptions import Assumptions
from muletrain.planner.money import Prices, card_watts, parse_prices, run_cost, wall_watts
from muletrain.spec.errors import InputError


def test_prices() -> None:
    found = parse_prices("2.3CNY/h", "0.8 yuan/kWh", "¥15,000")
    assert found == Prices("CNY", (2.3, 2.3), "card", "given", 0.8, 15000.0)
    assert parse_prices("8600CNY/month/box", None, None).rent_h[0] == pytest.approx(8600 / 720)
    assert parse_prices("168 USD/week/card", None, None).rent_h[0] == 1.0
    assert parse_prices(None, None, None) == Prices()


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        (("2.3/h", None, None), "--rent: '2.3/h' is not a price; write it like 2.3CNY/h"),
        (("2.3CNY", None, None), "--rent: '2.3CNY' has no period"),
        (("2.3CNY/h/rack", None, None), "is for a rack; write /card or /box"),
        ((None, "0.8CNY/h", None), "--power: '0.8CNY/h' is no price of electricity"),
        ((None, None, "15000CNY/h"), "--buy: '15000CNY/h': the price of one card, like 15000CNY"),
        (("1.2.3CNY/h", None, None), "--rent: '1.2.3' is not a number"),
        (("2.3CNY/h", "0.1USD/kWh", None), "prices are in CNY and USD; give them in one currency"),
    ],
)
def test_prices_that_cannot_be_read(prices: tuple[str | None, str | None, str | None], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_prices(*prices)


def test_a_run_by_hand() -> None:
    prices = parse_prices("2CNY/h", "0.5CNY/kWh", "10000CNY")
    cost = run_cost(prices, cards=3, boxes=1, hours=(10.0, 20.0), kwh=(15.0, 30.0), watts=1500.0)
    assert (cost.rent, cost.power, cost.buy) == ((60.0, 120.0), (7.5, 15.0), 30_000.0)
    assert cost.total == (60.0, 120.0)
    # renting costs 6 an hour, own cards 0.75 of electricity
    assert cost.buy_pays_after_h == pytest.approx(30_000 / 5.25)
    whole = run_cost(parse_prices("6CNY/h/box", None, None), 3, 2, (10.0, 10.0), (1.0, 1.0), 1.0)
    assert (whole.rent, whole.note) == ((120.0, 120.0), "rent given, of one box; no price of electricity given")


def test_no_price_is_guessed() -> None:
    cost = run_cost(Prices(), 3, 1, (10.0, 20.0), (15.0, 30.0), 1500.0)
    assert (cost.total, cost.note) == ((0.0, 0.0), "no rent given; no price of electricity given")
    assert run_cost(parse_prices(None, "1CNY/kWh", None), 3, 1, (1.0, 2.0), (15.0, 30.0), 1.0).total == (15.0, 30.0)


def test_watts() -> None:
    assert card_watts(450, 0.25) == pytest.approx(450 * 0.6)
    assert card_watts(450, 0.9) == pytest.approx(450 * 0.95)
    assert wall_watts(1000, 2, replace(Assumptions(), box_w=100, supply=0.8)) == pytest.approx(1500)
