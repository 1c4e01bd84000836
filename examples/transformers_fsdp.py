"""A transformers model with FSDP2 and DistCA: documents of any length, attention on all ranks.

    torchrun --nproc-per-node 2 examples/transformers_fsdp.py --steps 3

Each micro-batch is eight documents. All ranks read the same ones, a worker of the data loader plans
them ahead, and each rank gets its share of the tokens.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from distca.library import Planner, hugging_face


def documents(count: int, vocabulary: int) -> list[torch.Tensor]:
    """Documents of 16 to 2,000 random tokens; read yours here, on every rank in the same order."""
    made = torch.Generator().manual_seed(0)
    lengths = (16 * 2 ** (7 * torch.rand(count, generator=made) ** 2)).long()
    return [torch.randint(vocabulary, (n,), generator=made) for n in lengths.tolist()]


def build_model(dtype: torch.dtype) -> torch.nn.Module:
    """A small Llama with random weights, the same on every rank; load yours here."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512}
    config = LlamaConfig(**sizes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="distca")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if gpus else torch.float32

    hugging_face.register()
    model = build_model(dtype).to(device)
    planner = Planner(**hugging_face.planner_arguments(model.config, dtype))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = documents(8 * args.steps, model.config.vocab_size)
    loader = DataLoader(data, 8, collate_fn=planner.collate, num_workers=1)
    for step, planned in enumerate(loader, 1):
        batch = planner.place(planned)
        loss = model(**hugging_face.inputs_of(batch)).loss
        # The ranks' losses add up to the mean, and FSDP averages gradients over the ranks.
        (loss * dist.get_world_size()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.6f}, {len(batch.tokens)} tokens on this rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
