"""The common model tests of transformers on AFT models of every type: `make conformance`.

docs/conformance.md says which tests are skipped, and why.
"""

import unittest

from torch import nn
from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_modeling_common import (
    ModelTesterMixin,
    floats_tensor,
    ids_tensor,
    random_attention_mask,
)

from aft_hf import (
    AFTConfig,
    AFTForCausalLM,
    AFTForImageClassification,
    AFTForSequenceClassification,
    AFTForTokenClassification,
    AFTModel,
)


class AFTModelTester:
    """Configs of tiny models of one type, and inputs for them. The common tests prescribe the attribute names."""

    is_training = True
    batch_size = 5
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = hidden_size  # the implicit attention (Eq. 3) is one map for each feature
    options = {"intermediate_size": 37, "num_heads": 4, "position_bias_dim": 8, "initializer_range": 0.02}

    def __init__(self, parent, aft_type):
        self.parent, self.aft_type = parent, aft_type

    def get_config(self):
        sizes = {"hidden_size": self.hidden_size, "num_hidden_layers": self.num_hidden_layers}
        return AFTConfig(aft_type=self.aft_type, **sizes, **self.options)


class AFTTextModelTester(AFTModelTester):
    seq_length = 7
    vocab_size = 99
    options = AFTModelTester.options | {
        "modality": "text",
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
        "window_size": 3,
        "kernel_size": 4,
        "bos_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 1,
        "pad_token_id": 0,  # below 10, because one of the tests reduces vocab_size to 10
    }

    def prepare_config_and_inputs_for_common(self):
        size = [self.batch_size, self.seq_length]
        inputs = {"input_ids": ids_tensor(size, self.vocab_size), "attention_mask": random_attention_mask(size)}
        return self.get_config(), inputs


class AFTImageModelTester(AFTModelTester):
    image_size, patch_size, num_channels = 30, 6, 3
    options = AFTModelTester.options | {
        "modality": "image",
        "image_size": image_size,
        "patch_size": patch_size,
        "num_channels": num_channels,
        "window_size": 4,
        "kernel_size": 3,
        "num_labels": 10,
    }

    @property
    def seq_length(self):
        return self.get_config().max_positions

    def prepare_config_and_inputs_for_common(self):
        size = [self.batch_size, self.num_channels, self.image_size, self.image_size]
        return self.get_config(), {"pixel_values": floats_tensor(size)}


class AFTTests(ModelTesterMixin):
    """Settings that the tests of text and image models share."""

    aft_type = None
    test_can_init_all_missing_weights_before_2023 = True  # else skipped: our files lack a copyright line with a year

    def setUp(self):
        self.model_tester = self.model_tester_class(self, self.aft_type)


class TextTests(AFTTests, GenerationTesterMixin):
    all_model_classes = (AFTModel, AFTForCausalLM, AFTForSequenceClassification, AFTForTokenClassification)
    model_tester_class = AFTTextModelTester


class ImageTests(AFTTests):
    all_model_classes = (AFTModel, AFTForImageClassification)
    model_tester_class = AFTImageModelTester
    test_resize_embeddings = False  # resizes token embeddings, which an image model lacks

    @unittest.skip("an image model embeds patches and takes no inputs_embeds, like the ViT of transformers")
    def test_inputs_embeds(self):
        pass

    test_inputs_embeds_matches_input_ids = test_inputs_embeds

    def test_model_get_set_embeddings(self):
        """The common test expects a token embedding; here a convolution embeds patches, as in ViT."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            self.assertIsInstance(model.get_input_embeddings(), nn.Conv2d)
            other = nn.Conv2d(1, 1, 1)
            model.set_input_embeddings(other)
            self.assertIs(model.get_input_embeddings(), other)
            self.assertIsNone(model.get_output_embeddings())


for _tests, _types in (
    (TextTests, ("full", "local", "simple", "conv", "alibi")),
    (ImageTests, ("full", "local", "simple", "conv")),
):
    for _type in _types:  # TextFullTest, TextLocalTest ...
        _name = f"{_tests.__name__.removesuffix('Tests')}{_type.capitalize()}Test"
        globals()[_name] = type(_name, (_tests, unittest.TestCase), {"aft_type": _type, "__module__": __name__})
