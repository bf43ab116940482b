"""Files appear whole under their names; what killed processes left unfinished is removed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from instrument.base import files as module
from instrument.base import process_id
from instrument.base.files import part_file, publish, remove_stale_parts


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole(tmp_path: Path) -> None:
    """Until it is published, the name has the old text, and the new one is in a hidden file."""
    path = tmp_path / "page.html"
    path.write_text("old")
    with part_file(path) as part:
        part.write_text("new")
        assert "old" == path.read_text()
        assert part.name.startswith(".page.html.")
        publish(part, path)
    assert "new" == path.read_text()
    assert ["page.html"] == names(tmp_path)


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    """The temporary file is removed."""
    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), part_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert "old" == path.read_text()
    assert ["page.html"] == names(tmp_path)


def test_a_file_that_cannot_be_synced_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems report a full disk only then."""

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"), part_file(path) as part:
        part.write_text("new")
        publish(part, path)
    assert "old" == path.read_text()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_mode_of_a_file_respects_the_umask(tmp_path: Path, mask: int) -> None:
    """It is not the mode of a private temporary file."""
    before = os.umask(mask)
    try:
        with part_file(tmp_path / "page.html") as part:
            part.write_text("new")
            publish(part, tmp_path / "page.html")
    finally:
        os.umask(before)
    assert 0o666 & ~mask == (tmp_path / "page.html").stat().st_mode & 0o777


def killed_part(folder: Path, name: str) -> Path:
    """Return the temporary file of a process that ends without cleaning up."""
    code = f"""
import os
import re
from pathlib import Path
from instrument.base.files import part_file
with part_file(Path({str(folder / name)!r})) as part:
    part.write_text("half")
    part.with_name(part.name + ".tmp").write_text("torch writes here")
    print(part, flush=True)
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def test_parts_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of living processes and of other hosts stay, and so do files of other kinds."""
    monkeypatch.setattr(module.process_id, "place", lambda: "0000abcd")
    with part_file(tmp_path / "elsewhere") as part:
        other_host = part.with_name(part.name.replace(f"-{os.getpid()}-", "-999999999-"))
    other_host.write_text("")
    monkeypatch.undo()
    dead = killed_part(tmp_path, "a.json")
    kept = [".hidden.part", "a.json.part", other_host.name]
    for name in kept:
        (tmp_path / name).write_text("")
    with part_file(tmp_path / "b.json") as living:
        living.write_text("half")
        assert dead.exists()
        remove_stale_parts(tmp_path)
        assert sorted([*kept, living.name]) == names(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_number_that_a_later_process_has(tmp_path: Path) -> None:
    """The part of a dead process is removed even if its number is in use again."""
    started = process_id.start_time(os.getpid())
    with part_file(tmp_path / "a") as part:
        older = part.with_name(part.name.replace(f"-{started}-", "-1-"))
        older.write_text("")
        remove_stale_parts(tmp_path)
        assert not older.exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """Nothing happens."""
    remove_stale_parts(tmp_path / "none")


def test_no_name_in_a_shared_temporary_folder_can_be_predicted() -> None:
    """Files there come from `tempfile`, which chooses the name; the doctor and the agents' guard only look."""
    source = Path(module.__file__).parent.parent
    naming = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"gettempdir|mktemp\(|[\"']/(var/)?tmp", path.read_text(encoding="utf-8"))
    ]
    assert ["start/agent/folders.py", "start/doctor/machine.py"] == sorted(naming)
