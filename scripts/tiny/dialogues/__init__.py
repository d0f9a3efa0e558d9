"""Dialogues to fine-tune the embedded checkpoint for a chat, and what it makes of those it has not seen."""

from tiny.dialogues.batches import DialogueBatches, written_tokens
from tiny.dialogues.evaluate import dialogue_accuracy, measure_dialogues
from tiny.dialogues.tasks import KINDS, MODES, Task, draw_task

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
