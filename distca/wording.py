"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, which has an s unless the number is 1: `1,024 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
