"""Fixtures: a mock server of the Hub, clients in this process, and saved models."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import _http


sys.path.insert(0, str(Path(__file__).parent))

import tiny
from hub import Hub

from aft_hf.publishing import write_card


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture
def waits(monkeypatch):
    """The pauses of the clients in this process, which are recorded instead of waited for."""
    pauses: list[float] = []
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=pauses.append))
    return pauses


@pytest.fixture
def online(monkeypatch, waits):
    """Allow this process to use the mock server despite the environment, without Xet, which it does not support."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    huggingface_hub.utils.disable_progress_bars()
    yield
    huggingface_hub.utils.enable_progress_bars()


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Directory of a saved text and a saved image model. Copy them before changing them."""
    root = tmp_path_factory.mktemp("saved")
    for task in ("text", "image"):
        tiny.save(tiny.build(task, "conv"), root / task)
    return root


@pytest.fixture
def directory(saved, tmp_path):
    """A copy of the saved image model."""
    return Path(shutil.copytree(saved / "image", tmp_path / "tiny"))


@pytest.fixture(scope="session")
def carded(saved, tmp_path_factory):
    """The saved models with their cards, which take time to draw. Copy them before changing them."""
    root = tmp_path_factory.mktemp("carded")
    for task in ("text", "image"):
        shutil.copytree(saved / task, root / task)
        write_card(root / task, repo_id="me/tiny")
    return root
