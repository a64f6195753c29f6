"""Entry point of `python -m aft_hf`, which equals the command `aft-hf`."""

from .cli import main


main()
