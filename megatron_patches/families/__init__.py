"""Families of models of Hugging Face, in Megatron's words.

mbridge knows how each family's configuration and weights are called in Megatron. In the order in
which a model meets the files:

* `bridges.py`: the families, and what mbridge says of each wrongly or not at all;
* `described.py`: what all of them add to mbridge's description;
* `gemma.py`: the families that have layers of ours;
* `rotary.py`: its rotary embedding as flags of `pretrain_gpt.py`;
* `flags.py`: all of its configuration as flags.
"""
