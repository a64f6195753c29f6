"""Attention Free Transformer (AFT) for Hugging Face transformers. Importing it registers AFT with the Auto classes."""

import sys

from transformers import PreTrainedTokenizerFast
from transformers.models import auto
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.utils import is_torchvision_available

from . import kernels  # noqa: F401  (registers the fast forms of the operation)
from ._version import __version__
from .caching_aft import AFTCache
from .configuration_aft import AFTConfig
from .conversion import convert_deit
from .data.byte_tokenizer import build_byte_tokenizer
from .mixers_aft import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple
from .modeling_aft import (
    HEADS,
    AFTBackbone,
    AFTForCausalLM,
    AFTForImageClassification,
    AFTForSequenceClassification,
    AFTForTokenClassification,
    AFTModel,
    AFTPreTrainedModel,
)
from .parallel import context_parallel, local_shard


# Register AFT with the Auto classes, so that `from_pretrained` and `pipeline` resolve `model_type` "aft".
auto.AutoConfig.register(AFTConfig.model_type, AFTConfig, exist_ok=True)
auto.AutoTokenizer.register(AFTConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
_processors: dict[str, type] = {"pil": ViTImageProcessorPil}
if is_torchvision_available():
    from transformers import ViTImageProcessor

    _processors["torchvision"] = ViTImageProcessor
auto.AutoImageProcessor.register(AFTConfig, image_processor_classes=_processors, exist_ok=True)
# `transformers serve` and TRL look up the class that config.json names in the module transformers. It replaces itself
# in `sys.modules` when some of its submodules are imported.
for _model in (AFTModel, AFTBackbone, *HEADS):
    getattr(auto, str(_model._auto_class)).register(AFTConfig, _model, exist_ok=True)
    setattr(sys.modules["transformers"], _model.__name__, _model)

__all__ = [
    "AFTAlibi",
    "AFTBackbone",
    "AFTCache",
    "AFTConfig",
    "AFTConv",
    "AFTForCausalLM",
    "AFTForImageClassification",
    "AFTForSequenceClassification",
    "AFTForTokenClassification",
    "AFTFull",
    "AFTLocal",
    "AFTModel",
    "AFTPreTrainedModel",
    "AFTSimple",
    "__version__",
    "build_byte_tokenizer",
    "context_parallel",
    "convert_deit",
    "local_shard",
]
