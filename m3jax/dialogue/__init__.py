"""Dialogues: messages in, reasoning, text and tool calls out as they come, over the engine and its prefix cache."""

from m3jax.dialogue.chat import chat
from m3jax.dialogue.dialogue import Dialogue, open_calls
from m3jax.dialogue.reply import Reply

__all__ = ["Dialogue", "Reply", "chat", "open_calls"]
