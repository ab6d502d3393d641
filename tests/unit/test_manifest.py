"""What an artifact's files may be called, how they name it, and every way in which a folder differs from what was signed."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from weir.core.registry.manifest import (
    FILES_MAX,
    PATH_BYTES_MAX,
    ArtifactFlaw,
    FileDigest,
    Manifest,
    check_files,
    check_path,
    check_paths,
    manifest_of,
    shown,
)
from weir.errors import ArtifactRefused


def digest_of(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def files_of(contents: dict[str, str]) -> list[FileDigest]:
    return [FileDigest(path, digest_of(content)) for path, content in contents.items()]


SIGNED = {"model.gguf": "weights", "config.json": "{}", "docs/readme.md": "words"}
MANIFEST = manifest_of(files_of(SIGNED))


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "an empty part"),
        ("/etc/passwd", "absolute"),
        ("a//b", "an empty part"),
        ("a/", "an empty part"),
        ("./a", "an empty part"),
        ("a/./b", "an empty part"),
        ("../a", "an empty part"),
        ("a/../b", "an empty part"),
        ("a\\b", "backslash"),
        ("a\0b", "cannot be seen"),
        ("a\nb", "cannot be seen"),
        ("a\x7f", "cannot be seen"),
        ("a\u202eb", "cannot be seen"),
        ("a\u200bb", "cannot be seen"),
        ("a\u00a0b", "cannot be seen"),
        ("a\udcff", "not UTF-8"),
        ("cafe\u0301", "composed form"),
        ("a" * (PATH_BYTES_MAX + 1), "longer than"),
        ("ü" * (PATH_BYTES_MAX // 2) + "a", "longer than"),
    ],
)
def test_a_path_that_could_mean_something_else_is_refused(path: str, why: str) -> None:
    """Protects the store, and people who read a refusal: such a path is refused with its reason, shown on one plain line."""
    with pytest.raises(ArtifactRefused, match=why) as refused:
        check_path(path)
    assert refused.value.members["reason"] == ArtifactFlaw.UNSAFE_PATH
    assert refused.value.detail.isprintable() and len(refused.value.detail) < 250


@pytest.mark.parametrize(
    "path", ["a", "a b.txt", ".hidden", "...", "a/b/c", "café", "模型.gguf", "a:0:1", "ü" * (PATH_BYTES_MAX // 2)]
)
def test_a_plain_path_is_accepted(path: str) -> None:
    """Protects ordinary artifacts from a rule that is too strict."""
    check_path(path)
    assert manifest_of(files_of({path: ""})).files[0].path == path


@pytest.mark.parametrize(
    ("paths", "flaw"),
    [
        ([], ArtifactFlaw.EMPTY),
        (["Model.gguf", "model.GGUF"], ArtifactFlaw.DUPLICATE_PATH),
        (["a", "a"], ArtifactFlaw.DUPLICATE_PATH),
        (["straße", "STRASSE"], ArtifactFlaw.DUPLICATE_PATH),
        ([str(number) for number in range(FILES_MAX + 1)], ArtifactFlaw.TOO_MANY_FILES),
        (["a", "../b"], ArtifactFlaw.UNSAFE_PATH),
    ],
)
def test_files_that_cannot_be_one_artifact(paths: list[str], flaw: ArtifactFlaw) -> None:
    """Protects the store: none, too many, and names that are one name elsewhere are refused."""
    with pytest.raises(ArtifactRefused) as refused:
        check_paths(paths)
    assert refused.value.members["reason"] == flaw
    with pytest.raises(ArtifactRefused):
        manifest_of(FileDigest(path, digest_of("")) for path in paths)


def test_the_largest_artifact_is_accepted() -> None:
    """Protects the bound itself: exactly so many files are accepted."""
    assert len(manifest_of(files_of({str(number): "" for number in range(FILES_MAX)})).files) == FILES_MAX


def test_the_digest_is_what_sha256sum_says(tmp_path: Path) -> None:
    """Protects the artifact's name: anybody can recompute it with sha256sum and sort, from the folder alone."""
    contents = {"b": "1", "a/z": "2", "a.txt": "3", "Z": "4", "ü x": "5"}
    for path, content in contents.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content, encoding="utf-8")
    command = "find . -type f -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    line = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert manifest_of(files_of(contents)).digest == "sha256:" + line.split()[0]


def test_the_digest_does_not_depend_on_the_order() -> None:
    """Protects the artifact's name: the same files are the same artifact; another name or content is another one."""
    assert manifest_of(reversed(files_of(SIGNED))) == MANIFEST
    digests = {
        manifest_of(files_of(contents)).digest
        for contents in (SIGNED, SIGNED | {"config.json": "[]"}, SIGNED | {"more": ""}, {"model.gguf": "weights"})
    }
    assert len(digests) == 4


RENAMED = {("config2.json" if path == "config.json" else path): content for path, content in SIGNED.items()}
WITHOUT = {path: content for path, content in SIGNED.items() if path != "config.json"}


@pytest.mark.parametrize(
    ("found", "flaw", "file", "words"),
    [
        (SIGNED | {"config.json": "{ }"}, ArtifactFlaw.CHANGED_FILE, "config.json", "config.json is not what was signed."),
        (WITHOUT, ArtifactFlaw.MISSING_FILE, "config.json", "config.json is missing."),
        (SIGNED | {".git/config": ""}, ArtifactFlaw.ADDED_FILE, ".git/config", ".git/config was not signed."),
        (RENAMED, ArtifactFlaw.RENAMED_FILE, "config.json", "config.json was renamed to config2.json."),
        (WITHOUT | {"a": "b"}, ArtifactFlaw.MISSING_FILE, "config.json", "config.json is missing, and 1 more."),
        (
            RENAMED | {"model.gguf": "", "x": "{}"},
            ArtifactFlaw.CHANGED_FILE,
            "model.gguf",
            "model.gguf is not what was signed, and 2 more.",
        ),
        ({}, ArtifactFlaw.MISSING_FILE, "config.json", "config.json is missing, and 2 more."),
    ],
)
def test_each_difference_has_its_reason(found: dict[str, str], flaw: ArtifactFlaw, file: str, words: str) -> None:
    """Protects whoever must find out: what differs is named, the gravest first, with how many more there are."""
    with pytest.raises(ArtifactRefused) as refused:
        check_files(MANIFEST, files_of(found))
    assert refused.value.members == {"field": "artifact", "reason": flaw, "file": file}
    assert refused.value.detail == f"The file {words}"


def test_the_same_files_are_accepted_in_any_order() -> None:
    """Protects an unchanged folder."""
    check_files(MANIFEST, reversed(files_of(SIGNED)))


def test_files_that_swapped_their_names_are_changed() -> None:
    """Protects from a swap, where every content and every name is still there."""
    swapped = Manifest(MANIFEST.files), files_of(SIGNED | {"model.gguf": "{}", "config.json": "weights"})
    with pytest.raises(ArtifactRefused, match=r"config\.json is not what was signed, and 1 more"):
        check_files(*swapped)


def test_what_is_shown_is_short_and_plain() -> None:
    """Protects logs and terminals from what a file's name may hold."""
    assert shown("a/b c") == "a/b c"
    assert shown("a\x1b[31m\udcff") == "a\\x1b[31m\\udcff"
    assert len(shown("x" * 10_000)) < 150
