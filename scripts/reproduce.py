"""Test the paper's claims by short runs on several seeds, and write the page about them.

    python scripts/reproduce.py all --text tinyshakespeare.txt --images cifar10
    python scripts/reproduce.py 4 17 --text tinyshakespeare.txt
    python scripts/reproduce.py report

The same command resumes after an interruption: finished runs are not repeated, and an interrupted run resumes from its
last checkpoint.
"""

from aft_hf.reproduction.command import main


if __name__ == "__main__":
    main()
