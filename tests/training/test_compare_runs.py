"""The table and the plot of finished runs."""

import json


def write_run(directory, model, bits, **recipe):
    directory.mkdir()
    results = {
        "metrics": {"validation": {"bits_per_byte": bits}, "test": {"bits_per_byte": bits + 0.1}},
        "parameters": 1_500_000,
        "steps": 20,
        "losses": [{"step": 10, "loss": 5.0}, {"step": 20, "loss": 4.0}],
        "evaluations": [{"step": 20, "bits_per_byte": bits}],
        "recipe": {"model": model, "global_batch_size": 8, **recipe},
    }
    (directory / "results.json").write_text(json.dumps(results))
    return directory


def test_runs_are_compared_in_a_table_and_a_picture(tmp_path, run_command):
    runs = [
        write_run(tmp_path / "a", {"architecture": "aft", "aft_type": "local"}, 2.5),
        write_run(
            tmp_path / "b", {"architecture": "gpt2"}, 2.8, paper={"rows": ["Table 4: T", "Table 5: U"], "score": 1.13}
        ),
    ]
    done = run_command("compare_runs.py", *runs, "--picture", tmp_path / "runs.png")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[2] == "| AFT-local | 1.50 M | 20 | 8 | bits per byte | 2.500 | 2.600 | - | ours |"
    assert rows[3].startswith("| GPT-2 |")
    assert rows[3].endswith("| 2.800 | 2.900 | 1.130 | Table 4: T; Table 5: U |")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_without_results_is_named(tmp_path, run_command):
    done = run_command("compare_runs.py", tmp_path)
    assert done.returncode == 1
    assert "results.json" in done.stderr and "Traceback" not in done.stderr
