"""Dialogues to fine-tune the embedded checkpoint for a chat, and what it makes of those it has not seen."""

from m3jax.train.dialogues.batches import DialogueBatches, written_tokens
from m3jax.train.dialogues.evaluate import dialogue_accuracy, measure_dialogues
from m3jax.train.dialogues.tasks import KINDS, MODES, Task, draw_task

__all__ = [
    "KINDS",
    "MODES",
    "DialogueBatches",
    "Task",
    "dialogue_accuracy",
    "draw_task",
    "measure_dialogues",
    "written_tokens",
]
