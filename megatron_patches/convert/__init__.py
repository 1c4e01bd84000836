"""Converts checkpoints of Hugging Face to those that training loads, and back: `distca convert`.

`megatron_patches/families` says what each family is in Megatron. In the order in which a conversion
meets the files:

* `model.py`: Megatron's model that flags describe, on one process;
* `weights.py`: the weights of such a model by transformers' names, in and out;
* `to_megatron.py` and `to_hugging_face.py`: the two directions;
* `folder.py`: files of a folder that is there whole or not at all;
* `sample.py`: logits of both models on a sample of text;
* `__main__.py`: the process that `distca convert` starts.
"""
