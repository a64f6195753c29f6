"""What is run from a clone: the quickstart, the benchmark, the reproduction, and maintenance of the repository."""
