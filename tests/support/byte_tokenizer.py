"""A tokenizer of bytes with a chat template, for small models of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.small_models import save_small_model

CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and no others: characters of several bytes are as many tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def chat_tokenizer() -> Any:
    """The same as a tokenizer of transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    tokenizer.chat_template = CHAT
    return tokenizer


def save_chat_model(folder: Path) -> Path:
    """Writes a small Llama that can be talked to, and returns its folder."""
    model = save_small_model("llama", folder, eos_token_id=259)
    chat_tokenizer().save_pretrained(model)
    return model
