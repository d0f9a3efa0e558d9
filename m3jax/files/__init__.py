"""Files of a model folder: JSON and tensors with limits, writing that survives a crash, what a save left half done."""

from m3jax.files.durable import NewFile, replace_file, sync_folder
from m3jax.files.json_file import read_bytes, read_json, read_json_list
from m3jax.files.pending import (
    INDEX_NAME,
    MOST_INDEX_BYTES,
    MOST_INDEX_ENTRIES,
    OUTSIDE,
    PENDING,
    SAVE_KEY,
    SINGLE_NAME,
    committed_save,
    current_file,
    leaves_folder,
    pending_name,
)

__all__ = [
    "INDEX_NAME",
    "MOST_INDEX_BYTES",
    "MOST_INDEX_ENTRIES",
    "OUTSIDE",
    "PENDING",
    "SAVE_KEY",
    "SINGLE_NAME",
    "NewFile",
    "committed_save",
    "current_file",
    "leaves_folder",
    "pending_name",
    "read_bytes",
    "read_json",
    "read_json_list",
    "replace_file",
    "sync_folder",
]
