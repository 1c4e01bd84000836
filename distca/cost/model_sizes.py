"""Sizes of a transformer, the counts that follow from them, and published models by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distca.cost.volume import AttentionShape
from distca.plan import LayerMasks, Mask


@dataclass(frozen=True)
class Experts:
    """Routed experts of each layer: gated MLPs; a token uses some of them.

    Attributes:
        number: experts of a layer.
        chosen: experts that a token uses.
        ffn_hidden_size: width of each.

    Raises:
        ValueError: a token cannot choose that many.
    """

    number: int
    chosen: int
    ffn_hidden_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.number:
            raise ValueError(f"a token cannot use {self.chosen} of {self.number} experts")


@dataclass(frozen=True)
class Latents:
    """Multi-latent attention: queries, keys and values are expanded from latents.

    Attributes:
        kv_rank: size of the keys' and values' latent.
        rotated_dim: elements of a key's head that are rotated, and that all heads share.
        v_head_dim: elements of a value's head.
        q_rank: size of the queries' latent; None: queries have none.
    """

    kv_rank: int
    rotated_dim: int
    v_head_dim: int
    q_rank: int | None = None


@dataclass(frozen=True)
class ModelSize:
    """A decoder-only transformer with grouped-query or multi-latent attention and gated MLPs, in
    experts or whole.

    Attributes:
        layers: transformer layers.
        hidden_size: width of the residual stream.
        heads: query heads.
        kv_heads: key-value heads (query groups).
        head_dim: elements of a head.
        ffn_hidden_size: width of the MLP that all tokens use: of a dense layer's, or of shared
            experts together; 0: there is none beside routed experts.
        vocab_size: tokens that embedding and output layer know.
        experts: routed experts of each layer; None: the layers are dense.
        window_left: earlier tokens that a query sees in layers with a window, or None.
        window_attn_skip_freq: period of layers without windows and chunks, or None.
        latents: latents of attention (`head_dim` then includes a key's rotated part), or None.
        attention_chunk_size: tokens of a chunk in layers whose queries see their own chunk alone,
            or None.

    Raises:
        ValueError: with latents, keys have fewer heads than queries, or all of a key is rotated.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int = 128_256
    experts: Experts | None = None
    window_left: int | None = None
    window_attn_skip_freq: int | None = None
    latents: Latents | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.latents is None:
            return
        if self.kv_heads != self.heads or self.head_dim <= self.latents.rotated_dim:
            raise ValueError(
                f"attention with latents has a key for each of its {self.heads} heads, of more "
                f"than the {self.latents.rotated_dim} elements that are rotated, not "
                f"{self.kv_heads} of {self.head_dim}"
            )

    @property
    def value_dim(self) -> int:
        """Elements of a value's head, and of an output's."""
        return self.head_dim if self.latents is None else self.latents.v_head_dim

    @property
    def masks(self) -> LayerMasks:
        """What queries see in each layer."""
        local = Mask(self.window_left, self.attention_chunk_size)
        if local == Mask() or self.window_attn_skip_freq is None:
            return LayerMasks((local,))
        return LayerMasks.of([local] * (self.window_attn_skip_freq - 1) + [Mask()])

    @property
    def sees_all(self) -> bool:
        """Whether queries see all earlier tokens of their document in every layer."""
        return self.masks == LayerMasks()

    def attention_shape(self, tensor_parallel: int = 1, dtype_bytes: int = 2) -> AttentionShape:
        """Returns the attention heads of one tensor-parallel rank.

        Raises:
            ValueError: `tensor_parallel` does not divide the heads.
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
            self.value_dim,
        )

    def latent_shape(self, tensor_parallel: int = 1, dtype_bytes: int = 2) -> AttentionShape:
        """Returns the same heads where latents travel instead of keys and values, of a model with
        them."""
        shape, latents = self.attention_shape(tensor_parallel, dtype_bytes), self.latents
        assert latents is not None
        return replace(shape, kv_rank=latents.kv_rank, rotated_dim=latents.rotated_dim)

    @property
    def pre_parameters(self) -> int:
        """Parameters of a layer's projections to queries, keys and values."""
        return sum(inputs * outputs for inputs, outputs, _ in self.pre_products)

    @property
    def pre_products(self) -> tuple[tuple[int, int, bool], ...]:
        """Matrices of a layer before core attention: their inputs, their outputs, and whether
        tensor-parallel ranks share the outputs."""
        hidden, of_queries = self.hidden_size, self.heads * self.head_dim
        if self.latents is None:
            of_keys = 2 * self.kv_heads * self.head_dim
            return ((hidden, of_queries + of_keys, True),)
        latents = self.latents
        expanded = self.heads * (self.head_dim - latents.rotated_dim + latents.v_head_dim)
        keys = (
            (hidden, latents.kv_rank + latents.rotated_dim, False),
            (latents.kv_rank, expanded, True),
        )
        if latents.q_rank is None:
            return ((hidden, of_queries, True), *keys)
        return ((hidden, latents.q_rank, False), (latents.q_rank, of_queries, True), *keys)

    @property
    def post_parameters(self) -> int:
        """Parameters of a layer's output projection and of the MLPs that a token uses."""
        return self.hidden_size * self.heads * self.value_dim + self.mlp_parameters

    @property
    def mlp_width(self) -> int:
        """Width of all gated MLPs of a layer together that a token uses."""
        routed = self.experts.chosen * self.experts.ffn_hidden_size if self.experts else 0
        return self.ffn_hidden_size + routed

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the gated MLPs of a layer that a token uses."""
        return 3 * self.hidden_size * self.mlp_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer that a token uses, without norms, biases and routers."""
        return self.pre_parameters + self.post_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of a layer."""
        if self.experts is None:
            return 0
        return 3 * self.hidden_size * self.experts.ffn_hidden_size * self.experts.number

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of one layer beside its routed experts."""
        routed = 3 * self.hidden_size * (self.mlp_width - self.ffn_hidden_size)
        return self.layer_parameters - routed

    @property
    def total_layer_parameters(self) -> int:
        """Parameters of one layer, all experts among them."""
        return self.dense_layer_parameters + self.expert_parameters

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding; the output layer has as many."""
        return self.vocab_size * self.hidden_size

    def training_flops(self, tokens: int, pairs: int) -> float:
        """Returns the model operations of a training step: forward, and twice as many backward.

        Linear layers, the output layer among them, and the visible pairs of core attention count;
        other operations of a run, such as recomputing activations, do not.

        Args:
            tokens: tokens of the global batch.
            pairs: visible (query, key) pairs of its documents.
        """
        linear = 2.0 * (self.layers * self.layer_parameters + self.vocabulary_parameters)
        per_pair = self.attention_shape().flops_per_pair
        return 3.0 * (tokens * linear + self.layers * pairs * per_pair)


# The Llama 3 report's Table 3.
_LLAMA_3 = {
    "8b": ModelSize(32, 4096, 32, 8, 128, 14336),
    "70b": ModelSize(80, 8192, 64, 8, 128, 28672),
    "405b": ModelSize(126, 16384, 128, 8, 128, 53248),
}
MODELS = {
    # DistCA's Table 2; the 34B model's vocabulary is not published there, and taken from Llama 2.
    "llama-8b": _LLAMA_3["8b"],
    "llama-34b": ModelSize(48, 8192, 64, 16, 128, 22016, 32_000),
    "llama-70b": _LLAMA_3["70b"],
    "llama-405b": _LLAMA_3["405b"],
    # Llama 3.1 has the sizes of Llama 3. Llama 3.2: the models' configurations; their output layer
    # shares the embedding's weights, which are counted twice here.
    **{f"llama-3.1-{name}": size for name, size in _LLAMA_3.items()},
    "llama-3.2-1b": ModelSize(16, 2048, 32, 8, 64, 8192),
    "llama-3.2-3b": ModelSize(28, 3072, 24, 8, 128, 8192),
    # The Qwen3 report, Table 1, and the models' configurations.
    "qwen3-8b": ModelSize(36, 4096, 32, 8, 128, 12_288, 151_936),
    "qwen3-32b": ModelSize(64, 5120, 64, 8, 128, 25_600, 151_936),
    # The models' configurations: Mixtral's report, Table 1, and the Qwen3 report, Table 2.
    "mixtral-8x7b": ModelSize(32, 4096, 32, 8, 128, 0, 32_000, Experts(8, 2, 14336)),
    "qwen3-30b-a3b": ModelSize(48, 2048, 32, 4, 128, 0, 151_936, Experts(128, 8, 768)),
    "qwen3-235b-a22b": ModelSize(94, 4096, 64, 4, 128, 0, 151_936, Experts(128, 8, 1536)),
    # A layout like that of Gemma 3: its report, Section 2.1, with 60 layers instead of 62.
    "gemma3-27b-like": ModelSize(60, 5376, 32, 16, 128, 21_504, 262_208, None, 1023, 6),
    # Llama 4 Scout's configuration: chunks of 8192 tokens but in every fourth layer, and a shared
    # expert beside the routed ones.
    "llama4-scout-like": ModelSize(
        *(48, 5120, 40, 8, 128, 8192, 202_048),
        experts=Experts(16, 1, 8192),
        window_attn_skip_freq=4,
        attention_chunk_size=8192,
    ),
    # Like GPT-OSS: its model card; attention sinks cost nothing that is counted here.
    "gpt-oss-120b-like": ModelSize(36, 2880, 64, 8, 64, 0, 201_088, Experts(128, 4, 2880), 127, 2),
    # A layout like that of DeepSeek-V3 (its report, Section 4.2), with 60 layers instead of 61, all
    # of them with experts; one of these is used by all tokens.
    "deepseek-v3-like": ModelSize(
        *(60, 7168, 128, 128, 192, 2048, 129_280),
        experts=Experts(256, 8, 2048),
        latents=Latents(512, 64, 128, 1536),
    ),
}
