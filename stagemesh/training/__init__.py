"""Training of a language model over a (dp, pp, tp) topology, with checkpoints that move."""
