"""`--from-hf FOLDER`: architecture and first weights of a run are those of a model of Hugging Face.

The model's flags are put before those of the command line, so that these win where a run may
choose, as it may for longer contexts. Weights come from a checkpoint that `distca convert` makes
beside the folder once; the first rank does it, and the others wait for the files.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_patches.loop.checkpoint_folder import TRACKER, loaded_checkpoint
from megatron_patches.loop.hidden_folder import cleaned_up_at_signals, hidden_folder
from megatron_patches.loop.saved_arguments import FUNCTION_FLAGS, MODEL_FLAGS

logger = logging.getLogger(__name__)

_CHOSEN = {
    *"rotary_base use_rope_scaling rope_scaling_factor rotary_scaling_factor".split(),
    *"yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow".split(),
    *"yarn_correction_range_round_to_int mscale mscale_all_dim vocab_size".split(),
}
"""Flags of the model that a run may change, to train on longer documents."""

_SOURCE = "source.json"
"""File of a converted checkpoint, which says what it was made of."""

_TOKENIZERS = ("HuggingFaceTokenizer", "SFTTokenizer")
_PATIENCE = 300.0
"""Seconds for which ranks wait for a sign of the one that converts."""


def with_model_flags(parser: ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Returns a command line with the flags of the model of `--from-hf`, if that is given.

    Args:
        parser: parser of Megatron-LM's flags and ours.
        argv: command line.

    Raises:
        ValueError: the model cannot be read or trained, or the command line has a flag that
            contradicts it; the message says what to do.
    """
    folder = _folder_of(argv)
    if folder is None:
        return [*argv]
    try:
        import mbridge  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        from distca.wording import install

        raise ValueError(f"--from-hf needs `{install('convert')}`: {error}") from error
    from distca.checkpoints.weights import Checkpoint
    from distca.documents.tokenizer import build_tokenizer
    from megatron_patches.families.flags import (
        model_flags,
        padded_vocabulary,
        run_flags,
        vocabulary_flags,
    )

    if not folder.is_dir():
        raise ValueError(f"--from-hf {folder} is not a folder: give a transformers model's")
    given = _given(parser, argv)
    config = Checkpoint.read(str(folder)).config
    flags = model_flags(config, parser)
    fixed = {*MODEL_FLAGS, *FUNCTION_FLAGS} - _CHOSEN
    if given.get("tokenizer_type", _TOKENIZERS[0]) in _TOKENIZERS:
        tokenizer = str(given.get("tokenizer_model", folder))
        tokens = build_tokenizer(_TOKENIZERS[0], tokenizer).vocab_size
        parallel = given.get("tensor_model_parallel_size", 1)
        flags += vocabulary_flags(tokens, config.vocab_size, parallel)
        divisor = given.get("make_vocab_size_divisible_by", 1)
        if padded_vocabulary(tokens, divisor, parallel) != config.vocab_size:
            fixed.add("make_vocab_size_divisible_by")
    flags += run_flags(folder, config)
    of_model = vars(ArgumentParser.parse_known_args(parser, flags)[0])
    found = [
        f"{_written(parser, name, value)} ({_written(parser, name, of_model[name])})"
        for name, value in given.items()
        if name in fixed and _comparable(value) != _comparable(of_model[name])
    ]
    if found:
        them = "it" if len(found) == 1 else "them"
        raise ValueError(
            f"other flags than those of --from-hf {folder}, in brackets: {', '.join(found)}: "
            f"remove {them}"
        )
    return [*flags, *argv]


def _folder_of(argv: Sequence[str]) -> Path | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--from-hf", type=Path)
    try:
        folder: Path | None = parser.parse_known_args(argv)[0].from_hf
    except ArgumentError:
        # The whole parser says that it lacks a value.
        return None
    return folder


