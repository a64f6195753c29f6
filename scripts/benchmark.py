"""Compare the speed and memory of AFT with other models: the same as `aft-hf benchmark`.

    python scripts/benchmark.py --suite all --json outputs/benchmark.json --markdown outputs/benchmark.md
    python scripts/benchmark.py --suite causal --only "AFT-local*T=4096*" --repeats 11
    python scripts/benchmark.py --no-measure --markdown outputs/benchmark.md

A full run takes more than an hour; the same command resumes after an interruption.
"""

from aft_hf.cli import main


if __name__ == "__main__":
    main("benchmark")
