"""One module per layout or family of layouts; each exports LAYOUTS."""
