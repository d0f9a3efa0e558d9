"""The tokenizer's files as one archive in pieces, for a gateway on another machine."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from m3jax.files import current_file
from m3jax.media.patches import MEAN, STD
from m3jax.media.sizes import FACTOR, MERGE, PATCH, TEMPORAL

PIECE_BYTES = 64 << 10
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
_PREPROCESSOR = "preprocessor_config.json"


def tokenizer_archive(folder: Path) -> bytes:
    """Return a zip of the files with which a gateway renders, tokenizes and preprocesses; equal files give equal bytes.

    Args:
      folder: in the hub's layout. Where it has no preprocessor_config.json the archive has one with M3's numbers.
    """
    contents = {}
    for name in (*_FILES, _PREPROCESSOR):
        file = current_file(folder, name)
        if file.is_file():
            contents[name] = file.read_bytes()
    contents.setdefault(_PREPROCESSOR, json.dumps(_preprocessor(), indent=2).encode())
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in contents.items():
            out.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # without the time of now
    return archive.getvalue()


def pieces(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield an archive in messages of 64 KiB, the last one with its SHA-256."""
    digest = hashlib.sha256(archive).hexdigest()
    for first in range(0, len(archive), PIECE_BYTES):
        is_last = first + PIECE_BYTES >= len(archive)
        data = archive[first : first + PIECE_BYTES]
        yield common_pb2.GetTokenizerChunk(data=data, sha256=digest if is_last else "")


def _preprocessor() -> dict[str, object]:
    """Return M3's preprocessor_config.json, with the hub's names.

    Source: transformers `MiniMaxM3VLImageProcessor`.
    """
    return {
        "image_processor_type": "MiniMaxM3VLImageProcessor",
        "processor_class": "MiniMaxM3VLProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "image_mean": MEAN,
        "image_std": STD,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "min_pixels": 4 * FACTOR**2,
        "max_pixels": 576 * FACTOR**2,
        "size": [672, 672],
        "process_image_mode": "dynamic_res",
    }
