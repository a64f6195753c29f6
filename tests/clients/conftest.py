"""A saved byte model as clients meet it: with the package, and by the code beside the weights."""

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
    """A new one for each test: clients change the side of its padding."""
    return build_byte_tokenizer(model_max_length=LONGEST)


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """The language model as a directory, with tokenizer and code, and a format of conversations."""
    directory = tmp_path_factory.mktemp("byte-model")
    language_model().save_pretrained(directory)
    tokenizer = build_byte_tokenizer(model_max_length=LONGEST)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(params=["package", "remote code"])
def load(request, saved) -> Callable[..., PreTrainedModel]:
    """`from_pretrained` of the saved language model, by the class of the package or by that of the code beside it."""
    model_class = AFTForCausalLM
    if request.param == "remote code":
        model_class = get_class_from_dynamic_module("modeling_aft.AFTForCausalLM", str(saved))
        assert model_class is not AFTForCausalLM
    return lambda **options: model_class.from_pretrained(saved, **options)


@pytest.fixture(scope="session")
def server_port(saved) -> Iterator[int]:
    """Where a server of the saved model listens, started as `aft-hf transformers serve` does."""
    if not is_serve_available():  # with gradio come fastapi and uvicorn, but openai does not
        pytest.skip("needs transformers[serving]: make clients")
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
