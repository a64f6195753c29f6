"""Data for AFT models."""
