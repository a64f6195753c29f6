"""Fixtures: a Hub in memory, and saved models."""

import shutil
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))

import tiny
from hub import Hub

from aft_hf.publishing import upload, write_card


@pytest.fixture
def hub(monkeypatch):
    """A Hub in memory, which `publish` uses."""
    hub = Hub()
    monkeypatch.setattr(upload, "HfApi", lambda: hub)
    return hub


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


@pytest.fixture
def prepared(carded, tmp_path):
    """A copy of the saved image model with its card."""
    return Path(shutil.copytree(carded / "image", tmp_path / "tiny"))
