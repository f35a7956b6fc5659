"""Changes of an index before it is written: names, rows of the vocabulary, encodings, masters."""
