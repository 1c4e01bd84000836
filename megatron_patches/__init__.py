"""DistCA on Megatron: the only package that imports it.

`flags`, `batches`, `model`, `pipeline` and `loop` are the parts of a pretraining job. `megatron_lm`
runs it in Megatron-LM's own loop. `hooks` is the table of all names of Megatron and torch that are
replaced, `mcore_fixes` has mends, and `cpu` stand-ins for CUDA. `versions` levels what differs
between versions of megatron-core, and `llama` converts checkpoints.
"""

import importlib.util
import warnings

from distca.wording import install

if importlib.util.find_spec("megatron") is None:
    raise ImportError(
        f"megatron_patches needs megatron-core: `{install('megatron')}`, with torch installed "
        "before it"
    )

from distca.quiet import ignore_missing_cuda
from megatron_patches.without_triton import stand_in_for_triton

stand_in_for_triton()

# megatron-core names them at every import on every rank; `distca doctor` names them, too.
warnings.filterwarnings("ignore", r".*(Apex|Transformer Engine).* not installed", UserWarning)
# Of parts of it that we do not use.
warnings.filterwarnings("ignore", r"Only transformer-engine.* supports MoE experts", UserWarning)
warnings.filterwarnings("ignore", r".* is experimental and still under active dev", UserWarning)
ignore_missing_cuda()
