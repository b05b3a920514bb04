"""Training predictors while a model, offloaded as it may be, reads a text; with checkpoints and a report."""
