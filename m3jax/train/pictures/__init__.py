"""Pictures to train the embedded checkpoint's tower with: what is drawn, what is asked, and how well it is answered."""

from m3jax.train.pictures.batches import PictureBatches, packed_pictures, task_tokens
from m3jax.train.pictures.evaluate import greedy_answers, held_out_tasks, picture_accuracy
from m3jax.train.pictures.features import Pictures, picture_features, with_pictures, with_tower
from m3jax.train.pictures.tasks import KINDS, PictureTask, draw_picture_task

__all__ = [
    "KINDS",
    "PictureBatches",
    "PictureTask",
    "Pictures",
    "draw_picture_task",
    "greedy_answers",
    "held_out_tasks",
    "packed_pictures",
    "picture_accuracy",
    "picture_features",
    "task_tokens",
    "with_pictures",
    "with_tower",
]
