"""What is claimed of RTX 4090 boxes, beside what the catalogue and a plan say: docs/claims.md, written by `mule bench claims`.

The claims are those of two articles on training large models on such boxes; every figure next to them is computed when the page
is written. A claim that memory or a data sheet rules out is called false; what no plan covers is called that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muletrain.catalog.families import model_shape
from muletrain.catalog.gpus import find_gpu
from muletrain.catalog.models import model_config, model_names
from muletrain.planner.answer import PlanAnswer, WayRow, answer
from muletrain.planner.assumptions import Assumptions
from muletrain.planner.fleet import parse_fleet
from muletrain.planner.money import card_watts, parse_prices, wall_watts
from muletrain.planner.ways import Method, Work

GIB = 2**30
ASSUMED = Assumptions()


@dataclass(frozen=True)
class Claim:
    """One row. `check` gives (verdict, what the plan says)."""

    text: str
    check: Callable[[], tuple[str, str]]


def planned(
    model: str, on: str, ram: str, *, step: int = 393_216, sequence: int = 4096, method: Method = "full", tokens: int = 10**12
) -> PlanAnswer:
    """A plan at the prices of the claims."""
    shape = model_shape(model_config(model), model)
    work = Work(shape, min(sequence, shape.max_positions), tokens, step, method)
    return answer(work, parse_fleet(on, ram), parse_prices(None, "0.8CNY/kWh", None), ASSUMED)


def claims_page() -> str:
    """The whole page in Markdown."""
    lines = [
        "# What is claimed of RTX 4090 boxes, and what a plan says",
        "",
        "Written by `mule bench claims --output docs/claims.md`; nothing here was measured. Speeds are planned on data sheets;",
        f"four of five published runs took {ASSUMED.step_low:g} to {ASSUMED.step_high:g} times the planned step (docs/LOG.md).",
    ]
    for title, claims in (("A. Three RTX 4090s train DeepSeek-7B", TABLE_A), ("B. The small team's training card", TABLE_B)):
        lines += ["", f"## {title}", "", "| claimed | verdict | planned |", "|---|---|---|"]
        for claim in claims:
            verdict, plan = claim.check()
            lines.append(f"| {claim.text} | {verdict} | {plan} |")
    return "\n".join(lines) + "\n"


def _best(found: PlanAnswer, cards: int) -> WayRow:
    return next(way for way in found.ways if way.fits and not way.paper and way.cards == cards)


def _way(found: PlanAnswer, start: str) -> WayRow:
    return next(way for way in found.ways if way.name.startswith(start))


def _figures(row: WayRow) -> str:
    return (
        f"{row.name}: {row.tokens_per_s:,.0f} tokens/s, {row.card_bytes / GIB:.1f} GiB a card, "
        f"{row.host_bytes / GIB:.0f} GiB of host memory"
    )


def _recipe() -> tuple[str, str]:
    found = planned("deepseek-llm-7b", "3x RTX 4090", "128GiB")
    alone = _way(found, "zero3 on 3 cards, blocks")
    return (
        "a plain recipe; ZeRO-3 alone does not hold it",
        f"{alone.name} is {-alone.card_spare_bytes / GIB:.1f} GiB short on each card; {_figures(_best(found, 3))}",
    )


def _one_card() -> tuple[str, str]:
    shape = model_shape(model_config("deepseek-llm-7b"), "x")
    state, done = 16 * shape.parameters / 1e9, 1250 * shape.flops_a_token(4096)
    share = done / find_gpu("RTX 4090").flops["bf16"]
    return (
        f"only with state in host memory: Adam's takes {state:.0f} GB; {done / 1e12:.0f} TFLOP/s, {share:.0%} of the card",
        _figures(_best(planned("deepseek-llm-7b", "RTX 4090", "128GiB"), 1)),
    )


def _three_cards() -> tuple[str, str]:
    found = planned("deepseek-llm-7b", "3x RTX 4090", "128GiB")
    three, one = _best(found, 3), _best(found, 1)
    return (
        "possible with state in host memory",
        f"{_figures(three)}; {three.tokens_per_s / one.tokens_per_s:.2f} times one card, "
        f"{three.communication:.1%} of a step waits",
    )


def _link() -> tuple[str, str]:
    card = find_gpu("RTX 4090")
    return (
        "the sum of both ways' line rates",
        f"{card.link_bytes_s / 1e9:.0f} GB/s each way in practice, as plans use it; `mule probe` measures it",
    )


def _accumulation() -> tuple[str, str]:
    small, large = (planned("deepseek-llm-7b", "RTX 4090", "128GiB", step=step) for step in (65_536, 393_216))
    a, b = _best(small, 1), _best(large, 1)
    return (
        "possible",
        f"65k tokens a step: {a.tokens_per_s:,.0f} tokens/s; 393k: {b.tokens_per_s:,.0f}, {b.card_bytes / GIB:.1f} GiB",
    )


def _tens_of_billions() -> tuple[str, str]:
    rows = []
    for model in ("yi-34b", "llama-2-70b"):
        found = planned(model, "8x RTX 4090", "1TiB", step=2**20)
        rows.append(f"{model}: {_figures(found.choice)}" if found.choice else f"{model}: {found.binding}")
    return "true with enough host memory", "; ".join(rows)


def _thirteen_billion() -> tuple[str, str]:
    found = planned("llama-2-13b", "RTX 4090", "128GiB", step=131_072)
    weights = 2 * model_shape(model_config("llama-2-13b"), "x").parameters / 1e9
    told = _figures(found.choice) if found.choice else found.binding
    return f"false with ZeRO-2: 16-bit weights alone are {weights:.0f} GB", told


def _eight_cards() -> tuple[str, str]:
    card = find_gpu("RTX 4090")
    peak = 8 * card.flops["fp16"] / 1e15
    return (
        "false",
        f"{8 * card.memory_bytes / GIB:.0f} GiB; {peak:.2f} PFLOP/s dense in fp16 with fp32 accumulation; NVLink "
        f"{card.nvlink_bytes_s:.0f} GB/s, PCIe {card.pcie_generation}, {'no ' if not card.peer_to_peer else ''}peer access",
    )


def _inference() -> tuple[str, str]:
    size = 2 * model_shape(model_config("llama-2-70b"), "x").parameters / 8 / GIB
    return "not planned: inference", f"weights are {size:.1f} GiB a card on eight; latency is no matter of a training plan"


def _beside_others() -> tuple[str, str]:
    def speed(model: str, on: str, method: Method, sequence: int) -> float:
        found = planned(model, on, "256GiB", method=method, sequence=sequence, step=32_768)
        return max(way.tokens_per_s for way in found.ways if way.fits)

    tuning = speed("gpt3-6.7b", "RTX 4090", "lora", 2048) / speed("gpt3-6.7b", "A100 SXM4 80GB", "lora", 2048)
    bert = speed("bert-base", "RTX 4090", "full", 512) / speed("bert-base", "A100 SXM4 40GB", "full", 512)
    verdict = "more than is planned" if tuning < 0.9 * 0.78 and bert < 0.9 * 0.85 else "about what is planned"
    return verdict, f"6.7 B LoRA {tuning:.0%} of an A100 80GB, BERT-base {bert:.0%} of an A100 40GB; SDXL is not planned"


def _power() -> tuple[str, str]:
    watts = wall_watts(8 * card_watts(find_gpu("RTX 4090").tdp_w, 0.8), 1, ASSUMED)
    verdict = "more than is planned" if watts < 0.9 * 5500 else "about what is planned"
    told = f"eight cards at work: {watts / 1000:.1f} kW at the socket, {watts / 1000 * 720 * 0.8:,.0f} yuan a month"
    return verdict, f"{told}; the rent is {8600 / 720 / 8:.2f} yuan a card and hour"


def _steady() -> tuple[str, str]:
    return "not planned: to be measured", "`memory.gpu_limit` keeps a job inside a share of a card, and plans hold to it"


def _cluster() -> tuple[str, str]:
    return "not planned: how workers are started", "`mule plan --boxes N --network 100Gb/s` plans several boxes, on paper"


def _families() -> tuple[str, str]:
    makers = [n for n in model_names() if n.startswith(("llama", "baichuan", "yi", "deepseek"))]
    return "true for language models", f"{len(makers)} of their shapes are in the catalogue; Stable Diffusion is not planned"


TABLE_A = (
    Claim("DeepSpeed ZeRO-3, AdamW, fp16, batch 32 a card and 96 in all, 1 TB of text", _recipe),
    Claim("one card: 1,250 tokens/s, 22.4 GB", _one_card),
    Claim("three cards: 3,400 tokens/s, 18.1 GB a card, speed-up 2.72, communication about 12 %", _three_cards),
    Claim("PCIe 4.0 x16 moves 64 GB/s both ways", _link),
    Claim("to do: gradient accumulation for larger batches, FlashAttention-2, faster links", _accumulation),
)
TABLE_B = (
    Claim("mixed precision, checkpointing, offload and model parallel make tens of billions trainable", _tens_of_billions),
    Claim("one 4090 trains a 13 B model with ZeRO-2, peak under 22 GB", _thirteen_billion),
    Claim("eight 4090s: 192 GB, 8.2 PFLOPS fp16, NVLink, under 5 microseconds between cards", _eight_cards),
    Claim("LLaMA-2-70B inference on eight cards, latency 18 % over an H100 cluster", _inference),
    Claim("6.7 B fine-tuning at 78 % of an A100; BERT-base at 85 % of an A100-40GB; SDXL at 70 % of an H100", _beside_others),
    Claim("450 W a card, 5.5 to 6 kW a box, about 3,000 yuan of power a month at 0.8 yuan; rent from 8,600 yuan", _power),
    Claim("24 hours without a card dropping out, two jobs at once on the memory left over", _steady),
    Claim("Kubernetes, Ray and DeepSpeed make a personal supercomputer", _cluster),
    Claim("used for LLaMA, Baichuan, Yi, DeepSeek; Stable Diffusion", _families),
)
