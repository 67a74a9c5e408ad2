"""Updates of flat arrays: the resident strategy's bits, whatever the cut; and training with small moments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from muletrain.optim import flat as flat_module
from muletrain.optim.adamw import ParameterState, UpdateScalars, adamw_update, update_scalars
from muletrain.optim.flat import FlatLayout, FlatState, Region, StateFormat, state_bytes, update_piece
from muletrain.optim.master import SplitMaster, join_master, split_master
from muletrain.optim.moments import BLOCK, Moment, MomentKind
from muletrain.spec.recipe import OptimizerSection

SECTION = OptimizerSection(learning_rate=1e-2, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
KINDS: list[MomentKind] = ["fp32", "bf16", "8bit"]
SHAPES = {"a.weight": (33, 17), "a.norm": (17,), "b.weight": (1, 3), "b.bias": (300,), "c.weight": (256, 2)}


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def scalars_of(update: int, scale: float = 0.37, apply: bool = True, dtype: torch.dtype = torch.float32) -> UpdateScalars:
    return update_scalars(SECTION, 1e-2, update, torch.tensor(scale, dtype=dtype), torch.tensor(apply))


def put_master(state: FlatState, values: Tensor) -> None:
    if isinstance(state.master, SplitMaster):
        split_master(values, out=state.master)
    else:
        state.master.copy_(values)


def master_of(state: FlatState) -> Tensor:
    return join_master(*state.master) if isinstance(state.master, SplitMaster) else state.master


def flat_of(layout: FlatLayout, values: dict[str, Tensor]) -> Tensor:
    flat = torch.zeros(layout.size, dtype=next(iter(values.values())).dtype)
    for name, view in layout.views(flat).items():
        view.copy_(values[name])
    return flat


def test_layout_by_hand() -> None:
    layout = FlatLayout.of(parameters().items())
    places = [(segment.name, segment.start, segment.decay) for segment in layout.segments]
    assert places == [
        ("a.weight", 0, True),
        ("b.weight", 768, True),
        ("c.weight", 1024, True),
        ("a.norm", 1536, False),
        ("b.bias", 1792, False),
    ]
    assert layout.regions == (Region(0, 1536, True), Region(1536, 2304, False)) and layout.size == 2304
    views = layout.views(torch.arange(2304.0))
    assert views["b.bias"].shape == (300,) and views["b.bias"][0] == 1792


@pytest.mark.parametrize("shapes", [[(4, 4)], [(4,)], []])
def test_layout_of_one_kind_of_parameter(shapes: list[tuple[int, ...]]) -> None:
    layout = FlatLayout.of((str(i), torch.empty(shape, device="meta")) for i, shape in enumerate(shapes))
    assert layout.size == BLOCK * len(shapes) and len(layout.regions) == len(shapes) == len(list(layout.pieces(10_000)))


@pytest.mark.parametrize("most", [256, 300, 512, 1000, 1536, 10**9])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 512), (768, 2048), (1536, 2304), (2304, 2304)])
def test_pieces_cover_a_slice_once(most: int, start: int, stop: int | None) -> None:
    layout = FlatLayout.of(parameters().items())
    pieces = list(layout.pieces(most, start, stop))
    covered = [i for piece in pieces for i in range(piece.start, piece.stop)]
    assert covered == list(range(start, layout.size if stop is None else stop))
    for piece in pieces:
        assert piece.start % BLOCK == 0 and 0 < piece.size <= max(most // BLOCK * BLOCK, BLOCK)
        inside = [r for r in layout.regions if r.start < piece.stop and r.stop > piece.start]
        assert [region.decay for region in piece.regions] == [r.decay for r in inside]
        assert [i for region in piece.regions for i in (region.start, region.stop)][1:-1:2] == [r.stop for r in inside[:-1]]


@pytest.mark.parametrize("bad", [(255, 0, None), (256, 3, None), (256, 0, 700)])
def test_pieces_refuse_broken_blocks(bad: tuple[int, int, int | None]) -> None:
    with pytest.raises(ValueError, match="blocks have 256"):
        list(FlatLayout.of(parameters().items()).pieces(*bad))


def test_updates_refuse_broken_blocks() -> None:
    state = StateFormat.of("fp32", torch.float32, split=False).allocate(512)
    for n, start in ((100, 0), (256, 1)):
        with pytest.raises(ValueError, match="blocks have 256"):
            update_piece(state, torch.zeros(n), scalars_of(0), SECTION, decay=True, key=0, start=start)


def test_only_fp32_is_split() -> None:
    with pytest.raises(ValueError, match="only fp32 masters are split"):
        StateFormat.of("fp32", torch.float64, split=True)


def run_pieces(
    state: FlatState,
    layout: FlatLayout,
    grad: Tensor,
    scalars: UpdateScalars,
    most: int,
    key: int = 1,
    out: Tensor | None = None,
) -> None:
    for region in (region for piece in layout.pieces(most) for region in piece.regions):
        a, b = region.start, region.stop
        target = None if out is None else out[a:b]
        update_piece(state.part(a, b), grad[a:b], scalars, SECTION, decay=region.decay, key=key, start=a, working_out=target)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [256, 768, 10**6])
def test_fp32_moments_give_the_resident_bits(split: bool, gradient: torch.dtype, most: int) -> None:
    values = parameters()
    layout = FlatLayout.of(values.items())
    state = StateFormat.of("fp32", torch.float32, split).allocate(layout.size)
    put_master(state, flat_of(layout, values))
    resident = [
        ParameterState(name, v.clone(), torch.zeros_like(v), torch.zeros_like(v), None, v.dim() >= 2)
        for name, v in values.items()
    ]
    for update in range(20):
        grads = parameters(100 + update, gradient)
        adamw_update(resident, list(grads.values()), scalars_of(update), SECTION)
        run_pieces(state, layout, flat_of(layout, grads), scalars_of(update), most)
    for theirs in resident:
        assert torch.equal(layout.views(master_of(state))[theirs.name], theirs.master)
        assert torch.equal(layout.views(state.exp_avg.values)[theirs.name], theirs.exp_avg)
        assert torch.equal(layout.views(state.exp_avg_sq.values)[theirs.name], theirs.exp_avg_sq)


def test_fp64_is_the_resident_one_too() -> None:
    values = parameters(dtype=torch.float64)
    layout = FlatLayout.of(values.items())
    state = StateFormat.of("fp32", torch.float64, split=False).allocate(layout.size)
    put_master(state, flat_of(layout, values))
    one = ParameterState("a.weight", values["a.weight"].clone(), *torch.zeros(2, 33, 17, dtype=torch.float64), None, True)
    for update in range(3):
        grads, scalars = parameters(7 + update, torch.float64), scalars_of(update, dtype=torch.float64)
        adamw_update([one], [grads["a.weight"]], scalars, SECTION)
        run_pieces(state, layout, flat_of(layout, grads), scalars, 512)
    assert torch.equal(layout.views(master_of(state))["a.weight"], one.master)


@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_gives_the_same_bits_and_padding_stays_zero(kind: MomentKind) -> None:
    layout = FlatLayout.of(parameters().items())
    results = []
    for most in (256, 512, 1000, 10**6):
        state = StateFormat.of(kind, torch.float32, split=True).allocate(layout.size)
        put_master(state, flat_of(layout, parameters()))
        for update in range(4):
            run_pieces(state, layout, flat_of(layout, parameters(50 + update)), scalars_of(update), most, key=900 + update)
        results.append(state.tensors())
        used = flat_of(layout, {name: torch.ones(shape) for name, shape in SHAPES.items()}).bool()
        assert not master_of(state)[~used].any() and not state.exp_avg.values[~used].any()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_the_key_and_the_place_decide_the_rounding(kind: MomentKind) -> None:
    def moments(key: int, start: int) -> tuple[Tensor, ...]:
        state = StateFormat.of(kind, torch.float32, split=True).allocate(512)
        grad = torch.randn(512, generator=torch.Generator().manual_seed(1))
        update_piece(state, grad, scalars_of(0), SECTION, decay=True, key=key, start=start)
        return state.exp_avg.values, state.exp_avg_sq.values

    base = moments(5, 0)
    assert all(torch.equal(a, b) for a, b in zip(base, moments(5, 0), strict=True))
    for other in (moments(6, 0), moments(5, 256), moments(5 + 2**40, 0), moments(5, 2**33)):
        assert not any(torch.equal(a, b) for a, b in zip(base, other, strict=True))


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("apply", [True, False])
def test_the_working_copy_is_of_the_new_master(compute: torch.dtype, split: bool, apply: bool) -> None:
    layout = FlatLayout.of(parameters().items())
    state = StateFormat.of("bf16", torch.float32, split).allocate(layout.size)
    put_master(state, flat_of(layout, parameters()))
    out = torch.full((layout.size,), 7.0, dtype=compute)
    run_pieces(state, layout, flat_of(layout, parameters(9)), scalars_of(0, apply=apply), 512, out=out)
    if isinstance(state.master, SplitMaster) and compute == torch.bfloat16:
        assert torch.equal(out, state.master.hi)
    else:
        assert torch.equal(out, master_of(state).to(compute))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [True, False])
def test_a_refused_update_leaves_every_bit(kind: MomentKind, split: bool) -> None:
    layout = FlatLayout.of(parameters().items())
    state = StateFormat.of(kind, torch.float32, split).allocate(layout.size)
    put_master(state, flat_of(layout, parameters()))
    run_pieces(state, layout, flat_of(layout, parameters(3)), scalars_of(0), 512)
    before = [t.clone() for t in state.tensors()]
    grad = flat_of(layout, parameters(4))
    grad[::3] = float("nan")
    run_pieces(state, layout, grad, scalars_of(1, scale=float("inf"), apply=False), 512, key=2)
    assert all(torch.equal(a, b) for a, b in zip(before, state.tensors(), strict=True))


def test_bytes_on_the_link() -> None:
    exact = {kind: state_bytes(StateFormat.of(kind, torch.float32, True), torch.bfloat16) for kind in KINDS}
    assert exact == {"fp32": (14, 12), "bf16": (10, 8), "8bit": (8 + 1 / 32, 6 + 1 / 32)}
    assert state_bytes(StateFormat.of("bf16", torch.float32, True), torch.float32) == (12, 8)
    for kind in KINDS:
        form = StateFormat.of(kind, torch.float32, True)
        held = sum(t.numel() * t.element_size() for t in form.allocate(1024).tensors())
        assert held == 1024 * state_bytes(form, torch.float32)[1]


def carved(form: StateFormat, n: int, before: int) -> FlatState:
    """State whose arrays all lie in one buffer, as in an arena."""
    shape = form.allocate(n)
    buffer, at, parts = torch.zeros(before + 20 * n, dtype=torch.uint8), before, []
    for tensor in shape.tensors():
        size = tensor.numel() * tensor.element_size()
        parts.append(buffer[at : at + size].view(tensor.dtype))
        at += -(-size // 256) * 256
    hi, low, *rest = parts
    half = len(rest) // 2
    return FlatState(form, SplitMaster(hi, low), Moment(*rest[:half]), Moment(*rest[half:]))


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_one_graph_serves_all_lengths_and_arenas(kind: MomentKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU with a compiler that only counts: no graph break, no second graph, the eager kernel's bits."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    form = StateFormat.of(kind, torch.float32, True)
    eager = flat_module._kernel(form)
    compiled = torch.compile(eager, backend=aot_autograd(fw_compiler=count), fullgraph=True)
    for blocks, before in ((9, 0), (2, 1024), (40, 512)):
        n = blocks * BLOCK
        values, grad = torch.randn(2, n, generator=torch.Generator().manual_seed(blocks))
        states = form.allocate(n), carved(form, n, before)
        for state, kernel, prepare in zip(states, (eager, compiled), (tuple, flat_module._for_compiler), strict=True):
            put_master(state, values)

            def through(*arguments: object, kernel: Callable = kernel, prepare: Callable = prepare) -> None:
                kernel(*prepare(arguments[:5]), *arguments[5:])

            monkeypatch.setattr(flat_module, "_kernel", lambda _, through=through: through)
            for decay in (True, False):
                update_piece(state, grad.bfloat16(), scalars_of(0), SECTION, decay=decay, key=3, start=512)
        assert all(torch.equal(a, b) for a, b in zip(states[0].tensors(), states[1].tensors(), strict=True))
    assert len(graphs) == 1


def regression(kind: MomentKind, seed: int, steps: int = 300) -> float:
    """Final loss (mean of the last 20) of a small gated network on noisy data whose inputs differ a hundredfold."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up": (16, 64), "gate": (16, 64), "norm": (64,), "down": (64, 4), "bias": (4,)}
    values = {
        name: torch.randn(shape, generator=generator) / shape[0] ** 0.5 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    teacher = torch.randn(16, 4, generator=generator)
    layout = FlatLayout.of(values.items())
    state = StateFormat.of(kind, torch.float32, True).allocate(layout.size)
    put_master(state, flat_of(layout, values))
    losses = []
    for update in range(steps):
        weights = master_of(state).requires_grad_()
        p = layout.views(weights)
        x = torch.randn(128, 16, generator=generator) * torch.logspace(-2, 0, 16)
        target = torch.sin(3 * x @ teacher) + 0.3 * torch.randn(128, 4, generator=generator)
        hidden = torch.nn.functional.rms_norm(torch.nn.functional.silu(x @ p["gate"]) * (x @ p["up"]), (64,), p["norm"], 1e-5)
        loss = (hidden @ p["down"] + p["bias"] - target).square().mean()
        grad = torch.autograd.grad(loss, weights)[0]
        run_pieces(state, layout, grad, scalars_of(update, scale=1.0), 512, key=seed * 1_000_003 + update * 7919)
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def test_small_moments_train_like_fp32() -> None:
    """Mean over seeds within 0.5 %, and no seed off by more than 2 %."""
    exact = torch.tensor([regression("fp32", seed) for seed in range(5)])
    for kind in ("bf16", "8bit"):
        ratio = torch.tensor([regression(kind, seed) for seed in range(5)]) / exact
        assert abs(ratio.mean() - 1) < 0.005 and (ratio - 1).abs().max() < 0.02, (kind, ratio)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_updates_as_the_cpu_does(kind: MomentKind) -> None:
    """Same rounding noise, so codes differ only where a compiler's fused multiply-add moved a value's last bit."""
    form = StateFormat.of(kind, torch.float32, True)
    n = 300 * BLOCK
    values, grad = torch.randn(2, n, generator=torch.Generator().manual_seed(0))
    host, card = form.allocate(n), form.allocate(n, "cuda")
    put_master(host, values)
    put_master(card, values.cuda())
    scale, apply = torch.tensor(0.37, device="cuda"), torch.tensor(True, device="cuda")
    update_piece(host, grad, scalars_of(0), SECTION, decay=True, key=77, start=512)
    for a, b in ((0, 7 * BLOCK), (7 * BLOCK, n)):
        there = update_scalars(SECTION, 1e-2, 0, scale, apply)
        update_piece(card.part(a, b), grad[a:b].cuda(), there, SECTION, decay=True, key=77, start=512 + a)
    assert torch.allclose(master_of(card).cpu(), master_of(host), rtol=1e-6, atol=1e-7)
    for there, here in ((card.exp_avg, host.exp_avg), (card.exp_avg_sq, host.exp_avg_sq)):
        differing = (there.values.cpu() != here.values).double().mean()
        assert differing < (0.5 if kind == "fp32" else 1e-3)
