"""What every long run needs: steps, checkpoints, safe loading of checkpoints, and the lock of its directory."""
