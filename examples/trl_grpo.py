"""TRL's GRPO on rollouts that share prompts: each shared token is computed once, by all ranks.

    torchrun --nproc-per-node 2 examples/trl_grpo.py --steps 2
    torchrun --nproc-per-node 2 examples/trl_grpo.py --steps 2 --plain

It needs TRL (`pip install trl`; it was run with 1.16). Only log-probabilities are computed
otherwise: of the rollouts of all ranks at once. Sampling, rewards, losses and the optimizer are
TRL's. The second command runs TRL alone, and prints the same losses and norms of gradients.
"""

from __future__ import annotations

import argparse
import string
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from distca.library import Planner, Rollout, hugging_face, share_documents

LETTERS = ["<pad>", "<eos>", *string.ascii_lowercase, " "]


class SharedGRPOTrainer(GRPOTrainer):
    """GRPO whose ranks share all rollouts of a step."""

    planner: Planner

    def _generate_single_turn(self, *args, **kwargs):
        model = self.accelerator.unwrap_model(self.model)
        model.set_attn_implementation("sdpa")
        sampled = super()._generate_single_turn(*args, **kwargs)
        model.set_attn_implementation("distca")
        return sampled

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, compute_entropy=False, **_
    ):
        kept, trained = attention_mask.bool().cpu(), torch.zeros(input_ids.shape[1])
        trained[-logits_to_keep:] = 1
        rows = zip(input_ids.cpu(), kept, strict=True)
        own = [Rollout(tokens[mask], trained[mask]) for tokens, mask in rows]
        batch = self.planner.place(share_documents(own))
        logits = model(**hugging_face.inputs_of(batch)).logits[0] / self.temperature
        chosen = torch.distributions.Categorical(logits=logits[batch.predictions.rows].detach())
        first = dist.get_rank() * len(own)  # Numbers are in the order of the ranks.
        found = []
        for values in (batch.log_probabilities(logits), chosen.entropy()):
            of_rollouts = batch.gather_rollouts(values)
            padded = torch.zeros(input_ids.shape, device=values.device)
            for n, mask in enumerate(kept.to(values.device)):
                padded[n, mask] = of_rollouts[first + n]
            found.append(padded[:, -logits_to_keep:])
        return found[0], found[1] if compute_entropy else None, None


def reward(completions, **_) -> list[float]:
    """The more different letters the better; put yours here."""
    return [float(len(set(text))) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="TRL alone")
    args = parser.parse_args()
    words = Tokenizer(models.WordLevel({each: n for n, each in enumerate(LETTERS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": len(LETTERS)}
    config = LlamaConfig(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    torch.manual_seed(0)
    hugging_face.register()
    kind = "sdpa" if args.plain else "distca"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kind)
    text = (string.ascii_lowercase + " ") * 30
    data = Dataset.from_dict({"prompt": [text[n : 300 + 50 * n] for n in range(8)]})
    flags = {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 24}
    flags |= {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    flags |= {"bf16": False, "gradient_checkpointing": False, "max_steps": args.steps}
    with tempfile.TemporaryDirectory() as folder:
        given = GRPOConfig(folder, use_cpu=not torch.cuda.is_available(), **flags)
        trainer_of = GRPOTrainer if args.plain else SharedGRPOTrainer
        trainer = trainer_of(model, reward, given, train_dataset=data, processing_class=tokenizer)
        if not args.plain:
            arguments = hugging_face.planner_arguments(config, model.dtype)
            trainer.planner = Planner(**arguments, device=given.device)
        trainer.train()


if __name__ == "__main__":
    main()
