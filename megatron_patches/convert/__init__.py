"""Converts checkpoints of Hugging Face to those that training loads, and back: `distca convert`.

mbridge knows how each family's configuration and weights are called in Megatron. In the order in
which a conversion meets the files:

* `bridges.py`: the families, and what mbridge says of each wrongly or not at all;
* `rotary.py`: its rotary embedding as flags of `pretrain_gpt.py`;
* `flags.py`: all of its configuration as flags;
* `model.py`: Megatron's model that flags describe, on one process;
* `weights.py`: the weights of such a model by transformers' names, in and out;
* `to_megatron.py` and `to_hugging_face.py`: the two directions;
* `folder.py`: files of a folder that is there whole or not at all;
* `sample.py`: logits of both models on a sample of text;
* `__main__.py`: the process that `distca convert` starts.
"""
