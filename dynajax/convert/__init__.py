"""Other programs' files -> the folders this program reads. Nothing found in a file is ever executed."""
