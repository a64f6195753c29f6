"""Fine-tuning and evaluation of saved models."""
