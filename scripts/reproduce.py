"""The paper's claims tested by short runs on several seeds, and the page about them.

    python scripts/reproduce.py all --text tinyshakespeare.txt --images cifar10
    python scripts/reproduce.py 4 17 --text tinyshakespeare.txt
    python scripts/reproduce.py report

Run again, the same command goes on where it was: finished runs are not repeated, and one that was stopped resumes from
its last checkpoint.
"""

from aft_hf.reproduction.command import main


if __name__ == "__main__":
    main()
