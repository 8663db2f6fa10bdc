import json
import subprocess
import sys

import pytest

from gradus.record.environment import environment, mask_secrets


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "train.py").write_text("before\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_the_commit_and_what_was_changed_since_are_recorded(repository):
    assert environment(directory=repository)["git"]["diff"] == ""
    (repository / "train.py").write_text("after\n")
    found = environment(directory=repository)["git"]
    assert len(found["commit"]) == 40
    assert "+after" in found["diff"]
    assert found["diff_is_whole"]


def test_a_huge_diff_is_cut(repository):
    (repository / "train.py").write_text("a line of text\n" * 200_000)
    found = environment(directory=repository)["git"]
    assert len(found["diff"]) == 1 << 20
    assert not found["diff_is_whole"]


def test_without_a_repository_or_without_git_there_is_just_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "git" not in environment(directory=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git" not in environment(directory=tmp_path)


def test_versions_are_found_without_importing_torch(tmp_path):
    code = (
        "import sys; from gradus.record.environment import environment; found = environment();"
        "assert found['packages']['torch'] and found['packages']['gradus'] and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_only_named_variables_are_recorded_and_never_a_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("LOADEDMODULES", "gcc/12:cuda/12.6")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    found = environment([{"name": "NVIDIA H200"}], ["gradus", "--token", "hf_verysecret"], tmp_path)
    assert found["modules"] == ["gcc/12", "cuda/12.6"]
    assert found["slurm"] == {"job_id": "4711", "nodes": "node[1-2]"}
    assert found["gpus"] == [{"name": "NVIDIA H200"}]
    assert "verysecret" not in json.dumps(found)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--token", "abc", "train"], ["--token", "***", "train"]),
        (["--api-key=abc"], ["--api-key=***"]),
        (["--set", "data.password=abc"], ["--set", "data.password=***"]),
        (["HF_TOKEN=abc", "train"], ["HF_TOKEN=***", "train"]),
        (["--apikey", "abc"], ["--apikey", "***"]),
        (["https://me:abc@host/data"], ["https://***@host/data"]),
        (["--set", "tokens=1000"], ["--set", "tokens=1000"]),
        (["--secret", "--json"], ["--secret", "--json"]),
    ],
)
def test_values_of_secrets_on_the_command_line_are_masked(given, kept):
    assert mask_secrets(given) == kept
