"""One file, one layout; each exports LAYOUT."""
