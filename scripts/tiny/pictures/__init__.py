"""Pictures to train the embedded checkpoint's tower with: what is drawn, what is asked, and how well it is answered."""

from tiny.pictures.batches import Alternating, PictureBatches, packed_pictures, shown_names, task_tokens
from tiny.pictures.evaluate import greedy_answers, held_out_tasks, picture_accuracy
from tiny.pictures.features import Naming, Pictures, naming_loss, picture_features, with_tower
from tiny.pictures.tasks import KINDS, NAMES, Mark, PictureTask, draw_picture_task

__all__ = [
    "KINDS",
    "NAMES",
    "Alternating",
    "Mark",
    "Naming",
    "PictureBatches",
    "PictureTask",
    "Pictures",
    "draw_picture_task",
    "greedy_answers",
    "held_out_tasks",
    "naming_loss",
    "packed_pictures",
    "picture_accuracy",
    "picture_features",
    "shown_names",
    "task_tokens",
    "with_tower",
]
