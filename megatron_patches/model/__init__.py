"""Megatron's GPT model with the parts that DistCA replaces.

`gpt` builds the model; `core_attention` and `rotary` replace its core attention and rotary
embedding; `ping_pong` runs two nano-batches through the layers; `cuda_graphs` replays what
surrounds core attention.
"""
