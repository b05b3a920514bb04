"""flax.nnx definitions of the supported model families."""
