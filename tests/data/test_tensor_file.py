import hashlib
import json

import pytest
import torch

from nvalchemi.data.tensor_file import DTYPES, Entry, TensorFile, write_tensors
from nvalchemi.errors import CheckpointError


def entries(tensors):
    return [Entry(name, t.dtype, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()]


def every_dtype():
    numbers = torch.arange(6).reshape(2, 3)
    return {str(dtype): numbers.to(dtype) for dtype in DTYPES.values()}


def test_what_is_written_is_read(tmp_path):
    tensors = {
        **every_dtype(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }
    said = write_tensors(tmp_path / "x", entries(tensors), {"what": "all"})
    content = (tmp_path / "x").read_bytes()
    assert said == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    file = TensorFile(tmp_path / "x")
    assert file.metadata == {"what": "all"} and set(file.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert file.kind(name) == (tensor.dtype, tuple(tensor.shape))
        assert file.read(name).tolist() == tensor.tolist()


def test_a_tensor_that_was_read_is_a_copy(tmp_path):
    write_tensors(tmp_path / "x", entries({"a": torch.zeros(3)}))
    TensorFile(tmp_path / "x").read("a").add_(1)
    assert TensorFile(tmp_path / "x").read("a").tolist() == [0, 0, 0]


def test_it_is_the_format_of_others(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {name: tensor for name, tensor in every_dtype().items() if "complex" not in name}
    write_tensors(tmp_path / "ours", entries(tensors))
    for name, tensor in safetensors.load_file(tmp_path / "ours").items():
        assert tensor.dtype == tensors[name].dtype and tensor.tolist() == tensors[name].tolist()
    safetensors.save_file(tensors, tmp_path / "theirs")
    theirs = TensorFile(tmp_path / "theirs")
    assert {name: theirs.read(name).tolist() for name in theirs.names()} == {n: t.tolist() for n, t in tensors.items()}


def test_a_dtype_without_a_code_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"'a' has a dtype that the file cannot hold; found: torch.complex128"):
        write_tensors(tmp_path / "x", entries({"a": torch.zeros(2, dtype=torch.complex128)}))
    with pytest.raises(CheckpointError, match=r"'a' is not what was announced"):
        write_tensors(tmp_path / "y", [Entry("a", torch.float32, (3,), lambda: torch.zeros(2))])


def header(change):
    entry = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    change(entry)
    text = json.dumps(entry).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 40,
        header(lambda e: e["a"].update(data_offsets=[0, 16])),
        header(lambda e: e["a"].update(data_offsets=[8, 0])),
        header(lambda e: e["a"].update(data_offsets=[-8, 0])),
        header(lambda e: e["a"].update(shape=[3])),
        header(lambda e: e["a"].update(shape=[-2, -1])),
        header(lambda e: e["a"].update(shape=[2.0])),
        header(lambda e: e["a"].update(dtype="X")),
        header(lambda e: e["a"].pop("shape")),
        header(lambda e: e.update(b=3)),
        (12).to_bytes(8, "little") + b"[" * 12,
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match="x is no file of tensors"):
        TensorFile(tmp_path / "x")


def test_a_name_that_is_not_there(tmp_path):
    write_tensors(tmp_path / "x", entries({"a": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"has no tensor 'b'; found: a"):
        TensorFile(tmp_path / "x").read("b")
