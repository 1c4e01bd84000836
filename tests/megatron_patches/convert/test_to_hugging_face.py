"""Exported checkpoints: transformers computes what the trained model does, with nothing else."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_patches.convert.to_hugging_face as to_hugging_face_module
from distca.documents.tokenizer import build_tokenizer
from megatron_patches.convert.folder import write_weights, written_whole
from megatron_patches.convert.to_hugging_face import llama_config, to_hugging_face
from megatron_patches.loop.kept_tokenizer import keep_tokenizer, kept_tokenizer
from megatron_patches.loop.saved_arguments import saved_arguments
from support.converted import convert
from support.forks import forking
from support.ranks import forget_megatron
from support.small_families import small_config

SIZES = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --kv-channels 16
    --group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu
    --disable-bias-linear --position-embedding-type rope --max-position-embeddings 16384
    --tokenizer-type HuggingFaceTokenizer
""".split()
"""A model as the demo's, whose heads are wider than its hidden size."""
MODELS = {
    "own output layer": (
        "--untie-embeddings-and-output-weights --norm-epsilon 1e-2 --rotary-base 100".split()
    ),
    "tied, Llama 3's rope": "--use-rope-scaling --rope-scaling-factor 32".split(),
}
WORDS = {"</s>": 0} | {f"w{i}": i for i in range(1, 77)}
SAVED = Namespace(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    kv_channels=16,
    group_query_attention=True,
    num_query_groups=2,
    norm_epsilon=1e-5,
    rotary_base=10000,
    use_rope_scaling=False,
    untie_embeddings_and_output_weights=True,
    max_position_embeddings=128,
    vocab_size=77,
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
)


def save_and_export(folder: Path, flags: list[str], tokens: list[int]) -> torch.Tensor:
    """Saves a model with random weights as training does, and exports the checkpoint alone.

    Returns:
        The logits without those of padding, float32 `[tokens, vocabulary]`.
    """
    from megatron_patches.convert.model import build_model, model_logits, parse_model
    from megatron_patches.parts import save_weights

    torch.manual_seed(1)
    flags = [*SIZES, *flags, "--tokenizer-model", str(folder / "tokenizer")]
    args = parse_model(flags, bf16=False)
    model = build_model(args)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms of all ones would hide one that is mistaken for another.
            weight.copy_(0.3 * torch.randn(weight.shape) + (1.0 if "norm" in name else 0.0))
    save_weights(model, args, folder / "checkpoints", iteration=4)
    out = model_logits(model, tokens)
    forget_megatron()
    (folder / "tokenizer").rename(folder / "gone")
    convert("--checkpoint", args.save, "--to", folder / "model")
    return out[:, : len(WORDS)]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A fresh process for the commands: saving starts children, which `ranks` may not have."""
    with ProcessPoolExecutor(1, forking()) as pool:
        yield pool


@pytest.mark.parametrize("which", MODELS)
def test_transformers_has_the_logits_of_the_trained_model(process, tmp_path, which) -> None:
    import tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "tokenizer").mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, "</s>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    tokens = torch.randint(0, len(WORDS), (300,)).tolist()
    job = process.submit(save_and_export, tmp_path, MODELS[which], tokens)
    found = job.result(timeout=200)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == 16384
    assert model.generation_config.eos_token_id == 0
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.eos_token_id == 0
    assert tokenizer("w3 w5")["input_ids"] == [3, 5]
    said = [{"role": "user", "content": "w7"}]
    prompt = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert prompt == "user: w7\nassistant: "
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(set(modes.values())) == 1, modes


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_files_is_not_overwritten_unless_asked(tmp_path: Path, force) -> None:
    (tmp_path / "notes").write_text("mine")
    message = "has no checkpoint" if force else "has files already: .* --force"
    with pytest.raises(ValueError, match=message):
        to_hugging_face(tmp_path / "nothing", tmp_path, force=force)
    with pytest.raises(ValueError, match="notes is a file"):
        to_hugging_face(tmp_path / "nothing", tmp_path / "notes")


class Killed(BaseException):
    """As if the process ended."""


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir()
    for name in ("notes", "config.json", "model-00001-of-00002.safetensors"):
        (output / name).write_text("before")

    def write_half() -> None:
        with written_whole(output, force=True) as folder:
            (folder / "config.json").write_text("after")
            raise Killed

    with pytest.raises(Killed):
        write_half()
    assert {file.read_text() for file in output.iterdir()} == {"before"}
    with written_whole(output, force=True) as folder:
        (folder / "config.json").write_text("after")
    left = {file.name: file.read_text() for file in output.iterdir()}
    # The other model's weights would be taken for this one's.
    assert left == {"notes": "before", "config.json": "after"}
    assert [*tmp_path.iterdir()] == [output]


def test_weights_in_several_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = {f"w{number}": torch.full((number,), float(number)) for number in (4, 5, 9, 1)}
    write_weights(tmp_path, weights.items(), most_bytes=40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 19
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert index["weight_map"] == {"w4": files[0], "w5": files[0], "w9": files[1], "w1": files[1]}
    found = load_file(tmp_path / files[0]) | load_file(tmp_path / files[1])
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in weights.items()
    }


def llama_arguments(*flags: str) -> Namespace:
    """Arguments that a run kept of a Llama, unless flags say otherwise."""
    from megatron_patches.convert.model import parse_model

    base = " ".join(SIZES).replace("HuggingFaceTokenizer", "NullTokenizer --vocab-size 76").split()
    saved = saved_arguments({"args": parse_model([*base, *flags], bf16=False)})
    saved.padded_vocab_size = 128
    return saved


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--qk-layernorm"], "trained with --qk-layernorm"),
        (["--normalization", "LayerNorm"], "trained with --normalization LayerNorm"),
        (["--softmax-type", "off-by-one"], "trained with --softmax-type off-by-one"),
    ],
)
def test_what_is_no_llama_is_refused_by_name(flags: list[str], message: str) -> None:
    saved = llama_arguments(*flags)
    tokenizer = build_tokenizer("NullTokenizer", None, 76)
    with pytest.raises(ValueError, match=f"not that of a llama: it was {message}[ :]"):
        to_hugging_face_module._architecture(saved, None, tokenizer, None, False)


def test_the_family_s_configuration_says_what_flags_cannot(tmp_path: Path) -> None:
    from megatron_patches.convert.model import flags_of, parse_model

    config = small_config("qwen3")
    flags = [*flags_of(config), "--max-position-embeddings", "128"]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "300"]
    saved = saved_arguments({"args": parse_model(flags, bf16=False)})
    saved.padded_vocab_size = 384
    tokenizer = build_tokenizer("NullTokenizer", None, 300)

    def architecture(**changes: Any) -> Any:
        small_config("qwen3", **changes).save_pretrained(tmp_path)
        kept = to_hugging_face_module._configuration(tmp_path / "nothing", tmp_path)
        return to_hugging_face_module._architecture(saved, kept, tokenizer, None, False)

    values, found, args = architecture(initializer_range=0.5)
    assert (values["model_type"], found.model_type, args.qk_layernorm) == ("qwen3", "qwen3", True)
    assert values["initializer_range"] == 0.5
    with pytest.raises(ValueError, match="not that of a qwen3: it was trained with --num-layers 2"):
        architecture(num_hidden_layers=3)


def test_a_configuration_of_another_model_is_not_passed_over() -> None:
    """A Llama's checkpoint, and `--hf-model` of another family."""
    tokenizer = build_tokenizer("NullTokenizer", None, 76)
    saved = llama_arguments()
    other = small_config("mixtral").to_dict()
    values, *_ = to_hugging_face_module._architecture(saved, other, tokenizer, None, False)
    # Of what is kept beside checkpoints, only the tokenizer may be theirs.
    assert values["model_type"] == "llama"
    with pytest.raises(ValueError, match="not that of a mixtral: it was trained with --hidden-s"):
        to_hugging_face_module._architecture(saved, other, tokenizer, None, False, only_kept=True)


