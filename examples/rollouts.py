"""A step of GRPO on rollouts that share prompts: each shared token is computed once.

    torchrun --nproc-per-node 2 examples/rollouts.py --steps 2
    torchrun --nproc-per-node 2 examples/rollouts.py --steps 2 --least 1000000

All ranks take the same groups of rollouts, and share the tokens of their trees. With the second
command only equal rollouts are shared: it prints the same losses, and more tokens.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from distca.library import Planner, Rollout, hugging_face, share_prefixes

GROUPS, RESPONSES, PROMPT, RESPONSE = 2, 8, 600, 120


def sample(step: int, vocabulary: int) -> tuple[list[Rollout], list[float]]:
    """Random prompts, responses and rewards; sample yours here. Returns rollouts and advantages."""
    made = torch.Generator().manual_seed(step)
    rollouts, advantages = [], []
    for _ in range(GROUPS):
        prompt = torch.randint(vocabulary, (PROMPT,), generator=made)
        rewards = torch.rand(RESPONSES, generator=made)
        for _ in range(RESPONSES):
            length = int(torch.randint(RESPONSE // 2, 2 * RESPONSE, (), generator=made))
            response = torch.randint(vocabulary, (length,), generator=made)
            # The tokens of the prompt are not trained.
            weights = torch.cat([torch.zeros(PROMPT), torch.ones(length)])
            rollouts.append(Rollout(torch.cat([prompt, response]), weights))
        advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    return rollouts, advantages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--least", type=int, default=128, help="Fewest tokens to share.")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    hugging_face.register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512}
    config = LlamaConfig(**sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="distca")
    model.to(device)
    planner = Planner(**hugging_face.planner_arguments(config, dtype), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, args.steps + 1):
        rollouts, advantages = sample(step, config.vocab_size)
        batch = planner.place(share_prefixes(rollouts, args.least))
        # The trained tokens that this rank predicts, of each rollout.
        tokens = batch.rollout_tokens()
        advantage = torch.tensor(advantages, device=device)[tokens.rollout]
        with torch.no_grad():  # the policy that sampled: here the same model
            old = batch.log_probabilities(model(**hugging_face.inputs_of(batch)).logits)
        begin = time.process_time()
        log = batch.log_probabilities(model(**hugging_face.inputs_of(batch)).logits)
        ratio = torch.exp(log - old)[tokens.prediction]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -gain.sum() / batch.num_trained
        loss.backward()
        seconds = time.process_time() - begin
        total = loss.detach().clone()
        dist.all_reduce(total)
        for parameter in model.parameters():
            if parameter.grad is None:  # a rank without tokens
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {total.item():.6f}, {len(batch.tokens)} tokens on this rank, "
                f"{seconds:.2f} CPU seconds",
                flush=True,
            )
    planner.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
