"""What flags say of packages for GPUs that are not installed here."""

WITHOUT_PACKAGES = """
    --no-rope-fusion --no-gradient-accumulation-fusion --no-masked-softmax-fusion
""".split()
"""Of Megatron, without Transformer Engine and apex."""
