"""NeMo Automodel with DistCA: the ranks share the core attention of each micro-batch.

    torchrun --nproc-per-node 8 examples/automodel_adapter.py --config CONFIG.yaml

It takes the configuration of Automodel's fine-tuning recipe, and was run with NeMo Automodel 0.7.0,
on CPUs. Each rank reads its own samples, as Automodel has it; the documents of all ranks are then
shared, without their padding. So there is no need to pack sequences. Losses and gradients stay
those of Automodel. Validation takes the same path, which no test runs.
"""

from __future__ import annotations

from typing import Any

from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from distca.library import Planner, hugging_face, share_documents, split_rows


class DistcaRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """Automodel's fine-tuning recipe, whose ranks share the documents of each micro-batch."""

    def setup(self) -> None:
        """Builds what the recipe needs, with DistCA's attention.

        Raises:
            ValueError: there is other parallelism, or sequences are packed.
        """
        for name in ("tp_size", "cp_size", "pp_size"):
            if (self.cfg.get(f"distributed.{name}", 1) or 1) > 1:
                raise ValueError(f"distributed.{name} goes not together with DistCA: set it to 1")
        if self.cfg.get("packed_sequence.packed_sequence_size", 0) > 0:
            raise ValueError("DistCA leaves padding out by itself: remove packed_sequence")
        hugging_face.register()
        self.cfg.model.attn_implementation = hugging_face.IMPLEMENTATION
        super().setup()
        config = self.model_parts[0].config
        found = config.get_text_config()._attn_implementation
        if found != hugging_face.IMPLEMENTATION:
            raise ValueError(f"Automodel gave the model the attention {found}, not DistCA's")
        policy = getattr(self.distributed_config, "mp_policy", None)
        dtype = getattr(policy, "param_dtype", None) or self.model_parts[0].dtype
        self.planner = Planner(
            **hugging_face.planner_arguments(config, dtype), device=self.dist_env.device
        )

    def _forward_backward_step(self, idx: int, batch: dict[str, Any], **more: Any) -> Any:
        # Automodel's labels are shifted, and padding has none.
        own = split_rows(
            batch["input_ids"], batch["labels"], shifted=True, kept_BT=batch.get("attention_mask")
        )
        placed = self.planner.place(share_documents(own))
        inputs = hugging_face.inputs_of(placed)
        # Automodel computes the loss, and divides it by the targets of all ranks.
        for name in ("shift_labels", "num_items_in_batch"):
            del inputs[name]
        return super()._forward_backward_step(idx, inputs, **more)


def main() -> None:
    recipe = DistcaRecipe(parse_args_and_load_config())
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
