"""Every file of a checkpoint, damaged in every way: refused by name, nothing executed, and the one before it used for "latest"."""

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch

from nvalchemi.errors import CheckpointError
from nvalchemi.testing import state_differences
from nvalchemi.training import Every, checkpoint, layout, reading
from nvalchemi.training.export import export
from nvalchemi.training.hooks import CheckpointHook, EMAHook
from tests.training.hooks.runs import batches, network, strategy
from tests.training.test_checkpoint import Marker

FILES = {  # how it is saved -> its files
    False: ["manifest.json", "shared.pt", "rank-00000.pt"],
    True: ["manifest.json", "shared.pt", "rank-00000.pt", "index.json", "shared-00000.safetensors"],
}
KINDS = ["cut", "emptied", "gone", "one bit", "another step's", "pickle", "torch pickle"]


def run(folder, steps, behind, **settings):
    hooks = [EMAHook(0.9), CheckpointHook(folder, Every(steps=3), keep_last=None, async_save=behind)]
    return strategy(network(), hooks, num_steps=steps, **settings).run(batches())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of six steps, and what they end with after nine."""
    folders = {}
    for behind in FILES:
        folders[behind] = tmp_path_factory.mktemp(f"behind-{behind}")
        run(folders[behind], 6, behind)
    return folders, checkpoint.gather(run(tmp_path_factory.mktemp("whole"), 9, False))[0]


def damage(path, kind, marker):
    """What is then in the file; ``None`` where it is gone."""
    content = path.read_bytes()
    if kind == "gone":
        path.unlink()
        return None
    if kind == "torch pickle":
        torch.save({"models": Marker(marker)}, path)
        return path.read_bytes()
    damaged = {
        "cut": content[: len(content) // 2],
        "emptied": b"",
        "one bit": content[:-3] + bytes([content[-3] ^ 4]) + content[-2:],
        "another step's": (path.parent.parent / "step-00000003" / path.name).read_bytes(),
        "pickle": pickle.dumps(Marker(marker)),
    }[kind]
    path.write_bytes(damaged)
    return damaged


@pytest.mark.parametrize(
    ("behind", "name", "kind"),
    [
        (behind, name, kind)
        for behind, names in FILES.items()
        for name in names
        for kind in KINDS
        if (name, kind) != ("index.json", "another step's")  # which is the same
    ],
)
def test_it_is_refused_and_the_one_before_used(made, tmp_path, behind, name, kind):
    folders, whole = made
    folder, marker = tmp_path / "run", tmp_path / "marker"
    shutil.copytree(folders[behind], folder)
    newest = folder / "step-00000006"
    assert set(os.listdir(newest)) == set(FILES[behind])
    damage(newest / name, kind, marker)
    if name == "manifest.json" and kind == "another step's":
        words = "is damaged"  # it does not fit the files
    else:
        words = name.replace(".", r"\.")
    if not (name == "manifest.json" and kind == "one bit"):  # which may still be one: then it is the files' checksums that count
        with pytest.raises(CheckpointError, match=words if kind != "gone" or name != "manifest.json" else "no whole checkpoint"):
            strategy(network(), [EMAHook(0.9)], num_steps=9, resume_from=newest).run(batches())
    ctx = run(folder, 9, behind, resume_from="latest")
    assert list(state_differences(whole, checkpoint.gather(ctx)[0])) == []
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["emptied", "another step's", "pickle", "torch pickle"])
@pytest.mark.parametrize(("behind", "name"), [(behind, name) for behind, names in FILES.items() for name in names[1:]])
def test_nothing_is_executed_where_the_manifest_was_made_to_match(made, tmp_path, behind, name, kind):
    """B112: by a resume, by weights alone, by an export."""
    folder, marker = tmp_path / "run", tmp_path / "marker"
    shutil.copytree(made[0][behind], folder)
    newest = folder / "step-00000006"
    content = damage(newest / name, kind, marker)
    manifest = json.loads((newest / layout.MANIFEST).read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (newest / layout.MANIFEST).write_text(json.dumps(manifest))
    tries = [
        lambda: strategy(network(), [EMAHook(0.9)], num_steps=9, resume_from=newest).run(batches()),
        lambda: strategy(network(), num_steps=9, init_from=newest).run(batches()),
        lambda: export(layout.read(newest), tmp_path / "out", {"model": "own"}, "float32"),
        lambda: reading.read_own(layout.read(newest), 0),
    ]
    refused = 0
    for attempt in tries:
        try:
            attempt()
        except CheckpointError as error:
            refused += 1
            assert name in str(error) or "index of the tensors" in str(error)
    # a file of the same run's other step is a state like any other: nobody can know
    assert refused >= (0 if kind == "another step's" else 1)
    assert not marker.exists()


def test_a_checkpoint_cannot_name_a_file_elsewhere(made, tmp_path):
    shutil.copytree(made[0][True], tmp_path / "run")
    newest, secret = tmp_path / "run" / "step-00000006", tmp_path / "secret.safetensors"
    os.rename(newest / "shared-00000.safetensors", secret)
    text = (newest / "index.json").read_text().replace("shared-00000.safetensors", "../../secret.safetensors")
    (newest / "index.json").write_text(text)
    manifest = json.loads((newest / layout.MANIFEST).read_text())
    manifest["files"]["../../secret.safetensors"] = manifest["files"].pop("shared-00000.safetensors")
    manifest["files"]["index.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (newest / layout.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"secret\.safetensors is missing"):
        reading.read_shared(layout.read(newest))
