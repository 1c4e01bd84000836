"""What conversations are fed as."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import processors

from distca.inference.conversations import Conversations
from distca.inference.models import read_model
from support.byte_tokenizer import chat_tokenizer
from support.small_models import save_small_model


def test_a_template_writes_the_special_tokens_and_the_tokenizer_adds_none(tmp_path: Path) -> None:
    """As Llama's do: a prompt that begins twice is none that the model has seen."""
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[begin]
    )
    assert len(tokenizer.encode("Hi")) == 3
    tokenizer.chat_template = "<s>" + tokenizer.chat_template
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    chats = Conversations(model, tokenizer, [[{"role": "user", "content": "Hi"}]], 4)
    # `<s>`, and a token for each other byte.
    assert chats.lengths == [1 + len("<user>Hi\n<assistant>")]
