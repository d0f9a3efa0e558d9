"""Writing that lasts: a new file is on the disk, all of it, before anything is made to depend on it."""

import errno
import os
import secrets
from pathlib import Path

# Some file systems cannot sync a folder, and say so.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


class NewFile:
    """A file that is newly made: never an existing one, never through a link; once closed it is on the disk.

    A context manager: at the end of its block the file is synced and closed, after an error only closed.

    Args:
      path: a name that is not taken.

    Raises:
      OSError: names the path, also for what fails while writing (a full disk).
    """

    def __init__(self, path: Path):
        self.path = path
        # O_EXCL and O_NOFOLLOW: a file or a link that somebody put under the name is an error, not written through.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Write all of some bytes.

        Args:
          data: contiguous.

        Raises:
          OSError: with the file's path.
        """
        remaining = memoryview(data).cast("B")
        try:
            while remaining:  # a system call may write less than it is given, and on Linux writes 2 GiB at most
                remaining = remaining[os.write(self._descriptor, remaining) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                os.fsync(self._descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(self._descriptor)


def replace_file(file: Path, data: bytes) -> None:
    """Give a file other contents: at every instant it has all of the old ones or all of the new, on the disk too.

    Args:
      file: one that may be there; a link is replaced, not followed.
      data: all that it shall hold.

    Raises:
      OSError: names the path; the file is as it was.
    """
    unfinished = file.parent / f".m3jax-{secrets.token_hex(8)}-{file.name}"
    try:
        with NewFile(unfinished) as new:
            new.write(data)
        # Only now, when the bytes are on the disk: else a power cut could leave the name with an empty file.
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk, where its file system can promise that.

    Raises:
      OSError: names the folder.
    """
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)
