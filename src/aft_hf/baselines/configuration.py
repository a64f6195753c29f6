"""Configuration of the baselines: an AFT whose mixers are layers that the paper compares AFT with."""

import os
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ..configuration_aft import AFTConfig, raise_value_errors


MIXERS = {"text": ("linear", "performer", "synthesizer"), "image": ("lambda",)}


@raise_value_errors
@strict
class BaselineConfig(AFTConfig):
    r"""
    Configuration of a baseline. Embeddings, norms, MLPs and heads are those of `AFTConfig`, whose fields on position
    biases, keys and queries have no effect here.

    Args:
        mixer (`str`, defaults to `"linear"`):
            For text `"linear"` (Linear Transformer, Katharopoulos et al. 2020), `"performer"` (Choromanski et al.
            2021) or `"synthesizer"` (the dense one of Tay et al. 2021); for images `"lambda"` (Bello 2021).
        num_heads (`int`, defaults to 1): Heads of the mixer.
        key_dim (`int`, defaults to 16): Width |k| of the queries and keys of a head of `"lambda"`.
        num_random_features (`int`, *optional*):
            Features of a head of `"performer"`; d_h log d_h by default, with d_h the width of a head.
    """

    model_type = "aft-baseline"

    mixer: str = "linear"
    aft_type: str | list[str] = "simple"
    key_dim: int = 16
    num_random_features: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.use_cls_token is None:
            self.use_cls_token = False
        super().__post_init__(**kwargs)

    def validate_mixer(self) -> None:
        allowed = MIXERS[self.modality]
        if self.mixer not in allowed:
            raise ValueError(
                f"mixer with modality={self.modality!r} must be one of {', '.join(allowed)}, got {self.mixer!r}"
            )
        if self.mixer == "lambda" and self.use_cls_token:
            raise ValueError("a lambda layer has no class token: set use_cls_token=False")
        for name in ("key_dim", "num_random_features"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 2**17:
                raise ValueError(f"{name} must be in 1 .. {2**17}, got {value}")

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save the config like any config of transformers, without code."""
        PreTrainedConfig.save_pretrained(self, save_directory, push_to_hub=push_to_hub, **kwargs)


BaselineConfig._auto_class = None  # AFTConfig sets it to save its code
