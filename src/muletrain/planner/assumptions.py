"""What plans assume beyond formulas and data sheets, in one value: each with where it is from.

`mule bench planner` fits the ones marked (fitted) to published measurements, leaving each source out in turn, so that none is
judged by constants that have seen it; the defaults here come from all of them together. What a probe measured replaces what it
measures.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Assumptions:
    """Shares and sizes. Times are seconds, sizes bytes."""

    # memory
    eager_activations: float = 1.55
    """(fitted) What an eager block keeps, over a compiled one: RMS norms in fp32, the gate's activation and its product. Blocks
    with layer norms and no gate keep a third of that more: those norms are one kernel."""
    logits_bytes: float = 16.0
    """A logit whose loss is not fused: 2 in 16 bits, 4 in fp32, 4 shifted, 4 of gradient, 2 of it in 16 bits."""
    compiled_logits_bytes: float = 11.0
    """The same where a compiler fuses the conversions."""
    reserved: float = 1.2
    """(fitted) What the allocator holds of memory that comes and goes (activations, logits), over what is in use."""
    reserved_varied: float = 2.7
    """(fitted) The same where rows have many lengths: blocks left by one length do not fit the next."""
    context_bytes: float = 0.6 * GIB
    """CUDA's own, with libraries. Measured: 0.3 to 0.65 GiB."""
    communication_bytes: float = 0.6 * GIB
    """NCCL's buffers. Measured: 0.2 to 1 GiB."""
    bucket_bytes: float = 2e9
    """DeepSpeed's ZeRO-2: two buckets of 5e8 16-bit gradients (reduce_bucket_size, overlap_comm)."""
    live_bytes: float = 2e9
    """What DeepSpeed's ZeRO-3 keeps gathered at once (stage3_max_live_parameters 1e9, 16-bit)."""

    # time
    product: float = 0.71
    """(fitted) Of the dense peak that large products reach."""
    product_geforce: float = 1.05
    """(fitted) GeForce, whose peak with fp32 accumulation is halved, so that neither power nor memory hold it back, and whose
    clocks go above the rated one."""
    fp8_over_16: float = 2.0
    """(fitted) What fp8 products do over 16-bit ones, quantizing included."""
    memory_share: float = 0.82
    """Of the stated memory bandwidth."""
    attention: float = 0.65
    """(fitted) What runs reach of the next two."""
    attention_forward: float = 0.60
    attention_backward: float = 0.50
    """FlashAttention-2 of the peak (Dao 2023, A100); on Hopper two thirds of that."""
    eager_passes: float = 4.0
    """(fitted) Passes over memory of eager kernels, over compiled ones."""
    kernel_s: float = 15e-6
    """From one operation to the next in eager code."""
    overlap: float = 0.85
    """(fitted) Of compute time that communication can hide behind."""
    overlap_eager: float = 0.0
    """(fitted) The same in eager code, where the host that starts kernels also starts collectives."""
    other: float = 1.02
    """(fitted) Everything that is not modelled, over what is."""
    host_update_s: float = 0.5e-9
    """A parameter, for AdamW on the host's processor, its transfers not counted. DeepSpeed on a 4090 box: 0.73 s a billion with
    them."""
    host_memory_bytes_s: float = 85e9
    """What the cards of a box read from its host memory together. Measured on 8-channel boxes: 85 to 90 GB/s."""
    nvlink_share: float = 0.75
    """Of one direction of NVLink that collectives reach."""
    peer_share: float = 0.75
    """Of the PCIe link that collectives reach where cards reach each other over it."""
    through_host_share: float = 0.5
    """The same where everything goes through host memory: NCCL on RTX 4090s does 11 to 16 GB/s."""

    # power
    box_w: float = 250.0
    """Of a box beside its cards: processor, memory, fans. An allowance, nothing published was found."""
    supply: float = 0.92
    """Of the socket's power that a supply passes on (80 Plus Gold to Platinum at half load)."""

    # how far off plans are
    step_low: float = 0.81
    step_high: float = 1.42
    """Four of five published runs took between these times the planned step (`mule bench planner`, each source left out)."""
