"""`gradus data pack`, `stats` and `verify`, as they are typed."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import numpy as np
import pytest
from gradus_command import Done, Gradus, trained, wait_until
from PIL import Image
from typer.testing import CliRunner

from gradus.cli.data import app

OWN_DATA = """\
import numpy as np

def dataset(length=40):
    return [(np.full(4, number, np.float32), number % 3) for number in range(length)]
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for label, name in enumerate(("ant", "bee")):
        (root / name).mkdir()
        for number in range(30):
            pixels = np.random.default_rng(100 * label + number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            stream = io.BytesIO()
            Image.fromarray(pixels).save(stream, "jpeg")
            (root / name / f"{number}.jpg").write_bytes(stream.getvalue())
    return root


def data(*words: str) -> Done:
    """`gradus data` in this process: a new one for each command would take longer than all of them."""
    done = CliRunner().invoke(app, [*words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Done(done.exit_code, done.stdout, done.stderr)


def test_images_are_packed_counted_and_verified(images: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packed"
    done = data("pack", str(images), str(dest), "--shard-size", "64KiB", "--workers", "2", "--json")
    assert done.code == 0, done.err
    document = done.json
    assert (document["content"], document["samples"]) == ("images", {"train": 60, "validation": 0})
    assert document["shards"] == document["shards_written"] == len(list(dest.glob("shard-*.tar"))) > 1
    again = data("pack", str(images), str(dest), "--shard-size", "64KiB", "--workers", "1")
    assert again.code == 0
    assert f"{document['shards']} of them were there" in again.out

    counted = data("stats", str(dest))
    assert "classes: 2: ant 30, bee 30" in counted.out
    assert "image sizes: width 32 to 32, median 32" in counted.out

    whole = data("verify", str(dest), "--json")
    assert (whole.code, whole.json["whole"], whole.json["damage"]) == (0, True, [])

    shard = dest / "shard-000001.tar"
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    damaged = data("verify", str(dest), "--json")
    assert (damaged.code, damaged.json["whole"]) == (1, False)
    (damage,) = damaged.json["damage"]
    assert (damage["shard"], damage["part"]) == ("shard-000001.tar", "image")
    told = data("verify", str(dest), "--workers", "1")
    assert told.code == 1
    assert told.out.startswith("damaged: shard-000001.tar, sample 'ant/")


@pytest.mark.slow
def test_a_recipe_trains_on_shards_and_is_counted(gradus: Gradus, images: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packed"
    packed = gradus("data", "pack", str(images), str(dest), "--shard-size", "64KiB", "--json")
    recipe = gradus.recipe(
        "pictures.yaml",
        name="pictures",
        model={"use": "simple-cnn", "classes": 2},
        data={"use": "shards", "path": str(dest), "size": 32, "augment": "standard"},
        steps=2,
        plan={"workers": 1},
    )
    run = gradus("train", recipe, "--run-id", "a", "--nproc", "1", "--json")
    assert (run.code, run.json["step"]) == (0, 2), run.err
    assert len(trained(gradus.run("a", "pictures"))) == 2
    of_recipe = gradus("data", "stats", recipe, "--json").json
    assert of_recipe["samples"] == {"train": 54, "validation": 6}
    assert of_recipe["packed"]["fingerprint"] == packed.json["fingerprint"]
    resumed = gradus("train", "--resume", str(gradus.run("a", "pictures")), "--set", "steps=3", "--json")
    assert (resumed.code, resumed.json["step"]) == (0, 3), resumed.err


def test_text_is_packed_as_tokens(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number} " * 20, "url": "x"}) for number in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    dest = str(tmp_path / "packed")
    done = data("pack", str(tmp_path / "a.jsonl"), dest, "--tokenizer", "bytes", "--columns", "text")
    assert done.code == 0, done.err
    assert "50 train samples" in done.out
    assert "each sample: tokens" in done.out
    assert f"data: {{use: shards, path: {dest}, context: 1024}}" in done.out
    counted = data("stats", dest, "--json").json
    assert counted["tokens"] == sum(len(json.loads(line)["text"]) + 1 for line in lines)
    recipe = {
        "name": "text",
        "model": {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 32},
        "data": {"use": "shards", "path": dest, "validation": 0},
        "batch": 1,
        "steps": 1,
        "optimizer": {"lr": 1.0},
    }
    (tmp_path / "text.yaml").write_text(json.dumps(recipe))
    shown = data("show", str(tmp_path / "text.yaml"), "--json")
    assert shown.code == 0, shown.out
    assert (shown.json["vocabulary"], shown.json["tokens_per_sample"]) == (256, 32)
    assert "".join(part["text"] for part in shown.json["sample"]) == ("document 0 " * 20)[:33]


def test_a_users_dataset_is_packed_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "own_data.py").write_text(OWN_DATA)
    options = (
        "--use",
        f"{tmp_path}/own_data.py:dataset",
        "--validation",
        "0.1",
        "--set",
        "data.length=30",
        "--workers",
        "1",
    )
    done = data("pack", str(tmp_path / "d"), *options, "--json")
    assert done.code == 0, done.out
    assert (done.json["samples"], done.json["classes"]) == ({"train": 27, "validation": 3}, 3)
    assert done.json["parts"] == ["0", "1"]


def test_a_column_of_texts_that_is_not_there_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"title": "a", "text": "b"}\n' * 3)
    for further in ((), ("--columns", "title,text"), ("--validation", "0.4")):
        done = data("pack", str(tmp_path / "rows.jsonl"), str(tmp_path / "d"), "--text", "body", *further, "--json")
        assert done.code == 2, done.out
        assert "no column 'body'; found: title, text" in done.json["error"]["message"]
        assert not (tmp_path / "d").exists()


def test_bad_input_is_refused_with_what_is_allowed(images: Path, tmp_path: Path) -> None:
    cases = [
        (("pack", str(images), str(tmp_path / "d"), "--kind", "imgaes"), "did you mean 'images'?"),
        (("pack", str(images), str(tmp_path / "d"), "--shard-size", "2 parsecs"), "allowed: a number with B, KiB"),
        (("pack", str(images), str(images / "d")), "lies in SOURCE"),
        (("pack", str(images / "ant"), str(tmp_path / "d")), "SOURCE: "),
        (("verify", str(images)), "has no dataset.json"),
    ]
    for arguments, message in cases:
        done = data(*arguments, "--json")
        assert (done.code, done.json["exit_code"]) == (2, 2), (arguments, done.out)
        assert message in done.json["error"]["message"], done.json
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
def test_killed_with_all_its_workers_it_goes_on(gradus: Gradus, tmp_path: Path) -> None:
    source = tmp_path / "many"
    for name in ("ant", "bee"):
        (source / name).mkdir(parents=True)
        for number in range(3000):
            (source / name / f"{number}.jpg").write_bytes(
                bytes([255, 216, 255, number % 256]) * 2000
            )  # many shards: it is still at it
    arguments = ("data", "pack", str(source), str(tmp_path / "d"), "--shard-size", "64KiB", "--workers", "2")
    for more in (2, 30, 70):
        wanted = len(list(tmp_path.glob("d/.packing/*.index"))) + more
        process = gradus.start(*arguments)
        wait_until(lambda: len(list(tmp_path.glob("d/.packing/*.index"))) >= wanted, process)  # noqa: B023
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        process.send_signal(signal.SIGKILL)
        process.communicate()
        # Nobody listens any more: the workers notice when they want to tell how far they are.
        wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))  # noqa: B023
    done = gradus(*arguments, "--json")
    assert done.code == 0
    assert done.json["shards_kept"] >= 100
    gradus("data", "pack", str(source), str(tmp_path / "e"), "--shard-size", "64KiB", "--workers", "1")
    for file in sorted((tmp_path / "e").iterdir()):
        assert file.read_bytes() == (tmp_path / "d" / file.name).read_bytes()
