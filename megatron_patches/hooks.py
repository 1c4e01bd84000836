"""All names of Megatron and torch that DistCA replaces: one table.

A row says which name, why, and for which versions of megatron-core. A mend of a defect also says
where the defect is, and ends with the version that has it fixed. Nothing else replaces a name:
what belongs to our own model, such as its core attention, is listed in `INSTANCES` and `SETTINGS`
and replaced on that model only. Outside: stand-ins for modules of megatron-core that need triton,
where it is not installed (`without_triton.py`).

Rows are applied after the flags are parsed, and in Megatron-LM's own script only with `--distca`.
Until then one name is replaced, that of `ADD_FLAGS`; without `--distca` it is then put back. Where
megatron-core 0.17 parses and there is no GPU, `ALLOW_NO_CUDA` is applied before parsing, too.
"""

from __future__ import annotations

import importlib
import queue
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.package_info import MAJOR, MINOR

from megatron_patches import checkpoint_data, cpu, mcore_fixes
from megatron_patches.loop import evaluation, megatron_checkpoints, megatron_hooks, step_log
from megatron_patches.loop.run import LoopRun
from megatron_patches.model import token_prediction
from megatron_patches.versions import FIRST, LAST

_ORIGINALS = "_distca_originals"
"""Attribute of a changed module or class: its originals by name."""

_ABSENT = object()


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Hook:
    """A name that is replaced.

    Attributes:
        module: module that has the name; one that ends with `.*` means all that are loaded.
        name: name in the module, of a method with its class.
        why: what the replacement does, as "ours ..."; or what the original does that is wrong
            here, as "theirs ...".
        make: function `(original, *given) -> replacement`; `given` is what `apply` was given.
        since: first version of megatron-core that needs it.
        until: first version that doesn't, or None.
        defect: for a mend, where the defect is: file and name at a tag of Megatron-LM or torch.
        when: function that says whether this installation needs it.
    """

    module: str
    name: str
    why: str
    make: Callable[..., Any]
    since: tuple[int, int] = (0, 17)
    until: tuple[int, int] | None = None
    defect: str | None = None
    when: Callable[[], bool] = _always

    @property
    def needed(self) -> bool:
        """Whether the installed version needs it, in this installation."""
        of_version = self.since <= (MAJOR, MINOR) and (
            self.until is None or self.until > (MAJOR, MINOR)
        )
        return of_version and self.when()

    def places(self) -> Iterator[tuple[Any, str]]:
        """Yields each module or class that has the name, and the name there."""
        if self.module.endswith(".*"):
            prefix = self.module.removesuffix("*")
            for name, module in list(sys.modules.items()):
                if name.startswith(prefix) and self.name in getattr(module, "__dict__", {}):
                    yield module, self.name
            return
        owner: Any = importlib.import_module(self.module)
        *outer, leaf = self.name.split(".")
        for each in outer:
            owner = getattr(owner, each)
        yield owner, leaf

    def apply(self, *given: Any) -> None:
        """Puts the replacement in place. Calling it again changes nothing more.

        Raises:
            RuntimeError: the installed Megatron does not have the name.
        """
        for owner, leaf in self.places():
            if not hasattr(owner, leaf):
                raise RuntimeError(
                    f"megatron-core {MAJOR}.{MINOR} has no {self.module}.{self.name}, which "
                    f"--distca replaces: use {FIRST} to {LAST}"
                )
            originals = vars(owner).get(_ORIGINALS)
            if originals is None:
                originals = {}
                setattr(owner, _ORIGINALS, originals)
            if leaf not in originals:
                replacement = self.make(getattr(owner, leaf), *given)
                originals[leaf] = vars(owner).get(leaf, _ABSENT)
                setattr(owner, leaf, replacement)

    def undo(self) -> None:
        """Puts the original back."""
        for owner, leaf in self.places():
            originals = vars(owner).get(_ORIGINALS, {})
            if leaf in originals:
                original = originals.pop(leaf)
                if original is _ABSENT:
                    delattr(owner, leaf)
                else:
                    setattr(owner, leaf, original)
                if not originals:
                    delattr(owner, _ORIGINALS)


def apply(hooks: Iterable[Hook], *given: Any) -> None:
    """Applies the rows that this installation needs; once, though called again.

    Args:
        hooks: rows.
        given: what their `make` takes beside the original.
    """
    for hook in hooks:
        if hook.needed:
            hook.apply(*given)


