"""Where files lie: those of each job in a folder of its own, below the one that the user named."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from bagua.errors import ConfigurationError

#: Of ``os.open``: not through a link that somebody has put there. Where the system has no such flag, nothing.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def usable_folder(folder: str, variable: str) -> Path:
    """The folder, which is made if it is not there.

    Args:
        folder: path of it.
        variable: variable that named it, for the error.

    Raises:
        ConfigurationError: it cannot be written to.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(f"the folder cannot be made: {error}", variable, folder) from error
    if not os.access(path, os.W_OK):
        raise not_writable("this process may not write to the folder", variable, folder)
    return path


def not_writable(problem: str, variable: str, folder: str) -> ConfigurationError:
    """The error of a folder that was named by ``variable``, and into which nothing can be written."""
    expected = "a folder that this process may write to"
    return ConfigurationError(problem, argument=variable, expected=expected, seen=repr(folder))


def not_readable(problem: str, expected: str, path: str | os.PathLike[str], advice: str = "") -> ConfigurationError:
    """The error of a folder without the files that are expected there, or with others."""
    return ConfigurationError(problem, argument="folder", expected=expected, seen=str(path), advice=advice)


def write_whole(path: Path, content: bytes) -> None:
    """Write a whole file for its owner only, or none: neither who reads sees half of it, nor does a signal spoil it.

    The folder may be one that everybody writes to: a link that waits there under the name is replaced, not followed.
    """
    draft = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600), "wb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:  # A full disk, say. Each draft has a name of its own, so no later one would replace it.
        draft.unlink(missing_ok=True)
        raise


def folder_of_latest_job(folder: str | os.PathLike[str], pattern: str) -> Path:
    """The folder with the files of one job: ``folder`` itself, or that of the job below it that has written last.

    Args:
        folder: folder that the user named, or the folder of a job.
        pattern: pattern of the names of the files.
    """
    path = Path(folder)
    if any(path.glob(pattern)):
        return path
    files = list(path.glob(f"*/{pattern}"))
    return max(files, key=lambda file: (file.stat().st_mtime, file.parent.name)).parent if files else path


def other_jobs(folder: Path, latest: Path, pattern: str) -> list[str]:
    """Names of the folders of other jobs below ``folder``, the oldest first."""
    return sorted({found.parent.name for found in folder.glob(f"*/{pattern}")} - {latest.name})
