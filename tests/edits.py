"""How editors, transfer programs and CMSs save a file: their system calls, recorded, with the pauses between.

Each pattern saves one file once. It is a generator: what it yields are seconds until it goes on. In the soak,
the real programs do the same where they are installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

Pattern = Callable[[Path, str], Iterator[float]]
_OLD = (1_000_000_000, 1_000_000_000)


def _in_place(file: Path, text: str) -> Iterator[float]:
    """Nano, VS Code, `file_put_contents`: truncate and write."""
    file.write_text(text)
    yield 0.01


def _slowly_in_place(file: Path, text: str) -> Iterator[float]:
    """Scp, sftp, an FTP server: truncate, and write what comes over the network."""
    with file.open("w") as out:
        yield 0.4
        for start in range(0, len(text), len(text) // 4 + 1):
            out.write(text[start : start + len(text) // 4 + 1])
            out.flush()
            yield 0.7
    os.utime(file, _OLD)
    yield 0.01


def _over_itself(file: Path, text: str) -> Iterator[float]:
    """`rsync --inplace`: write over what is there, without truncation first."""
    file.touch()
    with file.open("r+") as out:
        out.write(text[: len(text) // 2])
        out.flush()
        yield 0.6
        out.write(text[len(text) // 2 :])
        out.truncate()
    yield 0.01


def _vim_backup_copy(file: Path, text: str) -> Iterator[float]:
    """Vim with `backupcopy=yes`: copy the old file aside, write in place, remove the copy."""
    backup = file.with_name(f"{file.name}~")
    if file.exists():
        shutil.copy(file, backup)
    yield 0.002
    with file.open("w") as out:
        yield 0.001
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
        yield 0.005
    backup.unlink(missing_ok=True)
    yield 0.001


def _vim_rename(file: Path, text: str) -> Iterator[float]:
    """Vim with `backupcopy=no`: probe the folder, rename the old file away, write a new one."""
    probe = file.with_name("4913")
    probe.touch()
    probe.unlink()
    backup = file.with_name(f"{file.name}~")
    if file.exists():
        file.rename(backup)
    yield 0.003
    with file.open("w") as out:
        yield 0.002
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    yield 0.001
    file.chmod(0o644)
    backup.unlink(missing_ok=True)
    yield 0.001


def _rename_away_first(file: Path, text: str) -> Iterator[float]:
    """Some CMSs: keep a backup under another name, and write a tenth of a second later."""
    if file.exists():
        file.rename(file.with_name(f".{file.name}.bak.swp"))
    yield 0.1
    file.write_text(text)
    yield 0.01


def _rename_away_and_write_slowly(file: Path, text: str) -> Iterator[float]:
    if file.exists():
        file.rename(file.with_name(f"{file.name}~"))
    with file.open("w") as out:
        for letter in (text[:1], text[1:3], text[3:]):
            out.write(letter)
            out.flush()
            yield 1.5
    yield 0.01


def _atomic(file: Path, text: str) -> Iterator[float]:
    """Statamic, Grav, Obsidian, most CMSs: write aside, rename."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text)
    yield 0.001
    temporary.rename(file)
    yield 0.01


def _rsync(file: Path, text: str) -> Iterator[float]:
    """Write to a hidden name what comes over the network, set the old time, rename."""
    temporary = file.with_name(f".{file.name}.Xa81bQ")
    with temporary.open("w") as out:
        for part in (text[:2], text[2:]):
            out.write(part)
            out.flush()
            yield 0.8
    os.utime(temporary, _OLD)
    yield 0.03
    temporary.rename(file)
    yield 0.01


def _winscp(file: Path, text: str) -> Iterator[float]:
    """Write to `.filepart` what comes over the network, remove the old file, rename."""
    temporary = file.with_name(f"{file.name}.filepart")
    with temporary.open("w") as out:
        for part in (text[:2], text[2:]):
            out.write(part)
            out.flush()
            yield 0.8
    file.unlink(missing_ok=True)
    yield 0.005
    temporary.rename(file)
    yield 0.01