_CORE = "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core"
_TORCH = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint"
_ARGUMENTS, _INITIALIZE = "megatron.training.arguments", "megatron.training.initialize"
_TRAINING, _CHECKPOINTING = "megatron.training.training", "megatron.training.checkpointing"
_LATENT = "megatron.core.transformer.multi_latent_attention"
_FILES = "megatron.core.dist_checkpointing.strategies.filesystem_async"

ADD_FLAGS = Hook(
    _ARGUMENTS,
    "add_megatron_arguments",
    "ours adds our flags, and calls us when the command line is parsed",
    megatron_hooks.add_flags,
)
"""The row that is applied before the flags are parsed."""

LOOP = (
    Hook(
        # Up to 0.17 the loop parses the flags, from 0.18 on the script.
        "megatron.training.*",
        "validate_args",
        "ours checks our flags and Megatron-LM's, and ends all ranks by one line",
        megatron_hooks.check_arguments,
    ),
    Hook(
        _INITIALIZE,
        "_initialize_distributed",
        "ours gives Megatron-LM the processes with a model; the others only serve",
        megatron_hooks.beside_servers,
    ),
    Hook(
        _TRAINING,
        "get_forward_backward_func",
        "ours runs the micro-batches of a global batch in ticks; without --distca, in our own "
        "script, it tells Megatron's schedule that samples are packed",
        megatron_hooks.own_schedule,
    ),
    Hook(
        _TRAINING,
        "train_step",
        "ours measures steps, and says what is not finite",
        step_log.measured_step,
    ),
    Hook(
        _TRAINING,
        "training_log",
        "ours logs what steps were measured by: attention of the busiest rank, waits, MFU, memory",
        step_log.measured_log,
    ),
    Hook(
        _TRAINING,
        "print_rank_last",
        "ours prints a log line that fits a terminal",
        step_log.short_lines,
    ),
    Hook(
        _TRAINING,
        "evaluate",
        "ours averages over tokens that count, also with --sft",
        evaluation.mean_over_tokens,
    ),
    Hook(
        _TRAINING,
        "evaluate_and_print_results",
        "ours saves first, and evaluates a whole validation set with --full-validation",
        evaluation.save_then_evaluate,
    ),
    Hook(_TRAINING, "train", "ours notes what saving first needs", evaluation.during_training),
    Hook(
        _TRAINING,
        "save_checkpoint_and_time",
        "ours saves no iteration again that was saved before its evaluation",
        evaluation.save_once,
    ),
    Hook(
        _TRAINING,
        "get_tensorboard_writer",
        "ours names the losses of a test set as such on boards, where theirs names them as a "
        "validation's",
        evaluation.naming_tests,
    ),
    Hook(_TRAINING, "get_wandb_writer", "ours does the same", evaluation.naming_tests),
    Hook(
        "megatron.training.ft_integration",
        "on_eval_step_end",
        "ours tells the progress of an evaluation, and ends it at a signal",
        evaluation.between_batches,
    ),
    Hook(
        _TRAINING,
        "dummy_train_step",
        "ours skips a global batch of our data",
        megatron_hooks.skip_global_batch,
    ),
    Hook(
        _TRAINING,
        "cyclic_iter",
        "ours leaves our iterators as they are, which are endless and know their ticks",
        megatron_hooks.unless_endless,
    ),
    Hook(
        _TRAINING,
        "setup_model_and_optimizer",
        "ours tries all that flags name before the model is built, and locks --save",
        megatron_hooks.after_preflight,
    ),
    Hook(
        _CHECKPOINTING,
        "check_checkpoint_args",
        "ours goes on in the data where the checkpoint's run ended",
        megatron_hooks.go_on_in_data,
    ),
    Hook(
        _TRAINING,
        "save_checkpoint",
        "ours keeps the tokenizer with checkpoints, and says why one cannot be saved",
        megatron_checkpoints.explain_saving,
    ),
    Hook(
        _TRAINING,
        "load_checkpoint",
        "ours says what is wrong with a checkpoint that cannot be loaded",
        megatron_checkpoints.explain_loading,
    ),
    Hook(
        _CHECKPOINTING,
        "open_file",
        "ours replaces the tracker file when the new one is whole",
        megatron_checkpoints.whole_tracker,
        until=(0, 19),
    ),
    Hook(
        _CHECKPOINTING,
        "maybe_msc",
        "ours does the same: from 0.19 on files are opened by it",
        megatron_checkpoints.WholeTracker,
        since=(0, 19),
    ),
)
"""Megatron-LM's own loop, `megatron.training`; `make` is also given the `LoopRun`."""

