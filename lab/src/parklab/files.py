"""Files that are whole or absent: durable atomic writes, advisory locks, and the names that temporary files go by.

Temporary files, journals and locks are called .park-MARK..., where MARK is a hash of what they belong to, so that a
name of any length can have them. Whoever writes under a mark holds its lock: what lies there while the lock is free was
left by a stopped process, or came with a folder of others: no link is followed, and nothing but ordinary files is
opened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from parkattn.checks import shown

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ENOTSUPP = 524  # the kernel's own, which some network file systems let through
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, ENOTSUPP)
TAKEN = (errno.EAGAIN, errno.EACCES)  # the latter over SMB
NO_ROOM = "out: expected room for {}, got a full disk or quota; free some space and run again."
HELD, BUSY, UNSUPPORTED = "held", "busy", "unsupported"
ANY_READ = 0o444
ORDINARY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO does not hang
OWN = ".park-"
Found = TypeVar("Found")
LEFTOVER = re.compile(r"\.park-([0-9a-f]{16})(?:\.lock|\.journal|-[0-9a-f]{8}\.tmp)")


def write_atomically(path: Path, data: bytes) -> None:
    """The file appears whole or not at all, also when the disk is full or the machine stops; durable on return."""
    folder, mark = path.parent, mark_of(f"file {path.name}")
    expect_ordinary(path)
    with explained(path), locked(folder, mark) as state:
        if state == HELD:
            remove_temporaries(folder, mark)
        temporary = temporary_path(folder, mark)
        try:
            write_new(temporary, data)
            os.replace(temporary, path)  # noqa: PTH105 (the operations of this file all go through os)
        except BaseException:
            remove(temporary)
            raise
        sync_folder(folder)


def expect_place(path: Path) -> None:
    """Fails before the work where a file could not be written; its folder is made."""
    expect_ordinary(path)
    with explained(path):
        make_folder(path.absolute().parent)
        with locked(path.parent, mark_of(f"file {path.name}")):
            pass


def expect_ordinary(path: Path) -> None:
    """Nothing, or an ordinary file: a rename would put a file in the place of a device or a FIFO."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # none
        return
    if not stat.S_ISREG(mode):
        raise FileExistsError(f"out: expected an ordinary file at {path}, got another; choose another place.")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """What the operating system refuses, as one line about the file that was to be written."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # explained further in
            raise
        if error.errno in FULL:
            raise OSError(NO_ROOM.format(path)) from None
        raise OSError(f"out: expected to write {path}, got {error.strerror}; choose another place.") from None


@contextlib.contextmanager
def locked(folder: Path, mark: str, *, wait: bool = True, waiting: Callable[[], None] = lambda: None) -> Iterator[str]:
    """HELD; BUSY where another process has it and wait is False; UNSUPPORTED on file systems without locks.

    The kernel lets go of the lock of a process that ends in any way. waiting() is called once before a wait.
    """
    path = folder / f"{OWN}{mark}.lock"
    while True:
        handle = _open_lock(path)
        try:
            state = _lock(handle, wait, waiting)
            # the holder before may have removed the file that was just locked
            if state != HELD or _is_open_file(handle, path):
                break
        except BaseException as error:
            os.close(handle)
            raise (_foreign(path, "a lock", error) if isinstance(error, OSError) else error) from None
        os.close(handle)
    try:
        yield state
    finally:
        try:
            if state != BUSY:
                remove(path)
        finally:
            os.close(handle)


def mark_of(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def temporary_path(folder: Path, mark: str) -> Path:
    return folder / f"{OWN}{mark}-{os.urandom(4).hex()}.tmp"


def journal_path(folder: Path, mark: str) -> Path:
    return folder / f"{OWN}{mark}.journal"


def free_name_beside(path: Path) -> Path:
    """a.mp4: a.aside-1.mp4, or the next number that is free; long names are cut."""
    for number in itertools.count(1):
        ending = f".aside-{number}{path.suffix}"
        stem = os.fsencode(path.stem)[: 255 - len(os.fsencode(ending))].decode(errors="ignore")
        if not os.path.lexists(path.with_name(stem + ending)):
            break
    return path.with_name(stem + ending)


def leftovers(folder: Path) -> set[str]:
    """The marks of temporary files, journals and locks in a folder, those of living processes among them."""
    return {found[1] for entry in os.scandir(folder) if (found := LEFTOVER.fullmatch(entry.name))}


def temporaries(folder: Path, mark: str) -> list[Path]:
    return [folder / entry.name for entry in os.scandir(folder) if entry.name.startswith(f"{OWN}{mark}-")]


def remove_temporaries(folder: Path, mark: str) -> int:
    """Of a stopped process: the caller holds the lock."""
    return sum([remove(path) for path in temporaries(folder, mark)])


def within(folder: Path, name: str) -> Path | None:
    """The path of a name below a folder; None where it leads elsewhere: up, through a link, or through what is no
    folder.
    """
    path, mode = folder, stat.S_IFDIR
    for part in name.split("/"):
        if part in ("", ".", "..") or not stat.S_ISDIR(mode):
            return None
        path = path / part
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):  # the latter where the folder itself is none
            mode = stat.S_IFDIR  # will be made
        except (OSError, ValueError):  # also a name that no file system takes
            return None
    return path


def append(path: Path, data: bytes) -> None:
    """All of it or nothing, durable, after the end of a line that a stopped process tore; links are not followed."""
    made = not os.path.lexists(path)
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | ORDINARY, 0o666)
    except OSError as error:
        raise _foreign(path, "an ordinary file", error) from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _foreign(path, "an ordinary file")
        _lock(handle, True, lambda: None)
        end = os.lseek(handle, 0, os.SEEK_END)
        torn = end > 0 and os.pread(handle, 1, end - 1) != b"\n"
        try:
            _write(handle, b"\n" * torn + data)
            os.fsync(handle)
        except BaseException:  # Ctrl-C between two writes, too
            os.ftruncate(handle, end)
            raise
    finally:
        os.close(handle)
    if made:
        sync_folder(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Durable once it returns; what is there already is an error, a link is not followed."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        _write(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> None:
    """By one rename; durable after sync_folder of the target's folder."""
    os.replace(source, target)  # noqa: PTH105


