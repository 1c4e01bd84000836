"""Megatron-LM's `pretrain_gpt.py` in short with the two lines: `--distca` calls none of its own."""

import inspect

from megatron.core.enums import ModelType
from megatron.training import arguments, pretrain

from megatron_patches.megatron_lm import with_distca

pretrain = with_distca(pretrain)


def provide_data(samples, vp_stage=None):
    raise AssertionError("the script's data are built")


def provide_model(pre_process=True, post_process=True, vp_stage=None):
    raise AssertionError("the script's model is built")


def forward_step(data_iterator, model):
    raise AssertionError("the script's forward step is called")


if __name__ == "__main__":
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    # As in-process restart does before all else.
    arguments.parse_args(ignore_unknown_args=True)
    if "cfg_container" in inspect.signature(pretrain).parameters:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        args = arguments.parse_and_validate_args(args_defaults=defaults)
        of_version = {"cfg_container": pretrain_cfg_container_from_args(args)}
    else:
        of_version = {"args_defaults": defaults}
    pretrain(
        train_valid_test_dataset_provider=provide_data,
        model_provider=provide_model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **of_version,
    )
