"""A saved byte model as clients meet it: with the package, and by the code beside the weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
from client_models import LONGEST, language_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from aft_hf import AFTForCausalLM, build_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_byte_tokenizer(model_max_length=LONGEST)


@pytest.fixture(scope="session")
def saved(tokenizer, tmp_path_factory) -> Path:
    """The language model as a directory, with tokenizer and code."""
    directory = tmp_path_factory.mktemp("byte-model")
    language_model().save_pretrained(directory)
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
