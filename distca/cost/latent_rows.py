"""Whether latents should travel instead of the keys and values that servers can make of them."""

from __future__ import annotations

from typing import Literal

from distca.cost.link import Links
from distca.cost.model_sizes import ModelSize
from distca.cost.volume import AttentionShape, BackwardInputs

LatentRows = Literal["auto", "on", "off"]
"""What travels for keys and values of latent attention: their latents, where that takes less time;
wherever servers can expand them; or the keys and values."""

LATENT_ROWS: tuple[LatentRows, ...] = ("auto", "on", "off")

PRODUCTS_PER_SECOND = 400e12
"""Operations a second of matrix products in 16 bits: of an H100, as are the links' speeds that are
taken where none are given."""


def latents_pay(
    shape: AttentionShape,
    links: Links,
    servers: int,
    backward: BackwardInputs = "resend",
    flops_per_second: float = PRODUCTS_PER_SECOND,
) -> bool:
    """Returns whether links need longer for the bytes that latents save than servers to expand
    them.

    A row is sent to its server (twice with "resend") and its gradient back. A server expands it as
    often as it is sent, and makes the gradients of the latent and of the weight.

    Args:
        shape: heads of one tensor-parallel rank, with latents that travel.
        links: links between the servers.
        servers: servers among which rows travel.
        backward: how the backward pass gets its inputs.
        flops_per_second: rate of matrix products.
    """
    sent = 2 if backward == "resend" else 1
    saved = (sent + 1) * (shape.kv_row_bytes - shape.moved_kv_row_bytes)
    near = servers <= links.ranks_per_node
    speed = 1e9 * (links.node_gb_per_s if near else links.network_gb_per_s)
    return saved / speed > (sent + 2) * shape.expansion_flops / flops_per_second


def comm_shape(
    model: ModelSize,
    tensor_parallel: int,
    dtype_bytes: int,
    links: Links,
    servers: int,
    rows: LatentRows = "auto",
    flops_per_second: float = PRODUCTS_PER_SECOND,
) -> AttentionShape:
    """Returns the heads of one tensor-parallel rank, with what travels for keys and values.

    Args:
        model: sizes of the model.
        tensor_parallel: ranks that share the heads.
        dtype_bytes: bytes of an element.
        links, servers, flops_per_second: as for `latents_pay`; all servers can expand latents.
        rows: what travels where the model has latents.

    Raises:
        ValueError: latents must travel, and the model has none.
    """
    if model.latents is None:
        if rows == "on":
            raise ValueError("--latent-rows on needs a model with latents")
        return model.attention_shape(tensor_parallel, dtype_bytes)
    shape = model.latent_shape(tensor_parallel, dtype_bytes)
    pay = latents_pay(shape, links, servers, flops_per_second=flops_per_second)
    if rows == "on" or (rows == "auto" and pay):
        return shape
    return model.attention_shape(tensor_parallel, dtype_bytes)