def test_documents_may_be_longer_than_windows() -> None:
    longer = Namespace(**vars(SAVED), distca_max_document_length=4096)
    assert llama_config(longer, 77, 0)["max_position_embeddings"] == 4096


def test_what_training_changes_is_in_the_configuration() -> None:
    kept = {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0},
        "max_position_embeddings": 64,
        "vocab_size": 320,
        "num_nextn_predict_layers": 1,
        "initializer_range": 0.5,
    }
    run = {"rotary_base": 500000, "use_rope_scaling": True, "rope_scaling_factor": 32.0}
    saved = Namespace(**{**vars(SAVED), **run, "padded_vocab_size": 128})
    tokenizer = build_tokenizer("NullTokenizer", None, 76)
    assert to_hugging_face_module._of_this_run(kept, saved, tokenizer) == {
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 32.0},
        "max_position_embeddings": 128,
        "vocab_size": 77,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.5,
    }


def test_training_changes_the_rotary_base_of_layers_without_windows() -> None:
    local, main = {"rope_theta": 1e4}, {"rope_type": "linear", "factor": 8.0}
    kept = {"rope_parameters": {"sliding_attention": local, "full_attention": main}}
    saved = Namespace(**{**vars(SAVED), "rotary_base": 500000, "padded_vocab_size": 128})
    tokenizer = build_tokenizer("NullTokenizer", None, 76)
    values = to_hugging_face_module._of_this_run(kept, saved, tokenizer)
    assert values["rope_parameters"] == {
        "sliding_attention": local,
        "full_attention": main | {"rope_theta": 5e5},
    }


def test_a_tokenizer_keeps_its_own_template(tmp_path: Path) -> None:
    import tokenizers

    given, output = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    output.mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, "</s>")).save(
        str(given / "tokenizer.json")
    )
    (given / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "w9", "chat_template": "mine"})
    )
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(given))
    config = {"max_position_embeddings": 128}
    kind = "HuggingFaceTokenizer"
    to_hugging_face_module._write_tokenizer(
        kind, str(given / "tokenizer.json"), tokenizer, config, output
    )
    written = json.loads((output / "tokenizer_config.json").read_text())
    assert (written["eos_token"], written["chat_template"]) == ("w9", "mine")
    assert written["model_max_length"] == 128
    assert (output / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()


def test_the_tokenizer_beside_checkpoints_is_the_last_that_a_run_had(tmp_path: Path) -> None:
    given = tmp_path / "given"
    flags = "HuggingFaceTokenizer", str(given / "mine.json"), tmp_path
    keep_tokenizer(*flags)
    assert kept_tokenizer(tmp_path) is None
    given.mkdir()
    for text in ("one", "another"):
        (given / "mine.json").write_text(text)
        keep_tokenizer(*flags)
        kept = kept_tokenizer(tmp_path)
        assert kept is not None
        assert {file.name: file.read_text() for file in kept.iterdir()} == {"tokenizer.json": text}
    (given / "mine.json").unlink()
    keep_tokenizer(*flags)
    assert kept_tokenizer(tmp_path) == kept


def test_a_missing_checkpoint_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no checkpoint"):
        to_hugging_face(tmp_path / "nothing", tmp_path / "model")
