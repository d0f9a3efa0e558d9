"""Dialogues: messages are answered by a stream of reasoning, text and tool calls, over an engine's prefix cache."""

from m3jax.dialogue.chat import chat
from m3jax.dialogue.dialogue import Dialogue, open_calls
from m3jax.dialogue.reply import Reply

__all__ = ["Dialogue", "Reply", "chat", "open_calls"]
