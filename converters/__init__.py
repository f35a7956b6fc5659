"""One file, one layout or one family of them; each exports LAYOUTS."""
