"""Baselines: other linear or attention-free layers that the paper compares AFT with, in the blocks of an AFT.

Importing this package registers `BaselineConfig` with the Auto classes, so that a recipe can have `architecture:
aft-baseline`. The models are for training and evaluation in comparisons with AFT: they do not generate, take no masks,
and are not published.
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from .configuration import BaselineConfig
from .lambda_layer import LambdaLayer
from .linear_attention import LinearAttention, Performer
from .modeling import BaselineForCausalLM, BaselineForImageClassification
from .synthesizer import DenseSynthesizer


AutoConfig.register(BaselineConfig.model_type, BaselineConfig, exist_ok=True)
AutoModelForCausalLM.register(BaselineConfig, BaselineForCausalLM, exist_ok=True)
AutoModelForImageClassification.register(BaselineConfig, BaselineForImageClassification, exist_ok=True)

__all__ = [
    "BaselineConfig",
    "BaselineForCausalLM",
    "BaselineForImageClassification",
    "DenseSynthesizer",
    "LambdaLayer",
    "LinearAttention",
    "Performer",
]
