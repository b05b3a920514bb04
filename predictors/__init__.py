"""Guesses of which neurons a token needs, and the folders they are kept in."""
