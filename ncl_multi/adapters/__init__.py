"""One folder per modality; they never import each other."""
