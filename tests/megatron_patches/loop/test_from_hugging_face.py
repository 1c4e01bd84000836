"""`--from-hf`: a run starts from a model's folder as from its converted checkpoint."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_patches.loop import from_hugging_face
from megatron_patches.loop.from_hugging_face import set_first_weights, with_model_flags
from megatron_patches.parts import build_parser, parse_args
from support.converted import add_tokenizer
from support.pretraining import LOSS, run_command
from support.small_families import save_family, small_config
from support.whole_runs import write_documents

RUN = """
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant
    --split 100,0,0 --log-interval 1 --eval-iters 0 --seq-length 256
""".split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration and a tokenizer, and no weights."""
    found = tmp_path / "model"
    small_config("qwen3").save_pretrained(found)
    add_tokenizer(found, 301)
    return found


def parse(folder: Path, *flags: str) -> Namespace:
    return parse_args(
        [*RUN, "--train-iters", "3", "--data-path", "-", "--from-hf", str(folder), *flags]
    )


def test_the_folder_s_model_is_the_run_s(folder: Path) -> None:
    args = parse(folder)
    assert (args.num_layers, args.hidden_size, args.kv_channels) == (2, 64, 24)
    assert (args.qk_layernorm, args.swiglu, args.add_bias_linear) == (True, True, False)
    assert (args.rotary_base, args.max_position_embeddings) == (500000, 512)
    assert (args.tokenizer_type, args.tokenizer_model) == ("HuggingFaceTokenizer", str(folder))
    assert args.attention_dropout == 0


def test_layers_of_the_model_are_the_run_s(tmp_path: Path) -> None:
    small_config("gemma3_text").save_pretrained(tmp_path)
    add_tokenizer(tmp_path, 301)
    args = parse(tmp_path, "--rotary-base", "9000000")
    assert args.spec == ["megatron_patches.model.gemma", "GEMMA3"]
    assert (args.qk_layernorm, args.window_size) == (True, (47, 0))
    with pytest.raises(ValueError, match=r"--spec \['support.own_layers', 'DAMPED'\] \(--spec \["):
        parse(tmp_path, "--spec", "support.own_layers", "DAMPED")


