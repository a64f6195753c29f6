"""`python -m aft_hf` is the command `aft-hf`."""

from .cli import main


main()
