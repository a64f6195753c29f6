"""Fixtures of the client tests: a saved byte model, loaded by the class of the package or by its remote code."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_models import LONGEST, language_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils.import_utils import is_serve_available

from aft_hf import AFTForCausalLM, build_byte_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A new byte tokenizer for each test, because clients change its padding side."""
    return build_byte_tokenizer(model_max_length=LONGEST)


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """Directory of the saved language model, with its code, its tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("byte-model")
    language_model().save_pretrained(directory)
    tokenizer = build_byte_tokenizer(model_max_length=LONGEST)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(params=["package", "remote code"])
def load(request, saved) -> Callable[..., PreTrainedModel]:
    """`from_pretrained` for the saved language model, by the class of the package or by that of its remote code."""
    model_class = AFTForCausalLM
    if request.param == "remote code":
        model_class = get_class_from_dynamic_module("modeling_aft.AFTForCausalLM", str(saved))
        assert model_class is not AFTForCausalLM
    return lambda **options: model_class.from_pretrained(saved, **options)


@pytest.fixture(scope="session")
def server_port(saved) -> Iterator[int]:
    """Port of a server of the saved model, started as `aft-hf transformers serve` starts it."""
    if not is_serve_available():  # gradio installs fastapi and uvicorn, but not openai
        pytest.skip("needs transformers[serving]: run `make clients`")
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Serve(force_model=str(saved), port=port, device="cpu", non_blocking=True)
    try:
        while not server.server.started and server._thread.is_alive():
            time.sleep(0.05)
        yield port
    finally:
        server.kill_server()
