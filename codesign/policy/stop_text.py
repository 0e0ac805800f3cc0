"""Stop strings: where a request's text ends, found as its tokens come.

A string may begin in one token and end in another, and tokens may hold parts of a character; so the
text is looked at, not the tokens. Whoever owns a tokenizer says what text a token completes.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Push = Callable[[int], str]  # text that a further token completes


class StopText:
    """Looks for strings in the text of one request.

    Args:
        strings: Not empty, none of them "".
        push: Text that a token completes, given those before it; called once per token, in order.
    """

    def __init__(self, strings: Sequence[str], push: Push) -> None:
        self._strings = tuple(strings)
        self._push = push
        self._longest = max(map(len, self._strings))
        self._tail = ""  # of the text: a string may have begun in it

    def end(self, tokens: Sequence[int]) -> int | None:
        """How many of the next ``tokens`` it takes until a string is complete; None if all do not.

        Tokens behind the string are not looked at.
        """
        for count, token in enumerate(tokens, start=1):
            text = self._tail + self._push(token)
            if any(string in text for string in self._strings):
                return count
            self._tail = text[max(len(text) - self._longest + 1, 0) :]
        return None


def text_before(text: str, strings: Sequence[str]) -> str:
    """The text up to the first of the stop strings; all of it if there is none."""
    return text[: min((at for string in strings if (at := text.find(string)) >= 0), default=None)]
