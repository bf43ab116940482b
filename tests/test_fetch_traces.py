"""scripts/traces: the manifest, and fetching from clones and over the network, emulated by a local repository."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from scripts.traces import __main__ as traces
from scripts.traces.__main__ import MANIFEST, VARIABLE, fetch, main

TRACE = b'{"traceEvents": []}'
SHA256 = hashlib.sha256(TRACE).hexdigest()


def git(*args: str | Path) -> str:
    config = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *config, *map(str, args)], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one clone; its last commit removes the files of the first one."""
    folder = tmp_path_factory.mktemp("clones")
    repository = folder / "owner" / "name"
    repository.mkdir(parents=True)
    (repository / "plain.json").write_bytes(TRACE)
    (repository / "packed.json.gz").write_bytes(gzip.compress(TRACE))
    with tarfile.open(repository / "all.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("./a/rank 0.json")
        member.size = len(TRACE)
        archive.addfile(member, io.BytesIO(TRACE))
    git("init", "--quiet", repository)
    git("-C", repository, "config", "uploadpack.allowFilter", "true")
    git("-C", repository, "config", "uploadpack.allowAnySHA1InWant", "true")
    git("-C", repository, "add", ".")
    git("-C", repository, "commit", "--quiet", "--message", "one")
    git("-C", repository, "tag", "first")
    git("-C", repository, "rm", "--quiet", "-r", ".")
    git("-C", repository, "commit", "--quiet", "--message", "two")
    return folder


@pytest.fixture
def manifest(clones: Path) -> list[dict[str, Any]]:
    commit = git("-C", clones / "owner" / "name", "rev-parse", "first")
    files = {
        "a.json": {"path": "plain.json", "sha256": SHA256},
        "a.json.gz": {"path": "plain.json", "sha256": SHA256},
        "b.json.gz": {"path": "packed.json.gz", "sha256": SHA256},
        "r0.json.gz": {"path": "all.tar.gz", "member": "./a/rank 0.json", "sha256": SHA256},
    }
    return [{"repository": "owner/name", "commit": commit, "files": files}]


def emulate_network(monkeypatch: pytest.MonkeyPatch, instead: Path) -> None:
    """Make git read ``instead/OWNER/NAME`` for GitHub's repository of that name."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{instead}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("way", ["clones", "network"])
def test_fetch(
    way: str, clones: Path, manifest: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has its trace, compressed according to its name, also from a commit that is not the last."""
    if way == "network":
        emulate_network(monkeypatch, clones)
    else:
        monkeypatch.setenv(VARIABLE, str(clones))
    assert fetch(manifest, tmp_path / "out", tmp_path / "cache") == []
    assert contents(tmp_path / "out") == dict.fromkeys(manifest[0]["files"], TRACE)
    assert (way == "network") == (tmp_path / "cache").exists()


def test_intact_files_are_kept(
    clones: Path, manifest: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call only replaces a damaged file."""
    monkeypatch.setenv(VARIABLE, str(clones))
    fetch(manifest, tmp_path, tmp_path / "cache")
    (tmp_path / "a.json").write_bytes(b"[]")
    before = (tmp_path / "b.json.gz").stat().st_mtime_ns
    assert fetch(manifest, tmp_path, tmp_path / "cache") == []
    assert contents(tmp_path) == dict.fromkeys(manifest[0]["files"], TRACE)
    assert (tmp_path / "b.json.gz").stat().st_mtime_ns == before
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    assert fetch(manifest, tmp_path, tmp_path / "cache") == []


def test_failures(
    clones: Path,
    manifest: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Files that are missing or have different content are reported and not written; the others are written."""
    monkeypatch.setenv(VARIABLE, str(clones))
    files = manifest[0]["files"]
    files["a.json"]["sha256"] = "0" * 64
    files["b.json.gz"]["path"] = "absent.json.gz"
    manifest.append({"repository": "owner/other", "commit": "0" * 40, "files": {"c.json": files["a.json"]}})
    path = tmp_path / "traces.json"
    path.write_text(json.dumps(manifest))
    monkeypatch.setattr(traces, "CACHE", tmp_path / "cache")
    assert main(["--out", str(tmp_path / "out"), "--manifest", str(path)]) == 1
    assert contents(tmp_path / "out").keys() == {"a.json.gz", "r0.json.gz"}
    wrong, absent, other = capsys.readouterr().err.splitlines()
    assert wrong.startswith("plain.json at ") and wrong.endswith(SHA256)
    assert "does not have absent.json.gz at " in absent
    assert other.startswith(f"{VARIABLE}={clones} has no clone of owner/other")


def test_manifest() -> None:
    """Each entry has all fields, and no name occurs twice."""
    sources = json.loads(MANIFEST.read_text())
    names = [name for source in sources for name in source["files"]]
    assert len(names) == len(set(names)) == 29
    for source in sources:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source["repository"])
        assert re.fullmatch(r"[0-9a-f]{40}", source["commit"])
        for entry in source["files"].values():
            assert entry.keys() - {"member"} == {"path", "sha256"}
            assert re.fullmatch(r"[0-9a-f]{64}", entry["sha256"])