MENDS = (
    Hook(
        _LATENT,
        "_prepare_mla_core_attention_value",
        "theirs fills values of packed documents up to the size of keys, whatever core attention "
        "takes",
        mcore_fixes.values_of_any_size,
        since=(0, 18),
        defect=f"{_CORE}/transformer/multi_latent_attention.py",
    ),
    Hook(
        "megatron.core.tensor_parallel.random",
        "CheckpointWithoutOutput.__init__",
        "theirs takes fp8=False for fp8, which needs Transformer Engine",
        mcore_fixes.recompute_without_fp8,
        defect=f"{_CORE}/tensor_parallel/random.py (self.fp8 = fp8 is not None)",
        when=lambda: not mcore_fixes.has_transformer_engine(),
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "theirs writes into a leaf that needs gradients, and misses the `step` of torch's Adam",
        mcore_fixes.set_states_of_torch_adam,
        defect=f"{_CORE}/optimizer/distrib_optimizer.py",
        when=lambda: not mcore_fixes.has_apex_or_engine(),
    ),
    Hook(
        "megatron.core.optimizer.optimizer",
        "MegatronOptimizer.__init__",
        "theirs asserts a state that torch's Adam makes in its first step, loads one `step` for "
        "all its parameters, and has no function that fills the state of SGD",
        mcore_fixes.with_whole_state,
        defect=f"{_CORE}/optimizer/__init__.py (init_state_fn)",
    ),
    Hook(
        "megatron.core.datasets.utils",
        "compile_helpers",
        "theirs calls make where the wheel has no Makefile, and ends the first rank",
        mcore_fixes.keep_compiled_helpers,
        defect=f"{_CORE}/datasets/utils.py",
        when=lambda: not mcore_fixes.has_makefile_of_helpers(),
    ),
    Hook(
        "torch.distributed.checkpoint.filesystem",
        "pickle",
        "theirs runs code that a checkpoint's index names",
        checkpoint_data.index_read_as_data,
        defect=f"{_TORCH}/filesystem.py (read_metadata)",
    ),
    Hook(
        "torch.distributed.checkpoint.default_planner",
        "DefaultLoadPlanner.load_bytes",
        "theirs runs code that an object in a checkpoint names",
        checkpoint_data.objects_read_as_data,
        defect=f"{_TORCH}/default_planner.py (weights_only=False)",
    ),
)
"""Mends of megatron-core and torch, also for code that runs without Megatron-LM's loop."""

PREDICTION = (
    Hook(
        "megatron.core.models.gpt.gpt_model",
        "process_mtp_loss",
        "ours takes labels of tokens that other ranks have, and averages over the global batch",
        token_prediction.loss_over_global_batch,
        since=(0, 19),
    ),
)
"""Losses of multi-token prediction, which a model takes from its module."""

SAVING = (
    Hook(
        _FILES,
        "get_write_results_queue",
        "theirs starts a process, which takes memory and outlives a rank that is killed",
        lambda _: queue.Queue,
    ),
    Hook(
        _FILES,
        "FileSystemWriterAsync.write_preloaded_data_multithread",
        "theirs only logs what fails",
        mcore_fixes.write_files,
    ),
)
"""Checkpoints are written by threads of the rank, unless `--async-save` is given."""

CPU = (
    Hook(
        "megatron.*",
        "torch",
        "theirs makes tensors and streams on the GPU",
        lambda theirs: cpu.TORCH_ON_CPU if theirs is torch else theirs,
        when=cpu.without_cuda,
    ),
    Hook(
        "torch",
        "Tensor.type",
        "theirs names types of the GPU",
        cpu.type_of_a_gpu,
        when=cpu.without_cuda,
    ),
    Hook("torch", "Tensor.cuda", "theirs moves to the GPU", cpu.stay_on_cpu, when=cpu.without_cuda),
    Hook(
        "torch", "nn.Module.cuda", "theirs moves to the GPU", cpu.stay_on_cpu, when=cpu.without_cuda
    ),
    Hook(
        "megatron.core.transformer.moe.token_dispatcher",
        "all_to_all",
        "theirs gives sizes as tensors, which are on the CPU as they are",
        cpu.exchange_by_numbers,
        when=cpu.without_cuda,
    ),
    Hook(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        "theirs reads the GPU's random state",
        cpu.get_random_state,
        when=cpu.without_cuda,
    ),
    Hook(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        "theirs sets the GPU's random state",
        cpu.set_random_state,
        when=cpu.without_cuda,
    ),
)
"""Stand-ins for CUDA in megatron-core, where there is none."""

