"""Whether the engine computes what the checkpoint says, on this machine: compared with the plain reference."""

from dynajax.verify.checking import Report, Run, Settings, verify

__all__ = ["Report", "Run", "Settings", "verify"]
