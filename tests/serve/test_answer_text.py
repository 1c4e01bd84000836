"""Text of an answer as its tokens come: that of all of them, up to a stop string."""

from __future__ import annotations

import random

from distca.serve.api.text import AnswerText
from support.byte_tokenizer import byte_tokenizer


def test_pieces_are_the_whole_text_up_to_a_stop_string() -> None:
    """Random bytes, most of them no text, and characters of several bytes."""
    tokenizer = byte_tokenizer()
    chance = random.Random(0)
    stopped = 0
    for _ in range(300):
        letters = chance.choices("abc \N{SNOWMAN}\N{GRINNING FACE}", k=12)
        ids = tokenizer.encode("".join(letters)).ids
        if chance.random() < 0.5:
            ids = [chance.randrange(256) for _ in range(12)]
        whole = tokenizer.decode(ids)
        at = chance.randrange(len(whole))
        stops = chance.choice([[], [whole[at : at + 3]], ["ab", "abc", "c \N{SNOWMAN}"]])
        text, pieces = AnswerText(tokenizer, stops, skips_special=True), []
        for token in ids:
            pieces.append(text.add(token))
            if text.stopped:
                break
        pieces.append(text.end())
        ends = [whole.find(stop) for stop in stops if stop in whole]
        given = "".join(pieces)
        if ends:
            stopped += 1
            assert text.stopped
            assert given == whole[: min(ends)]
        else:
            assert given == whole
    assert stopped > 50