def _given(parser: ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Returns what a command line gives, by attribute."""
    options = parser._option_string_actions
    words = [word.partition("=")[0] for word in argv]
    # Not the parser's own method, which may be replaced by one that does more than parsing.
    values = vars(ArgumentParser.parse_known_args(parser, argv)[0])
    return {name: values[name] for name in (options[w].dest for w in words if w in options)}


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _written(parser: ArgumentParser, name: str, value: Any) -> str:
    """Returns a value with its flag, or what stands for it."""
    action = next(each for each in parser._actions if each.dest == name and each.option_strings)
    flag = action.option_strings[0]
    if action.nargs == 0:
        return flag if value == action.const else f"without {flag}"
    return f"without {flag}" if value is None else f"{flag} {value}"


def set_first_weights(args: Namespace, environment: Mapping[str, str]) -> None:
    """Sets `--pretrained-checkpoint` to the weights of `--from-hf`, where the run starts from them.

    All ranks call it. The first one converts the model if nobody did before; the others wait.

    Args:
        args: checked arguments.
        environment: variables of this process.

    Raises:
        ValueError: they cannot be converted, or were of another model; the message says what to do.
    """
    if args.from_hf is None or args.pretrained_checkpoint is not None:
        return
    if args.load is not None and loaded_checkpoint(args.load, args.ckpt_step) is not None:
        return
    folder = Path(args.from_hf).resolve()
    kind = "bfloat16" if args.bf16 else "float32"
    converted = folder.with_name(f"{folder.name}.megatron-{kind}")
    beat = converted.with_name(f".{converted.name}.beat")
    if args.rank:
        _wait_for(converted, beat)
    elif not converted.exists():
        try:
            _convert(folder, converted, beat, environment)
        except OSError as error:
            raise ValueError(
                f"--from-hf {args.from_hf} cannot be converted to {converted} ({error}): run "
                f"`distca convert {args.from_hf} --to OTHER`, and give --pretrained-checkpoint "
                "OTHER, too"
            ) from error
    elif _made_of(converted) != _identity(folder):
        raise ValueError(
            f"{converted} was made of other files than {folder} has now: remove it, and it is made "
            "again"
        )
    args.pretrained_checkpoint = str(converted)


def _convert(folder: Path, converted: Path, beat: Path, environment: Mapping[str, str]) -> None:
    """Makes a checkpoint of a model in a process of its own, whole or not at all.

    Args:
        folder: folder of the model.
        converted: folder to make.
        beat: file that is touched while it is being made.
        environment: variables of this process.

    Raises:
        ValueError: the model cannot be converted; the message says why.
        OSError: the folder cannot be made.
    """
    logger.info("converting %s to %s, once", folder, converted)
    with cleaned_up_at_signals():
        try:
            beat.touch()
            with hidden_folder(converted, _PATIENCE) as (scratch, sign):
                identity, written = _identity(folder), scratch / "checkpoint"
                # In a folder of ours alone, where others may read it in the end.
                written.mkdir()
                command = [sys.executable, "-m", "megatron_patches.convert", str(folder)]
                command += ["--to", str(written)]
                command += ["--float32"] * converted.name.endswith("float32")
                said = _last_line(command, (beat, sign), environment)
                if said is not None:
                    raise ValueError(f"--from-hf {folder} cannot be converted: {said}")
                (written / _SOURCE).write_text(json.dumps(identity), encoding="utf-8")
                if not converted.exists():
                    # Another job may have been faster.
                    written.rename(converted)
        finally:
            beat.unlink(missing_ok=True)


def _last_line(
    command: list[str], signs: Sequence[Path], environment: Mapping[str, str]
) -> str | None:
    """Runs a command; returns the last line of its errors if it failed, else None.

    Args:
        command: the command, which is killed where this process is to end.
        signs: files to touch while it runs.
        environment: variables of this process.
    """
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    kept = {name: value for name, value in environment.items() if name not in launchers}
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
    # It runs on CPUs, whose memory holds large models, and has this package where this one is.
    kept |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    last = "it said nothing"
    with subprocess.Popen(
        command, env=kept, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            for line in filter(None, map(str.strip, process.stderr)):
                # It says every ten seconds what it does.
                for sign in signs:
                    sign.touch()
                logger.info("%s", line)
                last = line
        except BaseException:
            process.kill()
            raise
    return last if process.returncode else None


def _wait_for(converted: Path, beat: Path) -> None:
    """Waits until a checkpoint is there.

    Raises:
        ValueError: nobody makes it.
    """
    seen, since = None, time.monotonic()
    while not (converted / TRACKER).exists():
        now = beat.stat().st_mtime_ns if beat.exists() else None
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > _PATIENCE:
            raise ValueError(
                f"{converted} was not made in {_PATIENCE:.0f} s: --from-hf must be on a file "
                "system that all machines share"
            )
        time.sleep(0.5)


def _made_of(converted: Path) -> dict[str, list[int]] | None:
    """Returns the identity of the model that a checkpoint was made of; None: nobody knows."""
    source = converted / _SOURCE
    if not source.is_file():
        return None
    found: dict[str, list[int]] = json.loads(source.read_text(encoding="utf-8"))
    return found


def _identity(folder: Path) -> dict[str, list[int]]:
    """Returns sizes and times of a model's files, by name."""
    return {path.name: [stat.st_size, stat.st_mtime_ns] for path, stat in _files(folder)}


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".safetensors", ".bin"):
            yield path, path.stat()
