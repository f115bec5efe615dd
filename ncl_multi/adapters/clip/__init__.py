"""Images and texts in one sparse space."""
