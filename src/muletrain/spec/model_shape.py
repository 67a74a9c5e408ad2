"""ModelShape: the numbers of a decoder that memory and time are computed from, read off a Hugging Face config."""

from __future__ import annotations

from muletrain.spec.value import Value


class ModelShape(Value):
    """A decoder-only transformer. All counts are of parameters unless the name says otherwise."""

    name: str
    family: str
    """The Hugging Face `model_type`: llama, qwen3, gpt2."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """The head shares the embedding's weight."""
    max_positions: int
    parameters: int
    """All parameters, a tied weight once."""
    block_parameters: int
    """Parameters of one block."""
    matmul_parameters: int
    """Parameters that every token is multiplied with: the blocks' matrices and the head, not the embedding look-up."""

    def flops_a_token(self, sequence_length: int) -> float:
        """Model FLOPs of forward and backward for one trained token, causal attention, recompute not counted.

        6 x matmul parameters + 6 x layers x sequence x attention width (Kaplan et al. 2020, with the causal half).
        """
        attention = 6 * self.layers * sequence_length * self.heads * self.head_dim
        return 6.0 * self.matmul_parameters + attention
