"""The benchmark behind docs/benchmark.md: AFT models beside ViT, GPT-2 and the same models without mixing."""
