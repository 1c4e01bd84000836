"""Sizes of published models, by name."""

from __future__ import annotations

from dataclasses import dataclass

from distca.cost.volume import AttentionShape


@dataclass(frozen=True)
class ModelSize:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    Attributes:
        layers: transformer layers.
        hidden_size: width of the residual stream.
        heads: query heads.
        kv_heads: key-value heads (query groups).
        head_dim: elements of a head.
        ffn_hidden_size: width of the MLP.
        vocab_size: tokens that embedding and output layer know.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int = 128_256

    def attention_shape(self, tensor_parallel: int = 1, dtype_bytes: int = 2) -> AttentionShape:
        """The attention heads of one tensor-parallel rank.

        Raises:
            ValueError: the heads don't divide.
        """
        if tensor_parallel < 1 or self.kv_heads % tensor_parallel or self.heads % tensor_parallel:
            raise ValueError(
                f"tensor-parallel size {tensor_parallel} does not divide {self.heads} heads and "
                f"{self.kv_heads} key-value heads"
            )
        return AttentionShape(
            self.heads // tensor_parallel,
            self.kv_heads // tensor_parallel,
            self.head_dim,
            dtype_bytes,
        )


MODELS = {
    # DistCA's Table 2; the 34B model's vocabulary is not published there, and taken from Llama 2.
    "llama-8b": ModelSize(32, 4096, 32, 8, 128, 14336),
    "llama-34b": ModelSize(48, 8192, 64, 16, 128, 22016, 32_000),
    # The Llama 3 report's Table 3.
    "llama-70b": ModelSize(80, 8192, 64, 8, 128, 28672),
    "llama-405b": ModelSize(126, 16384, 128, 8, 128, 53248),
}
