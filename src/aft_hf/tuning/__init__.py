"""Fine-tuning of saved image classifiers by transformers' Trainer, and evaluation of saved models."""
