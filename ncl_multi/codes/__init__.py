"""What can be done with codes: store, search, explain, name, shorten, export."""
