"""What a run costs: rent by the hour, day, week or month, electricity, and buying against renting, in any one currency.

Nothing is converted between currencies and no price is guessed: what the user does not give is "no price given".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from muletrain.planner.assumptions import Assumptions
from muletrain.spec.errors import InputError
from muletrain.spec.value import Value

HOURS = {"h": 1.0, "hour": 1.0, "d": 24.0, "day": 24.0, "w": 168.0, "week": 168.0, "month": 720.0, "mo": 720.0}
_PRICE = re.compile(r"\s*([A-Za-z¥€$£]*)\s*([\d.,]+)\s*([A-Za-z¥€$£]*)\s*(?:/\s*([A-Za-z]+))?\s*(?:/\s*([A-Za-z]+))?\s*")
_SYMBOLS = {"¥": "CNY", "yuan": "CNY", "rmb": "CNY", "$": "USD", "€": "EUR", "£": "GBP"}


@dataclass(frozen=True)
class Prices:
    """In one currency."""

    currency: str = ""
    rent_h: tuple[float, float] = (0.0, 0.0)
    """Lowest and highest, an hour; (0, 0): none given."""
    rent_of: str = "card"
    """card or box."""
    rent_source: str = ""
    kwh: float = 0.0
    """Of electricity; 0: none given."""
    card_price: float = 0.0
    """To buy one; 0: none given."""


class Cost(Value):
    """Of a whole run, lowest and highest."""

    currency: str
    rent: tuple[float, float]
    """(0, 0): no price given."""
    power: tuple[float, float]
    buy: float
    """Of all cards; 0: no price given."""
    buy_pays_after_h: float
    """Hours of use after which buying costs less than renting, its electricity counted; 0: never or unknown."""
    note: str
    """Where prices are from, or that there are none."""

    @property
    def total(self) -> tuple[float, float]:
        """Rent if there is one (a rented box's price holds its electricity), else electricity."""
        return self.rent if self.rent[1] else self.power


def parse_prices(rent: str | None, power: str | None, buy: str | None) -> Prices:
    """`2.3CNY/h` (a card), `8600 yuan/month/box`, `0.8CNY/kWh`, `15000CNY`. Raises InputError naming what cannot be read."""
    prices = Prices()
    currencies = set()
    if rent:
        amount, currency, period, of = _read("--rent", rent, "2.3CNY/h, or 8600CNY/month/box")
        if period not in HOURS:
            raise InputError(f"--rent: {rent!r} has no period; write it like 2.3CNY/h, /day, /week or /month")
        if of not in ("", "card", "gpu", "box"):
            raise InputError(f"--rent: {rent!r} is for a {of}; write /card or /box")
        hourly = amount / HOURS[period]
        prices = Prices(currency, (hourly, hourly), "box" if of == "box" else "card", "given")
        currencies.add(currency)
    kwh = card_price = 0.0
    if power:
        kwh, currency, unit, _ = _read("--power", power, "0.8CNY/kWh")
        if unit.lower() != "kwh":
            raise InputError(f"--power: {power!r} is no price of electricity; write it like 0.8CNY/kWh")
        currencies.add(currency)
    if buy:
        card_price, currency, unit, _ = _read("--buy", buy, "15000CNY")
        if unit:
            raise InputError(f"--buy: {buy!r}: the price of one card, like 15000CNY")
        currencies.add(currency)
    if len(currencies) > 1:
        raise InputError(f"prices are in {' and '.join(sorted(currencies))}; give them in one currency, nothing is converted")
    currency = currencies.pop() if currencies else ""
    return Prices(currency, prices.rent_h, prices.rent_of, prices.rent_source, kwh, card_price)


def run_cost(
    prices: Prices, cards: int, boxes: int, hours: tuple[float, float], kwh: tuple[float, float], watts: float
) -> Cost:
    """Of a run on `cards` cards in `boxes` boxes. `watts`: of everything while it runs."""
    units = boxes if prices.rent_of == "box" else cards
    rent = (prices.rent_h[0] * units * hours[0], prices.rent_h[1] * units * hours[1])
    electricity = (prices.kwh * kwh[0], prices.kwh * kwh[1])
    bought = prices.card_price * cards
    saved_h = prices.rent_h[1] * units - prices.kwh * watts / 1000
    notes = []
    if prices.rent_source:
        notes.append(f"rent {prices.rent_source}, of one {prices.rent_of}")
    else:
        notes.append("no rent given")
    if not prices.kwh:
        notes.append("no price of electricity given")
    return Cost(
        currency=prices.currency,
        rent=rent,
        power=electricity,
        buy=bought,
        buy_pays_after_h=bought / saved_h if bought and saved_h > 0 else 0.0,
        note="; ".join(notes),
    )


def card_watts(tdp_w: float, utilisation: float) -> float:
    """Of one card at a share of its dense peak: TDP x min(0.95, 0.30 + 1.2 u) (fitted to published averages)."""
    return tdp_w * min(0.95, 0.30 + 1.2 * utilisation)


def wall_watts(cards_w: float, boxes: int, assumed: Assumptions) -> float:
    """At the socket: the cards, each box's other parts, and what power supplies lose."""
    return (cards_w + boxes * assumed.box_w) / assumed.supply


def _read(option: str, text: str, example: str) -> tuple[float, str, str, str]:
    """(amount, currency, what follows the first slash, the second)."""
    match = _PRICE.fullmatch(text)
    currency = (match[1] or match[3]) if match else ""
    if match is None or not currency or (match[1] and match[3]):
        raise InputError(f"{option}: {text!r} is not a price; write it like {example}")
    try:
        amount = float(match[2].replace(",", ""))
    except ValueError:
        raise InputError(f"{option}: {match[2]!r} is not a number; write it like {example}") from None
    name = _SYMBOLS.get(currency.lower(), currency.upper())
    return amount, name, (match[4] or ""), (match[5] or "").lower()
