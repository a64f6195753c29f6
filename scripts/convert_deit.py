"""Convert a trained ViT or DeiT to an AFT: the same as `aft-hf convert`.

python scripts/convert_deit.py facebook/deit-base-patch16-384 outputs/aft --kernel-size 25 --num-heads 32
"""

from aft_hf.cli import main


if __name__ == "__main__":
    main("convert")