def test_a_run_chooses_what_longer_documents_need(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    add_tokenizer(other, 301)
    chosen = ["--rotary-base", "9000000", "--max-position-embeddings", "4096"]
    chosen += ["--tokenizer-model", str(other), "--hidden-dropout", "0.1"]
    # What the model has may be said again.
    args = parse(folder, *chosen, "--num-layers", "2", "--qk-layernorm")
    assert (args.rotary_base, args.max_position_embeddings) == (9000000, 4096)
    assert (args.tokenizer_model, args.hidden_dropout) == (str(other), 0.1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-layers", "4"], r"--num-layers 4 \(--num-layers 2\): remove it"),
        (
            ["--hidden-size=32", "--add-qkv-bias"],
            r"--hidden-size 32 \(--hidden-size 64\), --add-qkv-bias \(without --add-qkv-bias\): "
            "remove them",
        ),
        (["--num-experts", "4"], r"--num-experts 4 \(without --num-experts\): remove it"),
        (["--window-size", "7,0"], r"--window-size \(7, 0\) \(without --window-size\)"),
        (
            ["--use-mup", "--mup-width-mult", "2", "--mup-output-mult", "3"],
            r"--use-mup \(without --use-mup\), --mup-width-mult 2.0 \(--mup-width-mult 1.0\), "
            r"--mup-output-mult 3.0 \(--mup-output-mult 1.0\): remove them",
        ),
        (
            ["--apply-residual-connection-post-layernorm"],
            r"--apply-residual-connection-post-layernorm \(without ",
        ),
        (["--no-position-embedding"], r"--no-position-embedding \(without "),
        (["--mrope-section", "1", "2", "3"], r"--mrope-section \[1, 2, 3\] \(without "),
        (["--moe-router-force-load-balancing"], r"--moe-router-force-load-balancing \(without "),
    ],
)
def test_flags_that_contradict_the_model(folder: Path, flags: Sequence[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"than those of --from-hf .*, in brackets: {message}"):
        parse(folder, *flags)


@pytest.mark.parametrize("flag", ["--yaml-cfg", "--heterogeneous-layers-config-path"])
def test_files_of_flags_are_not_looked_for(folder: Path, flag: str) -> None:
    with pytest.raises(ValueError, match=f"DistCA does not cover .*{flag} nowhere"):
        parse(folder, flag, "nowhere")


def test_rows_beyond_the_tokenizer_s_tokens_are_the_model_s(tmp_path: Path) -> None:
    small_config("qwen3", vocab_size=320).save_pretrained(tmp_path)
    add_tokenizer(tmp_path, 301)
    assert parse(tmp_path).make_vocab_size_divisible_by == 20
    for divisor in ("128", "10"):
        with pytest.raises(ValueError, match=f"--make-vocab-size-divisible-by {divisor}"):
            parse(tmp_path, "--make-vocab-size-divisible-by", divisor)
    # A run may give another one that pads to the model's rows.
    assert parse(tmp_path, "--make-vocab-size-divisible-by", "64").padded_vocab_size is None
    two = ["--tensor-model-parallel-size", "2"]
    source = ["--from-hf", str(tmp_path)]
    words = with_model_flags(build_parser(), [*source, *two])
    assert words[words.index("--make-vocab-size-divisible-by") + 1] == "10"
    with pytest.raises(ValueError, match=r"divisible-by 128 .*: remove it"):
        with_model_flags(build_parser(), [*source, *two, "--make-vocab-size-divisible-by", "128"])
    three = ["--tensor-model-parallel-size", "3"]
    with pytest.raises(ValueError, match="of 320 rows, which --tensor-model-parallel-size 3 does"):
        with_model_flags(build_parser(), [*source, *three])


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder: give a transformers model's"):
        parse(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"has no config.json"):
        parse(tmp_path)


def losses(*flags: str) -> list[str]:
    """The losses that a run on two ranks prints."""
    return [loss for _, loss in LOSS.findall(run_command(2, [*RUN, *flags]))]


def test_a_run_from_the_folder_is_one_from_its_checkpoint(tmp_path: Path) -> None:
    model, save = save_folder(tmp_path), str(tmp_path / "save")
    corpus = write_documents(tmp_path / "corpus", [400, *[40] * 30] * 4)
    given = ["--distca", "--from-hf", str(model), "--data-path", corpus]
    first = losses(*given, "--train-iters", "2", "--save", save, "--load", save)
    converted = tmp_path / "model.megatron-float32"
    made = converted.stat().st_mtime_ns
    assert {each.name for each in tmp_path.iterdir()} >= {"model", converted.name, "save"}
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]
    # The second line is a mean of both.
    loaded = [*given[:3], "--load", str(converted), "--finetune", "--data-path", corpus]
    assert losses(*loaded, "--train-iters", "2") == first
    assert losses(*given, "--train-iters", "2") == first
    assert converted.stat().st_mtime_ns == made
    # A run that was ended goes on.
    shutil.rmtree(converted)
    longer = ["--train-iters", "3", "--override-opt_param-scheduler"]
    after = losses(*given, *longer, "--save", save, "--load", save)
    assert len(after) == 1
    assert float(after[0]) < float(first[0])
    assert not converted.exists()


def save_folder(tmp_path: Path) -> Path:
    save_family("qwen3", tmp_path / "model")
    return tmp_path / "model"


def first_weights(folder: Path, **changes: object) -> Namespace:
    """What a rank starts from."""
    values = {"load": None, "ckpt_step": None, "pretrained_checkpoint": None, "bf16": True}
    args = Namespace(**values | {"rank": 0, "from_hf": str(folder)} | changes)
    set_first_weights(args, {})
    return args


def test_weights_that_were_changed_are_not_passed_over(folder: Path) -> None:
    converted = folder.with_name("model.megatron-bfloat16")
    converted.mkdir()
    (converted / "source.json").write_text(json.dumps(from_hugging_face._identity(folder)))
    assert first_weights(folder).pretrained_checkpoint == str(converted)
    (folder / "model.safetensors").write_bytes(b"others")
    with pytest.raises(ValueError, match=r"was made of other files than .* has now: remove it"):
        first_weights(folder)
    assert first_weights(folder, pretrained_checkpoint="mine").pretrained_checkpoint == "mine"


def test_a_model_that_cannot_be_converted_leaves_nothing(folder: Path) -> None:
    before = {*folder.parent.iterdir()}
    with pytest.raises(ValueError, match=r"cannot be converted: distca convert: .* has no weights"):
        first_weights(folder)
    assert {*folder.parent.iterdir()} == before


def test_ranks_wait_as_long_as_the_first_one_works(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(from_hugging_face, "_PATIENCE", 0.1)
    with pytest.raises(ValueError, match=r"was not made in 0 s: .* that all machines share"):
        first_weights(folder, rank=1)
    converted = folder.with_name("model.megatron-bfloat16")
    converted.mkdir()
    (converted / "latest_checkpointed_iteration.txt").write_text("0")
    assert first_weights(folder, rank=1).pretrained_checkpoint == str(converted)
