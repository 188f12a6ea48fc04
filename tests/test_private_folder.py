"""Folders that go with their process, also when it is killed."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from stagemesh.private_folder import PrivateFolder, remove_stale

MAKER = """
import sys
from stagemesh.private_folder import PrivateFolder

folder = PrivateFolder.make()
(folder.path / "node-1.log").write_text("loaded")
print(folder.path, flush=True)
sys.stdin.read()
"""


def _killed(folder: Path) -> Path:
    """The private folder of a process that was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        made = Path(process.stdout.readline().strip())
        # Control: while it lives nobody removes it.
        remove_stale(folder)
        assert (made / "node-1.log").read_text() == "loaded"
    finally:
        process.kill()
        process.communicate()
    return made


def test_it_is_private_and_removed_with_what_is_in_it(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = PrivateFolder.make()
    assert folder.path.parent == tmp_path
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "node-1.log").write_text("loaded")
    (folder.path / "rpc.sock").touch()
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_leaves_goes_with_the_next_one(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = _killed(tmp_path)
    assert (left / "node-1.log").exists()
    folder = PrivateFolder.make()
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.remove()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    left = _killed(tmp_path)
    (left / "mine.txt").write_text("keep")
    without_lock = tmp_path / "stagemesh-mine"
    without_lock.mkdir()
    (without_lock / "a.log").write_text("keep")
    remove_stale(tmp_path)
    assert [path.name for path in left.iterdir()] == ["mine.txt"]
    assert (without_lock / "a.log").exists()
