"""Codes of more items than fit in memory: files in, parquet shards out, resumable."""
