"""A small memory of answers, shared by all visitors: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Answers by question, at most so many; visitors' threads may ask at the same time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = Lock()

    def get(self, question: Hashable) -> T | None:
        """The answer, if it is still known."""
        with self._lock:
            if question not in self._answers:
                return None
            self._answers.move_to_end(question)
            return self._answers[question]

    def put(self, question: Hashable, answer: T) -> T:
        """Remember an answer, and return it."""
        with self._lock:
            self._answers[question] = answer
            self._answers.move_to_end(question)
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
        return answer
