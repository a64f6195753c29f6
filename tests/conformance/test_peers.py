"""The common model tests of transformers on its GPT-2 and ViT, for the comparison in `make conformance-report`.

The source distribution of transformers lacks the test classes of these models, so this file defines its own.
"""

import unittest

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_modeling_common import (
    ModelTesterMixin,
    floats_tensor,
    ids_tensor,
    random_attention_mask,
)


class PeerTester:
    is_training = True
    batch_size = 5
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4

    def __init__(self, parent):
        self.parent = parent


class GPT2Tester(PeerTester):
    seq_length = 7
    vocab_size = 99

    def get_config(self):
        last = self.vocab_size - 1
        sizes = {"n_embd": self.hidden_size, "n_layer": self.num_hidden_layers, "n_head": self.num_attention_heads}
        tokens = {"bos_token_id": last, "eos_token_id": last, "pad_token_id": last}
        return GPT2Config(vocab_size=self.vocab_size, n_positions=64, **sizes, **tokens)

    def prepare_config_and_inputs_for_common(self):
        size = [self.batch_size, self.seq_length]
        inputs = {"input_ids": ids_tensor(size, self.vocab_size), "attention_mask": random_attention_mask(size)}
        return self.get_config(), inputs


class ViTTester(PeerTester):
    image_size, patch_size, num_channels = 30, 6, 3
    mask_length = (image_size // patch_size) ** 2  # patches of a mask, of which num_masks are masked
    num_masks = mask_length // 2
    seq_length = mask_length + 1

    def get_config(self):
        return ViTConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            image_size=self.image_size,
            patch_size=self.patch_size,
            num_channels=self.num_channels,
            num_labels=10,
        )

    def prepare_config_and_inputs_for_common(self):
        size = [self.batch_size, self.num_channels, self.image_size, self.image_size]
        return self.get_config(), {"pixel_values": floats_tensor(size)}


class GPT2Test(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (GPT2Model, GPT2LMHeadModel)

    def setUp(self):
        self.model_tester = GPT2Tester(self)


class ViTTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (ViTModel, ViTForImageClassification)
    test_resize_embeddings = False  # resizes token embeddings, which an image model lacks

    def setUp(self):
        self.model_tester = ViTTester(self)