ALLOW_NO_CUDA = Hook(
    _TRAINING,
    "initialize_megatron",
    "theirs refuses to start without CUDA",
    cpu.initialize_without_cuda,
    when=cpu.without_cuda,
)
"""The row that up to 0.17 is needed before the loop parses the flags."""

CPU_LOOP = (
    ALLOW_NO_CUDA,
    Hook(
        "megatron.training.*",
        "set_jit_fusion_options",
        "theirs warms up fused kernels on the GPU",
        lambda _: cpu.nothing,
        when=cpu.without_cuda,
    ),
)
"""The same in Megatron-LM's loop."""

CHECKED = Hook(
    "megatron.training.*",
    "validate_args",
    "theirs checks once more when it starts, and fails on what the first check derived or removed",
    lambda _: cpu.nothing,
    until=(0, 18),
)
"""The row for programs that check flags before they start Megatron (`parts.py`), then put back."""

TABLE = (ADD_FLAGS, *LOOP, *MENDS, *PREDICTION, *SAVING, *CPU, *CPU_LOOP, CHECKED)
"""All rows."""

_GPT = "megatron.core.models.gpt.gpt_model:GPTModel"
_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock"
_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"

INSTANCES = {
    "megatron.core.transformer.attention:SelfAttention.core_attention": "is ours, by the spec",
    f"{_LATENT}:MLASelfAttention.core_attention": "the same",
    f"{_LAYER}.self_attention": "norms latents alone, where queries have none (--qk-layernorm)",
    f"{_GPT}.rotary_pos_emb": "rotates by each token's own position",
    f"{_LATENT}:MLASelfAttention.rotary_pos_emb": "the same",
    f"{_BLOCK}.forward": "runs two nano-batches in turn (--distca-ping-pong)",
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._get_embeddings": ""
    "takes columns that a micro-batch brings, where theirs shifts the rows of a rank",
    f"{_LAYER}.forward": "replays CUDA graphs around core attention (--distca-cuda-graphs); of "
    "multi-token prediction: runs two nano-batches in turn",
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward": "of keys and values: "
    "expands the latents that were sent (--distca-latent-rows)",
    f"{_ROUTER}.attach_and_log_load_balancing_loss": "averages over a micro-batch's tokens",
    f"{_ROUTER}._apply_aux_loss": "the same",
    f"{_ROUTER}._apply_seq_aux_loss": "the same",
}
"""Functions and parts that are replaced on our own model, by class and attribute
(`megatron_patches.model.gpt`).

Besides, norms of local layers are ours, by the spec: theirs refuse sequence parallelism. Layers of
a spec that `--spec` names are whatever it says (`megatron_patches.model.gemma`).
"""

SETTINGS = {
    "megatron.core.transformer.attention:Attention.checkpoint_core_attention": "False: core "
    "attention keeps inputs and outputs alone, so recomputing it gains nothing",
    "megatron.core.extensions.transformer_engine:TELinear.is_first_microbatch": "False, as in its "
    "other layers: the first backward pass need not be of the first forward pass, so each adds to "
    "gradients",
    "torch.nn:Parameter.average_gradients_across_tp_domain": "True for norms of queries' latents: "
    "each tensor-parallel rank has the whole gradient",
    f"{_ROUTER}.tp_cp_group": "the ranks that share a micro-batch, while its loss is counted",
    "megatron.core.transformer:TransformerConfig.window_size": "None with a dense mask, which "
    "Megatron drops where it is given a window",
    "megatron.core.transformer:TransformerConfig.deallocate_pipeline_outputs": "False without a "
    "GPU: gloo may read an output after its send was issued",
}
"""Values that are set on our own model and its configuration, by class and attribute
(`megatron_patches.model` and `megatron_lm.build_stage`)."""


def adapt_megatron_core(async_save: bool = False) -> None:
    """Mends megatron-core, and lets it run without CUDA where there is none.

    May be called again after more of Megatron's modules were loaded.

    Args:
        async_save: whether checkpoints are saved by other processes.
    """
    mcore_fixes.leave_out_warnings_of_calls()
    if cpu.without_cuda():
        cpu.prepare_process()
    apply(MENDS)
    apply(PREDICTION)
    if not async_save:
        mcore_fixes.leave_out_the_warning_of_async_saves()
        apply(SAVING)
    apply(CPU)


def adapt_megatron_loop(run: LoopRun, async_save: bool) -> None:
    """Makes Megatron-LM's own loop run ours. Called when its flags are parsed.

    Args:
        run: the run of the loop.
        async_save: whether checkpoints are saved by other processes.
    """
    apply(LOOP, run)
    apply(CPU_LOOP)
    adapt_megatron_core(async_save)
