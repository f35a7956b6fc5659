"""Pages for a browser: what all of them share, their head, style and escaping."""
