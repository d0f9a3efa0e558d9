"""Images and videos to patches in processes of their own, so that decoding never holds up the event loop."""

import asyncio
import hashlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from m3jax.media import ProcessedImage, ProcessedVideo, process_image, process_video


def process_medium(kind: str, data: bytes, options: dict[str, Any]) -> tuple[ProcessedImage | ProcessedVideo, str]:
    """Return an image or a video as the model takes it, and the hash of its patches; it runs in a pool's process.

    Args:
      kind: "image" or "video".
      data: of its file.
      options: of `process_image` or `process_video`.

    Raises:
      ValueError: it cannot be used.
    """
    process = process_image if kind == "image" else process_video
    try:
        processed = process(data, **options)
    except OverflowError as error:
        raise ValueError(str(error)) from None
    return processed, hashlib.blake2b(processed.patches, digest_size=32).hexdigest()


class PixelPool:
    """Processes that decode and cut media. They are started with the first medium.

    Args:
      processes: how many.
    """

    def __init__(self, processes: int):
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    async def process(
        self, kind: str, data: bytes, options: dict[str, Any]
    ) -> tuple[ProcessedImage | ProcessedVideo, str]:
        """Run `process_medium` in one of the processes.

        Raises:
          ValueError: as `process_medium`, or the file made the process die.
        """
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._processes, get_context("spawn"))
        pool = self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, process_medium, kind, data, options)
        except BrokenProcessPool:
            if self._pool is pool:
                self._pool = None
            raise ValueError(f"the process that decoded this {kind} died: its file cannot be used") from None

    def close(self) -> None:
        """End the processes, without waiting for what they do."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
