"""`folder`: a hub checkpoint of the tiny configuration in three shards, and `tensors`, what is in it."""

from pathlib import Path

import numpy as np
import pytest
from support.checkpoint_folders import random_tensors, tiny_config, write_folder


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return random_tensors(tiny_config())


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hub"), tiny_config(), tensors, shards=3)
