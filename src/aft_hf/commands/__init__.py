"""The options of each command of `aft-hf`, and the calls of the package that the command makes."""
