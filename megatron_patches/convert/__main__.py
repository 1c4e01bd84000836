"""The process of `distca convert`, which has Megatron's process-wide state to itself."""

from __future__ import annotations

import logging
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from distca.commands.convert import build_parser, check_arguments
from distca.lifetime import end_with_parent
from distca.progress import progress
from distca.wording import install


def convert(given: Namespace, told: Callable[[str], None]) -> str:
    """Runs the command; returns what it prints.

    Args:
        given: arguments of the command.
        told: function that is called with what is being done.

    Raises:
        ValueError: something cannot be converted, or the models differ on the sample of `--check`.
        ImportError: an extra package is missing.
    """
    try:
        import mbridge  # noqa: F401
        import safetensors  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"converting needs `{install('convert')}`: {error}") from error
    from megatron_patches.convert.sample import compare_on_sample
    from megatron_patches.convert.to_hugging_face import to_hugging_face
    from megatron_patches.convert.to_megatron import to_megatron

    told("reading")
    lines = []
    if given.checkpoint is None:
        folder, checkpoint = given.model, given.to
        flags, model, args = to_megatron(folder, checkpoint, not given.float32, told, given.check)
        lines.append(shlex.join(flags))
    else:
        folder, checkpoint = given.to, given.checkpoint
        model, args = to_hugging_face(
            checkpoint,
            folder,
            given.hf_model,
            given.tokenizer_model,
            given.float32,
            given.force,
            told,
            given.check,
        )
    if given.check is not None:
        told("comparing logits")
        found = compare_on_sample(given.check, folder, checkpoint, model, args)
        said = (
            f"{found.tokens} tokens: logits differ by at most {found.difference:.1e}, and spread "
            f"by {found.spread:.2g}"
        )
        if not found.equal:
            raise ValueError(
                f"{folder} and {checkpoint} are not the same model: {said}; {found.cause}"
            )
        lines.append(said)
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = build_parser()
    given = parser.parse(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("megatron_patches").setLevel(logging.INFO)
    try:
        check_arguments(given)
        with progress(parser.prog, doing="importing Megatron-LM") as shown:
            # Here, as it imports torch, which takes long where other processes run.
            from megatron_patches import mcore_fixes

            mcore_fixes.leave_out_warnings_of_calls()
            mcore_fixes.leave_out_messages_of_a_run()
            out = convert(given, shown.describe)
    except (ValueError, ImportError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if out:
        sys.stdout.write(f"{out}\n")
    return 0


if __name__ == "__main__":
    end_with_parent()
    try:
        sys.exit(main(sys.argv[1:]))
    except SystemExit as ended:
        if ended.code:
            # The reason is said. Files that torch could not write are closed once more at the end.
            sys.unraisablehook = lambda unraisable: None
        raise
