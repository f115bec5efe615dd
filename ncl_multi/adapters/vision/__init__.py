"""Pictures without captions."""
