"""One engine a process: each reads commands from stdin, runs and times them, and answers on stdout."""
