"""Train from a recipe: the same as `aft-hf train`; `accelerate launch scripts/train.py ...` for several processes.

    python scripts/train.py configs/examples/bytes_aft_local.yaml data.train=FILE
    python scripts/train.py configs/examples/bytes_aft_local.yaml data.train=FILE steps=500 model.hidden_size=128
    accelerate launch --config_file configs/accelerate/ddp.yaml scripts/train.py RECIPE.yaml data.train=FILE

The same command resumes from the newest checkpoint. SIGTERM and Ctrl-C save a checkpoint before the run stops; the
exit code is then 128 + the signal's number (143, 130).
"""

from aft_hf.cli import main


if __name__ == "__main__":
    main("train")
