"""A small model of transformers that recalls: what needles are measured with.

The demo's own model has two layers, which both stay dense, and recalls no needle. This one has four
layers and reads bytes. It begins with a circuit for induction: a head of layer 0 looks at the token
before, and a head of layers 1 and 2, which may drop keys, looks for tokens that followed the same
one. From there it is trained on Python's standard library, as the demo is, with random codes in it
that come twice.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distca.inference.models import ServedModel, read_model
from distca.plan.span import Int64s
from distca.progress import progress

VOCABULARY = 256
_HIDDEN, _HEAD, _CODE, _THETA = 128, 64, 32, 1e9
_CONSTANT, _CODES, _BEFORE, _NEXT = 0, slice(1, 33), slice(33, 65), slice(65, 97)
"""Where the residual stream has a constant, a token's code, that of the one before, and that of the
next."""
_SLOW = [*range(16, 32), *range(48, 64)]
"""Dimensions of a head that rotate little."""
_SPAN = 8, 17
"""Lengths of codes."""


def text() -> tuple[Int64s, Int64s]:
    """Bytes of the standard library's modules: those to train on, and others."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    found = np.frombuffer(b"".join(each.read_bytes() for each in files), np.uint8)
    return found[:-500_000].astype(np.int64), found[-500_000:].astype(np.int64)


def make_model() -> Any:
    """A model with its circuit, not trained yet."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=4,
        hidden_size=_HIDDEN,
        intermediate_size=192,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=_HEAD,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    codes = torch.randint(2, (VOCABULARY, _CODE)).float() * 2 - 1
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02)
        tokens = model.model.embed_tokens.weight
        tokens[:, _CONSTANT] = 4.0
        tokens[:, _CODES] = codes
        model.lm_head.weight[:, _NEXT] = 0.1 * codes
        first, *others, _ = (layer.self_attn for layer in model.model.layers)
        # Turned back by one position, so that the token before fits best.
        angle = _THETA ** -(torch.arange(_HEAD // 2) / (_HEAD // 2))
        first.q_proj.weight[:_HEAD, _CONSTANT] = 1.2 * torch.cat([angle.cos(), -angle.sin()])
        first.k_proj.weight[: _HEAD // 2, _CONSTANT] = 1.2
        _connect(first.v_proj.weight, range(_CODE), _CODES, 1.0)
        _connect(first.o_proj.weight.T, range(_CODE), _BEFORE, 0.6)
        for layer in others:
            _connect(layer.q_proj.weight, _SLOW, _CODES, 2.0)
            _connect(layer.k_proj.weight, _SLOW, _BEFORE, 2.0)
            _connect(layer.v_proj.weight, range(_CODE), _CODES, 1.0)
            _connect(layer.o_proj.weight.T, range(_CODE), _NEXT, 1.2)
    return model


def _connect(weight: torch.Tensor, rows: Any, part: slice, gain: float) -> None:
    """Lets some of a head's dimensions have the elements of a part of the residual stream."""
    for row, column in zip(rows, range(part.start, part.stop), strict=True):
        weight[row, column] = gain


def trained(folder: Path, steps: int, command: str) -> ServedModel:
    """Reads a trained model from a folder; one that is not there is made, trained and written.

    Args:
        folder: folder of the model.
        steps: see `train`.
        command: what shows its progress.
    """
    if not (folder / "config.json").exists():
        made = make_model()
        with progress(command, "steps", steps, doing="training") as shown:
            train(made, steps, lambda *_: shown.update())
        made.save_pretrained(folder)
    return read_model(str(folder), torch.float32)


def train(model: Any, steps: int, told: Any) -> None:
    """Trains a model on text with codes that come twice.

    Args:
        model: model to train.
        steps: steps of 2,048 tokens, in sequences that grow.
        told: called with each step and its loss.
    """
    source, _ = text()
    random = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps, pct_start=0.05)
    for step in range(steps):
        tokens = (128, 256, 512, 1024)[4 * step // steps]
        rows = torch.from_numpy(
            np.stack([_with_codes(source, tokens, random) for _ in range(2048 // tokens)])
        )
        logits = model(rows).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        told(step, float(loss.detach()))


def _with_codes(source: Int64s, tokens: int, random: np.random.Generator) -> Int64s:
    """Text; about a third of it is codes."""
    start = int(random.integers(len(source) - tokens))
    found = source[start : start + tokens].copy()
    for _ in range(tokens // 64):
        code = random.permutation(np.unique(found))[: int(random.integers(*_SPAN))]
        one, other = np.sort(random.integers(0, tokens - len(code), 2))
        found[one : one + len(code)] = code
        found[other : other + len(code)] = code
    return found
