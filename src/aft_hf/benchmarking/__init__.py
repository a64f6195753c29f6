"""Benchmark of the speed and memory of AFT models and the models that they are compared with."""
