"""Texts, and any Hugging Face encoder."""
