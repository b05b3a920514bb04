"""The decisions of a mixture of experts: who computes a layer's live experts, which are kept on the device, and which
is brought there early. NumPy (and SciPy for the bounds of the replay) only."""
