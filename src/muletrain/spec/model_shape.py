"""ModelShape: the numbers of a transformer that memory and time are computed from, read off a Hugging Face config."""

from __future__ import annotations

from muletrain.spec.value import Value


class Linear(Value):
    """A linear layer of a block."""

    name: str
    """Its path in the block, e.g. self_attn.q_proj."""
    inputs: int
    outputs: int


class ModelShape(Value):
    """A transformer of one row of blocks. All counts are of parameters unless the name says otherwise."""

    name: str
    family: str
    """The Hugging Face `model_type`: llama, qwen3, gpt2, deepseek_v3, ..."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys."""
    ffn: int
    """Width of the feed-forward part that a token goes through in a block: with experts, of all that it is sent to."""
    vocab: int
    tied: bool
    """The head shares the embedding's weight."""
    max_positions: int
    parameters: int
    """All parameters, a tied weight once."""
    block_parameters: int
    """Parameters of one block; of the largest, where they differ."""
    matmul_parameters: int
    """Parameters that every token is multiplied with: the blocks' matrices and the head, not the embedding look-up, and of the
    experts only those that a token is sent to."""
    blocks: tuple[int, ...] = ()
    """Parameters by block, where they differ (dense blocks before those with experts). Empty: all are alike."""
    value_dim: int = 0
    """Width of a head's values, where it is not head_dim (DeepSeek's latent attention). 0: it is."""
    latent: int = 0
    """Numbers a token that queries, keys and values are made from (DeepSeek's latent attention). 0: from the hidden state."""
    experts: int = 0
    """Routed experts in a block that has any. 0: none."""
    active_experts: int = 0
    """Routed experts that a token is sent to."""
    idle_parameters: int = 0
    """Parameters of routed experts that a token is not sent to, over all blocks."""
    gated: bool = True
    """The feed-forward part has a gate: three matrices, not two."""
    causal: bool = True
    """A position sees only those before it. False: BERT."""
    window: int = 0
    """Positions that attention looks back on in every block. 0: all."""
    linears: tuple[Linear, ...] = ()
    """The linear layers that every block has, in the block's order. Experts are no linear layers."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Parameters of each block, in order."""
        return self.blocks or (self.block_parameters,) * self.layers

    @property
    def outside_blocks(self) -> int:
        """Parameters of embedding, head and what is beside the blocks."""
        return self.parameters - sum(self.block_sizes)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token goes through."""
        return self.parameters - self.idle_parameters

    @property
    def attention_width(self) -> float:
        """Mean width of queries against keys and of weights against values, over all heads."""
        return self.heads * (self.head_dim + (self.value_dim or self.head_dim)) / 2

    def attention_flops_a_token(self, sequence_length: int) -> float:
        """FLOPs of attention scores and their use, forward and backward, for one token of a full row.

        12 x layers x width x positions seen: a row of s tokens sees s / 2 on average if causal (Kaplan et al. 2020 with the
        causal half), w - w^2 / 2s with a window of w < s, and s if not.
        """
        seen = float(sequence_length)
        if self.causal:
            window = min(self.window or sequence_length, sequence_length)
            seen = window - window * window / (2 * sequence_length)
        return 12 * self.layers * self.attention_width * seen

    def adapted(self, targets: tuple[str, ...]) -> list[Linear]:
        """The linear layers of a block that `targets` name: by the end of their path, whole words only, as peft does."""
        return [linear for linear in self.linears if any(f".{linear.name}".endswith(f".{target}") for target in targets)]

    def flops_a_token(self, sequence_length: int, adapter_parameters: int = 0) -> float:
        """Model FLOPs of forward and backward for a token: 6 x matmul parameters + attention. Recompute is not counted.

        With an adapter the model's matrices are frozen: 4 x, as their own gradients are not computed, and 6 x the adapter's.
        """
        attention = self.attention_flops_a_token(sequence_length)
        if adapter_parameters:
            return 4.0 * self.matmul_parameters + 6.0 * adapter_parameters + attention
        return 6.0 * self.matmul_parameters + attention
