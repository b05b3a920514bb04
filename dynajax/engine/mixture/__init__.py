"""A mixture of experts inside the engine: what decodes and prefills where units are experts and not neurons."""
