"""What has been said."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_chat.backend import Message


@dataclass
class Conversation:
    """Questions with their answers, oldest first.

    Attributes:
        system: the system prompt; empty for none.
        exchanges: (question, answer).
    """

    system: str = ""
    exchanges: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[Message]:
        """All that was said, and then `question`, as a chat template takes it."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.exchanges:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Remember one more exchange."""
        self.exchanges.append((question, answer))

    def forget(self, count: int) -> None:
        """Drop the oldest exchanges."""
        del self.exchanges[:count]

    def reset(self) -> None:
        """Begin anew; the system prompt stays."""
        self.exchanges.clear()