def _gedit(file: Path, text: str) -> Iterator[float]:
    temporary = file.with_name(".goutputstream-8Y3WQ1")
    temporary.write_text(text)
    yield 0.002
    backup = file.with_name(f"{file.name}~")
    backup.unlink(missing_ok=True)
    if file.exists():
        os.link(file, backup)
    temporary.rename(file)
    yield 0.01
    backup.unlink(missing_ok=True)


def _office(file: Path, text: str) -> Iterator[float]:
    """Word, LibreOffice: a lock file, the new file aside, the old one away, the new one in its place."""
    lock = file.with_name(f"~${file.name}")
    lock.touch()
    temporary = file.with_name(f"~${file.name}.new")
    temporary.write_text(text)
    yield 0.05
    old = file.with_name(f"~${file.name}.old")
    if file.exists():
        file.rename(old)
    yield 0.02
    temporary.rename(file)
    old.unlink(missing_ok=True)
    lock.unlink()
    yield 0.01


def _sed(file: Path, text: str) -> Iterator[float]:
    """`sed -i`, `perl -i`: write to a name in the same folder, rename at once."""
    temporary = file.with_name("sedQn4rT2")
    with temporary.open("w") as out:
        out.write(text)
        out.flush()
        yield 0.03
    temporary.rename(file)
    yield 0.01


def _unzip(file: Path, text: str) -> Iterator[float]:
    """Remove the old file, write a new one, set its old time and its mode."""
    file.unlink(missing_ok=True)
    with file.open("w") as out:
        out.write(text)
    yield 0.002
    os.utime(file, _OLD)
    file.chmod(0o644)
    yield 0.01


def _git_checkout(file: Path, text: str) -> Iterator[float]:
    file.unlink(missing_ok=True)
    yield 0.001
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    os.write(handle, text.encode())
    os.close(handle)
    yield 0.01


def _webdav(file: Path, text: str) -> Iterator[float]:
    """Finder, Windows: put an empty file, lock it, put the content."""
    file.write_text("")
    yield 0.4
    file.write_text(text)
    yield 0.01


def _ftp_create_first(file: Path, text: str) -> Iterator[float]:
    """Create the file, open it again when the data connection stands, append what comes."""
    file.write_text("")
    yield 0.2
    with file.open("a") as out:
        for part in (text[:2], text[2:]):
            out.write(part)
            out.flush()
            yield 0.5
    yield 0.01


def _older_file(file: Path, text: str) -> Iterator[float]:
    """`mv`, `cp -p`, `rsync -a`: a file of long ago takes the place."""
    older = file.with_name(f".#{file.name}")
    older.write_text(text)
    os.utime(older, _OLD)
    older.rename(file)
    yield 0.01


def _hard_link(file: Path, text: str) -> Iterator[float]:
    """Write aside, give it its name by link(2): the kernel tells only of a new file."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text)
    file.unlink(missing_ok=True)
    os.link(temporary, file)
    yield 0.001
    temporary.unlink()
    yield 0.01


def _renamed_while_open(file: Path, text: str) -> Iterator[float]:
    """Write aside, rename before the end, write the rest."""
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("w") as out:
        out.write(text[:2])
        out.flush()
        yield 0.1
        temporary.rename(file)
        yield 0.5
        out.write(text[2:])
    yield 0.01


PATTERNS: dict[str, Pattern] = {
    "nano, VS Code, file_put_contents": _in_place,
    "scp, sftp": _slowly_in_place,
    "rsync --inplace": _over_itself,
    "vim, backupcopy=yes": _vim_backup_copy,
    "vim, backupcopy=no": _vim_rename,
    "a CMS that renames away first": _rename_away_first,
    "renamed away, written slowly": _rename_away_and_write_slowly,
    "a CMS's atomic rename": _atomic,
    "rsync": _rsync,
    "WinSCP": _winscp,
    "gedit": _gedit,
    "an office program": _office,
    "sed -i": _sed,
    "unzip": _unzip,
    "git checkout": _git_checkout,
    "WebDAV": _webdav,
    "an FTP server": _ftp_create_first,
    "mv of an older file": _older_file,
    "a hard link": _hard_link,
    "renamed before its end": _renamed_while_open,
}
