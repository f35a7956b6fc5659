"""How a tensor differs from its reference, in a word that says what went wrong."""
