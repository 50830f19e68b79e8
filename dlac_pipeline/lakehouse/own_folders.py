"""Folders of this user in a place where other users may write, such as /tmp or /dev/shm.

Another user may have made a folder of that name before, or a link. So each part of a path is opened by its descriptor, never
through a link, and checked. All that is read or removed is named relative to such a descriptor. A path that was checked stays
safe to write if the shared folder has the sticky bit, as /tmp and /dev/shm: others cannot replace this user's folders there.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextmanager
def open_own(shared: Path, name: str | PurePath, *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of the folder `name` below `shared`. With `make`, make it and missing folders above it.

    Raises:
        PermissionError: a folder of the path below `shared` is a link, of another user, or others can write it.
        OSError: the folder does not exist, or cannot be made.
    """
    path, descriptor = shared, os.open(shared, _FOLDER)
    try:
        for part in PurePath(name).parts:
            path /= part
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=descriptor)
            inner = _open_part(path, part, descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def remove_own(shared: Path, name: str | PurePath) -> None:
    """Remove a folder of this user below `shared` with all that can be removed. Folders of other users, and links, stay.

    Raises `OSError` as `open_own`.
    """
    within, last = PurePath(name).parent, PurePath(name).name
    with open_own(shared, within) as above:
        os.close(_open_part(shared / name, last, above, forbidden=0))
        shutil.rmtree(last, ignore_errors=True, dir_fd=above)


def remove_tree(folder: Path) -> None:
    """Remove a folder of a run, which may be below a shared folder, with all that it has.

    Raises:
        PermissionError: one of the two folders above it is a link of another user, and may lead to any folder of this one.
        OSError: it does not exist, is a link, or cannot be removed.
    """
    folder = Path(os.path.abspath(folder))
    for each in folder.parents[:2]:
        found = each.lstat()
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.getuid()):
            raise PermissionError(
                f"expected a folder, found a link of another user in its place, {str(each)!r}: remove it"
            )
    shutil.rmtree(folder)


def _open_part(path: Path, part: str, above: int, *, forbidden: int = _OTHERS_WRITE) -> int:
    found = os.stat(part, dir_fd=above, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        raise _refusal(path)
    descriptor = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or found.st_mode & forbidden:
        os.close(descriptor)
        raise _refusal(path)
    return descriptor


def _refusal(path: Path) -> PermissionError:
    return PermissionError(f"expected a folder that only this user can write, found {str(path)!r}: remove it")
