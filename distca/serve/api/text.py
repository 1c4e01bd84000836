"""The text of an answer, as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class AnswerText:
    """Text that is given out once no later token can change it, and that ends at a stop string.

    Args:
        tokenizer: a tokenizer of the package tokenizers.
        stops: texts that end the answer, and are not part of it.
        skips_special: whether special tokens have no text.

    Attributes:
        stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], skips_special: bool) -> None:
        self._tokenizer, self._stops, self._skips = tokenizer, tuple(stops), skips_special
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skips_special)
        self._ids: list[int] = []
        self._text = ""
        self._given = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """Takes a token, and returns the text that is certain now."""
        begin = len(self._text)
        self._ids.append(token)
        self._text += self._decoded(token)
        return self._until_stop(begin)

    def end(self) -> str:
        """Returns the rest of the text, half characters among it."""
        if self.stopped:
            return ""
        begin = len(self._text)
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skips)
        if whole.startswith(self._text):
            self._text = whole
        text = self._until_stop(begin)
        if not self.stopped:
            text += self._text[self._given :]
            self._given = len(self._text)
        return text

    def _decoded(self, token: int) -> str:
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer, token) or ""
            except Exception:
                # Later tokens changed the text of earlier ones, which a stream cannot follow.
                self._stream = None
        whole = str(self._tokenizer.decode(self._ids, skip_special_tokens=self._skips))
        if whole.endswith("\N{REPLACEMENT CHARACTER}") or not whole.startswith(self._text):
            return ""
        return whole[len(self._text) :]

    def _until_stop(self, begin: int) -> str:
        """Returns text that is certain; what may begin a stop string waits.

        Args:
            begin: end of the text that was searched before.
        """
        # A stop string may have begun in the text before.
        found = [
            at
            for stop in self._stops
            if (at := self._text.find(stop, max(begin - len(stop) + 1, 0))) >= 0
        ]
        if found:
            self.stopped = True
            end = min(found)
            self._text = self._text[:end]
        else:
            end = len(self._text) - self._held_back()
        text = self._text[self._given : end]
        self._given = max(end, self._given)
        return text

    def _held_back(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = 0
        for stop in self._stops:
            for count in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:count]):
                    longest = count
                    break
        return longest