def remove(path: Path) -> bool:
    """Whatever stands in the way of it (a read-only folder) may leave the file: nothing relies on its absence."""
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108
        return True
    return False


def make_folder(folder: Path) -> None:
    """With its parents, durably."""
    if not folder.is_dir():
        if folder.parent != folder:
            make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)  # noqa: PTH102
            sync_folder(folder.parent)
        if not folder.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))


def sync_file(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """What was renamed into it stays there after a power cut."""
    with contextlib.suppress(PermissionError):  # a folder may be writable and not readable
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def read_regular(path: Path, limit: int | None = None, *, follow: bool = True) -> bytes | None:
    """The bytes of an ordinary file; None for anything else, larger than the limit or unreadable.
    follow: links, too.
    """
    try:
        found = path.stat(follow_symlinks=follow)
        if not stat.S_ISREG(found.st_mode) or (limit is not None and found.st_size > limit):
            return None
        return path.read_bytes()
    except (OSError, ValueError):
        return None


def sha256_of(path: Path, *, follow: bool = True) -> str | None:
    """Of an ordinary file's bytes; None for anything else. follow: links, too."""
    try:
        if not stat.S_ISREG(path.stat(follow_symlinks=follow).st_mode):
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return None


def expect_file(name: str, path: str | os.PathLike[str], wanted: str, *, most: int) -> int:
    """The size of an ordinary file, links followed: a pipe would block its reader, and a device may have no end."""
    return _looked_at(name, path, wanted, most, lambda handle: os.fstat(handle).st_size)


def read_file(name: str, path: str | os.PathLike[str], wanted: str, *, most: int) -> bytes:
    """All of a file that a user gave."""

    def read(handle: int) -> bytes:
        size = os.fstat(handle).st_size
        with os.fdopen(os.dup(handle), "rb") as file:
            data = file.read(size + 1)
        if len(data) > size:
            raise OSError(0, "a file that grows")
        return data

    return _looked_at(name, path, wanted, most, read)


def _looked_at(name: str, path: str | os.PathLike[str], wanted: str, most: int, look: Callable[[int], Found]) -> Found:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(0, "no ordinary file")
            if found.st_size > most:
                raise OSError(0, f"{found.st_size} bytes, more than {most}")
            return look(handle)
        finally:
            os.close(handle)
    except (OSError, ValueError, MemoryError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else "no memory for it"
            if isinstance(error, MemoryError)
            else "no such name"
        )
        said = shown(os.fsdecode(path))[1:-1]
        raise ValueError(f"{name}: expected {wanted}, got {said} ({why}); check the path.") from None


def _open_lock(path: Path) -> int:
    try:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | ORDINARY, 0o666)  # NFS locks only what is open for writing
        except PermissionError:
            if not os.path.lexists(path):
                raise
            handle = os.open(path, os.O_RDONLY | ORDINARY)  # another user's
    except OSError as error:
        raise _foreign(path, "a lock", error) from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise _foreign(path, "a lock")
    if found.st_mode & ANY_READ != ANY_READ and found.st_size == 0 and found.st_nlink == 1:
        # whoever cannot open it cannot lock it, and in a sticky folder not remove it either; there is nothing in it
        with contextlib.suppress(OSError):  # another user's
            os.fchmod(handle, stat.S_IMODE(found.st_mode) | ANY_READ)
    return handle


def _foreign(path: Path, wanted: str, error: OSError | None = None) -> OSError:
    """What stands under a name where no process of ours put it; another failure stays as it is."""
    kinds = {errno.ELOOP: "a link", errno.EISDIR: "a folder", errno.ENXIO: "a socket"}
    kinds |= dict.fromkeys((errno.EACCES, errno.EBADF), "one of another user")
    if error is not None and (error.errno not in kinds or not os.path.lexists(path)):
        return error
    got = "none" if error is None else kinds[error.errno or 0]
    return OSError(f"out: expected {wanted} at {path}, got {got}; have it removed, or choose another place.")


def _write(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _lock(handle: int, wait: bool, waiting: Callable[[], None]) -> str:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return UNSUPPORTED
        if error.errno not in TAKEN:
            raise
        if not wait:
            return BUSY
        waiting()
        fcntl.flock(handle, fcntl.LOCK_EX)
    return HELD


def _is_open_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync a folder
            raise
    finally:
        os.close(handle)
