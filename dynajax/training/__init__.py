"""Training of the small models that ship with the repository: corpus, tokenizer, loop, report."""
