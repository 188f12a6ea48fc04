"""What works of each causal family of transformers: tiny checkpoints, parity, docs/models.md."""
