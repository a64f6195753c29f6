"""No file of a checkpoint runs code when a run resumes, even if an attacker has updated the checksums."""

import pickle
import shutil
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as sharded
from runs import Payload, bytes_recipe, plant, run, saved_payload

from aft_hf.errors import InputError
from aft_hf.running.safe_loading import data_only


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    values = bytes_recipe(tmp_path_factory.mktemp("original"), steps=3)
    run(values)
    return values


CONTENTS = {
    "a pickle": lambda marker: pickle.dumps(Payload(marker)),
    "a file of torch": saved_payload,
    "an old file of torch": partial(saved_payload, _use_new_zipfile_serialization=False),
}


# The files of a run by one process, and names that other strategies or an earlier version read.
FILES = ["model.safetensors", "optimizer.bin", "random_states_0.pkl"]
OTHERS = ["pytorch_model.bin", "custom_checkpoint_0.pkl", "scheduler.bin", "scaler.pt", "sampler.bin"]
OTHERS += ["dl_state_dict.bin", "optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata"]
OTHERS += ["pytorch_model_fsdp_0/__0.metadata"]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", [*FILES, *OTHERS])
def test_a_payload_in_any_file_is_not_run_and_ends_in_one_line(tmp_path, original, name, content):
    values = original | {"output_dir": str(tmp_path / "run"), "steps": 6}
    shutil.copytree(original["output_dir"], values["output_dir"])
    checkpoint = tmp_path / "run/checkpoints/step-000000003"
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    plant(checkpoint, name, CONTENTS[content](tmp_path / "marker"))
    with pytest.raises(ValueError, match=rf"{checkpoint}") as stopped:
        run(values)
    assert "\n" not in str(stopped.value) and ("Traceback" not in str(stopped.value))
    if name != "model.safetensors":
        assert f"{name} is not read" in str(stopped.value)
    if content == "a file of torch" and name == "optimizer.bin":
        assert "it names posix.mkdir, which could run code" in str(stopped.value)
    assert not (tmp_path / "marker").exists()
    assert checkpoint.is_dir()  # renamed only after another checkpoint has been loaded


def test_of_shards_tensors_and_numbers_are_read_and_objects_are_not_run(tmp_path):
    """By itself, `torch.distributed.checkpoint` unpickles everything but tensors without restriction."""
    state = {"weight": torch.arange(3.0), "half": torch.ones(2, 2).bfloat16(), "rate": 0.5, "step": torch.tensor(3)}
    loaded = {"weight": torch.zeros(3), "half": torch.zeros(2, 2).bfloat16(), "rate": 0.0, "step": torch.tensor(0)}
    sharded.save(state, checkpoint_id=tmp_path / "shards", no_dist=True)
    with data_only(tmp_path):
        sharded.load(loaded, checkpoint_id=tmp_path / "shards", no_dist=True)
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)

    sharded.save(state | {"rate": Payload(tmp_path / "marker")}, checkpoint_id=tmp_path / "shards", no_dist=True)
    shutil.rmtree(tmp_path / "marker", ignore_errors=True)  # saving may copy the payload, which makes the directory
    with pytest.raises(InputError, match="contains objects other than tensors"), data_only(tmp_path):
        sharded.load(loaded, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert not (tmp_path / "marker").exists()
    sharded.load(loaded, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert (tmp_path / "marker").exists()  # the payload works without `data_only`


def test_a_folder_of_shards_that_lies_elsewhere_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".metadata").write_bytes(CONTENTS["a pickle"](tmp_path / "marker"))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "pytorch_model_fsdp_0").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(InputError, match="pytorch_model_fsdp_0 is not read: it is a symlink"),
        data_only(tmp_path / "checkpoint"),
    ):
        sharded.load({"weight": torch.zeros(2)}, checkpoint_id=str(tmp_path / "checkpoint" / "pytorch_model_fsdp_0"))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["torch load", "torch.distributed.checkpoint.metadata Enum", "collections Counter"])
def test_a_table_of_shards_names_only_the_types_of_such_tables(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(f"c{name.replace(' ', chr(10))}\n.".encode())
    with pytest.raises(InputError, match=f"it names {name.replace(' ', '.')}, "), data_only(tmp_path):
        pass


class Attribute:
    """An object that is pickled as `getattr(kind, name)`."""

    def __init__(self, kind, name):
        self.attribute = kind, name

    def __reduce__(self):
        return getattr, self.attribute


def test_a_table_of_shards_names_members_of_enums_as_attributes_and_no_other_attribute(tmp_path, monkeypatch):
    """Python 3.11.2 pickles a member of an enum as `getattr(class, name)`."""
    enum = sharded.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    state, loaded = {"weight": torch.arange(3.0)}, {"weight": torch.zeros(3)}
    sharded.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    with data_only(tmp_path):
        sharded.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    torch.testing.assert_close(loaded, state)
    for attribute in (Attribute(enum, "mro"), Attribute(sharded.metadata.Metadata, "__init__")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(attribute))
        with pytest.raises(InputError, match=r"it names builtins\.getattr, "), data_only(tmp_path):
            pass
